"""Grids of one's own."""
