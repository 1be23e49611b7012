"""Attention over all pairs of queries and keys: the public calls, the reference and the fast implementations."""
