"""Kernels in Triton. Nothing here imports triton before a kernel runs, so that regard does without it.

`support` says when the kernels run; `launch` runs one; `tiles` holds the block sizes that are shipped; `span` gives
kernels the keys that each query sees. What is registered from here: `impl="triton"` of `regard.attention`
(`attention`) and of `regard.fast_weight_memory`.
"""
