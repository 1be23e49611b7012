"""Attention over all pairs of queries and keys: one call, its reference form and its fast forms."""
