"""Shared by all kernels: launching, tile sizes, ranges of visible keys, loads."""
