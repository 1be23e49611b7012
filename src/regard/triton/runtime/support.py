"""Where the kernels run: on CUDA devices, and for tests on the CPU in Triton's interpreter."""

from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from ...pairwise.dispatch import Problem
from .interpreting import interpreted
from .launch import watching

OLDEST = (3, 6)  # the oldest Triton version that compiles the kernels


def _missing() -> str | None:
    if not find_spec("triton"):
        return "needs triton, which is not installed: pip install 'regard[gpu]'"
    try:
        installed = version("triton")
    except PackageNotFoundError:  # installed under another name
        return None
    if tuple(map(int, installed.split(".")[:2])) < OLDEST:
        return f"needs triton >= {OLDEST[0]}.{OLDEST[1]}, installed is {installed}: pip install 'regard[gpu]'"
    return None


MISSING = _missing()  # None if a suitable triton is installed, else what to do
DTYPES = (torch.float32, torch.bfloat16)
WIDEST = 256  # maximum features of keys and of values
GRID = 65535  # CUDA's limit of programs along the second and third axis of a grid, which kernels use for heads


def before_hopper(device: torch.device) -> bool:
    """Return whether products on a device take operands from registers (compute capability below 9)."""
    if interpreted():
        return False
    from triton.runtime import driver

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        arch = driver.active.get_current_target().arch
    return isinstance(arch, int) and arch < 90


def unsupported_device(device: str) -> str | None:
    """Return None if kernels run on tensors of that device, else the reason."""
    if device == "cuda" or (device == "cpu" and (interpreted() or watching())):
        return None
    return f"runs on CUDA devices (on the CPU only under TRITON_INTERPRET=1); the tensors are on {device}"


def unsupported(problem: Problem) -> str | None:
    """Return None if an attention kernel supports the call, else the reason."""
    device = unsupported_device(problem.device)
    if device is not None:
        return device
    if problem.dtype not in DTYPES:
        return f"computes in float32 and bfloat16; the inputs are {problem.dtype}"
    if max(problem.dim, problem.value_dim) > WIDEST:
        return f"holds rows of at most {WIDEST} features; these have {problem.dim} and {problem.value_dim}"
    if problem.batch * problem.heads > GRID:
        return f"takes at most {GRID} heads of all sequences together; there are {problem.batch * problem.heads}"
    if problem.transformed:
        return "is differentiable once, backward: no forward mode, no torch.func transforms"
    if problem.mask == "pairs":
        return "takes a mask over keys, not one over pairs of queries and keys"
    return None
