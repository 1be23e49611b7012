"""impl="cpu": row solvers in numba for compactly supported kernels."""
