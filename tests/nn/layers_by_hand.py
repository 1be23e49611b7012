"""`regard.nn.Attention` by its formulas: small layers, and what they compute, written out."""

import math

import torch
from contracts import oracle
from dense_fast_weights import numbers as draw

from regard.nn import Attention

B, C, H = 2, 32, 4
D = C // H


def layer(**options):
    """A float64 layer whose ridge and norms are not those of the start."""
    torch.manual_seed(1)
    module = Attention(C, H, **options).double()
    with torch.no_grad():
        if getattr(module, "ridge_proj", None) is not None:
            module.ridge_proj.weight.copy_(0.5 * draw(*module.ridge_proj.weight.shape, seed=9))
        for part in ("q", "k", "out"):
            norm = getattr(module, f"{part}_norm", None)
            if getattr(norm, "weight", None) is not None:
                norm.weight.copy_(1 + 0.3 * draw(D, seed=6))
    return module


def turn(x, angles):
    """Rotation as multiplication of complex numbers, [..., D]."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def angles_of(positions, theta=10000.0, dtype=torch.float64):
    return positions[..., None] * theta ** (-torch.arange(0, D, 2, dtype=dtype) / D)


def normalised(x, kind, gain=None, eps=1e-6):
    """RMSNorm, or the unit vector."""
    size = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x / size * (1 if gain is None else gain) if kind == "rms" else x / (size * math.sqrt(x.shape[-1]))


def visible(tokens, mask=None, window=None, exclude_self=False):
    """The causal rule, the window and the mask, pair by pair: [B, 1, T, T]."""
    mask = None if mask is None else mask[:, None, None]
    rule = {"is_causal": True, "window": window, "exclude_self": exclude_self}
    return oracle.visible(B, 1, tokens, tokens, attn_mask=mask, **rule)


def by_hand(module, x, allowed, scale=None, angles=None, norm=None, **params):
    """The output by the formulas of `contracts.oracle` for the layer's spec over the allowed keys [B, 1, T, T].

    `angles` is [T, D/2] or [B or 1, T, D/2], `scale` a number or [B, 1, T], `norm` a kind of `normalised`, and `params`
    hold the ridge [B, H, T] or [B, H, T, D], or the probe, for degree 1.
    """
    parts = ("k" if module.share_query_key else "q", "k", "v")
    q, k, v = (getattr(module, f"{part}_proj")(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)
    if norm is not None:
        gains = [getattr(getattr(module, f"{part}_norm"), "weight", None) for part in parts[:2]]
        q, k = normalised(q, norm, gains[0]), normalised(k, norm, gains[1])
    if angles is not None:
        angles = angles[:, None] if angles.dim() == 3 else angles
        q, k = turn(q, angles), turn(k, angles)
    out, _ = oracle.attention(oracle.read(module.spec), q, k, v, allowed, scale, params)
    out = out if module.out_norm is None else normalised(out, "rms", module.out_norm.weight)
    out = out.transpose(1, 2).flatten(2)
    return module.o_proj(out if module.gate_proj is None else out / (1 + torch.exp(-module.gate_proj(x))))


TEMPERATURES = ("fixed(value=2)", "learned", "log", "power", "power(exponent=0.5)")


def multiplier(text, n):
    """What a temperature multiplies the scale by at its start, for n visible keys."""
    return {
        "fixed": 1.0,
        "fixed(value=2)": 0.5,
        "learned": 1.0,
        "log": 0.43 * math.log(max(n, 2)),
        "power": 0.5 + 0.5 * n**0.25,
        "power(exponent=0.5)": 0.5 + 0.5 * n**0.5,
    }[text]


RIDGES = ("learned", "learned(start=0.5,floor=0.01,link=softplus)", "learned-per-dimension")


def ridge_values(text, x):
    """Equation 27 with its floor, of what the projection gives."""
    return 0.01 + torch.log1p(x.exp()) if "softplus" in text else 0.001 + 1 / (1 + torch.exp(-x))


def by_options(module, x, mask=None, angles=None, window=None, exclude_self=False, temperature="fixed", qk_norm=None,
               ridge="fixed", **_):  # fmt: skip
    """The output of a layer that was made with these options, by `by_hand`."""
    allowed, params = visible(x.shape[1], mask, window, exclude_self), {}
    scale = torch.tensor([[multiplier(temperature, int(n)) for n in row] for row in allowed[:, 0].sum(-1)]).double()
    scale = scale[:, None] * (D**0.5 if qk_norm == "l2" else D**-0.5)
    if ridge != "fixed":
        found = ridge_values(ridge, x @ module.ridge_proj.weight.T + module.ridge_proj.bias)
        params["ridge"] = found.unflatten(-1, (H, -1)).transpose(1, 2).squeeze(-1)
    return by_hand(module, x, allowed, scale, angles, qk_norm, **params)
