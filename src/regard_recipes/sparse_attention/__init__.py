"""Experiments of the sparse-attention paper."""
