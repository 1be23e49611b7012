"""Attention with compactly supported kernels: search of the threshold, forward, backward."""
