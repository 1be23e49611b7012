"""Memories: product-key tables, fast weights that are written at test time, associative memories."""
