"""Rotary position embeddings (RoPE, Su et al. 2021, arXiv:2104.09864).

Each pair of channels is rotated by position times frequency: dot products of query and key depend only on distance.

Shapes: B batch, H heads, T tokens, D channels of a head (even).
"""

import torch
from torch import Tensor

from ...checks import ArgumentError, is_integer, number, refuse, shape, tensor, whole

Rotary = tuple[Tensor, Tensor] | None
"""(cos, sin) of `rotary_angles`, each [B or 1, T, R/2] with R <= D; None for no positions."""


def rotary_angles(
    position_ids: Tensor, head_dim: int, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotation angles.

    Angles are computed in float32: in bfloat16 neighbouring positions above 256 would share one angle.

    Args:
        position_ids: integer positions, [B, T] or [1, T].
        head_dim: channels of a head, even.
        theta: base of the wavelengths; pair i rotates by theta^(-2i/D) radians per token.
        dtype: dtype of the result.

    Returns:
        (cos, sin), each [B, T, D/2].

    Raises:
        ArgumentError: `head_dim` is odd or not positive, or a wrong dtype.
    """
    call = "rotary_angles"
    if not is_integer(position_ids):
        raise refuse(call, "position_ids", position_ids, "integers [B, T]")
    if whole(call, "head_dim", head_dim) < 1 or head_dim % 2:
        raise ArgumentError(f"{call}: head_dim is {head_dim}, expected a positive even number.")
    theta = number(call, "theta", theta, low=0.0, strict=True)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise refuse(call, "dtype", dtype, "a floating-point torch.dtype")
    pair = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    angle = position_ids[..., None].float() * theta ** (-pair / head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + R/2}) of every head by the angles of `rotary_angles`.

    Args:
        x: [B, H, T, D].
        cos, sin: [B, T, R/2] or [1, T, R/2] with R <= D; the channels from R on are not rotated.

    Returns:
        [B, H, T, D], in the dtype of `x`.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    tensor("rotate", "x", x, "B", "H", "T", "D")
    check_angles("rotate", (cos, sin), (x.shape[0], x.shape[2], x.shape[3]), x, "x")
    rotated = 2 * cos.shape[-1]
    rest = x[..., rotated:]
    first, second = x[..., :rotated].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    # Under autocast the angles keep the hidden states' wider dtype; queries and keys must not.
    parts = (first * cos - second * sin, second * cos + first * sin, *((rest,) if rest.shape[-1] else ()))
    return torch.cat(parts, dim=-1).to(x.dtype)


def check_angles(call: str, angles: tuple[Tensor, Tensor], sizes: tuple[int, int, int], like: Tensor, of: str) -> None:
    """Check that cos and sin are each [B or 1, T, R/2] with R <= D, for `sizes` (B, T, D), on the device of `like`."""
    batch, tokens, dim = sizes
    for name, x in zip(("cos", "sin"), angles, strict=True):
        tensor(call, name, x, "B or 1", tokens, "R/2", like=like, of=of, why=f", T as in {of}")
        if (x.shape[0] != 1 and x.shape[0] != batch) or 2 * x.shape[2] > dim or x.shape[2] != angles[0].shape[2]:
            rows = "1" if batch == 1 else f"{batch} or 1"
            expected = f"[{rows}, {tokens}, R/2] for both cos and sin, with R at most {dim}, the channels of a head"
            raise ArgumentError(f"{call}: {name} has shape {shape(x)}, expected {expected}.")


def in_heads(x: Tensor, dim: int, positions: Rotary = None) -> Tensor:
    """Return [B, heads, T, D] for x [B, T, heads D], rotated by positions."""
    heads = x.unflatten(-1, (-1, dim)).transpose(1, 2)
    return heads if positions is None else rotate(heads, *positions)
