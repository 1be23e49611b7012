"""Triton kernels for NVIDIA GPUs. Nothing here imports triton before a kernel runs."""
