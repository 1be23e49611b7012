"""Hybrid models: any spec or token mixer per layer, memories at chosen depths."""
