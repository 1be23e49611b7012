"""`regard.nn.Attention` by its formulas: small layers, and what they compute, written out."""

import math

import torch

from regard.nn import Attention

B, C, H = 2, 32, 4
D = C // H


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(**options):
    """A float64 layer whose ridge and norms are not those of the start."""
    torch.manual_seed(1)
    module = Attention(C, H, **options).double()
    with torch.no_grad():
        if getattr(module, "ridge_proj", None) is not None:
            module.ridge_proj.weight.copy_(0.5 * draw(*module.ridge_proj.weight.shape, seed=9))
        for part in "qk":
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


def visible(tokens, mask=None, window=None, strict=False):
    """The causal rule, the window and the mask, pair by pair: [B, T, T]."""
    window = tokens + 1 if window is None else window
    allowed = torch.tensor([[i - strict - window < j <= i - strict for j in range(tokens)] for i in range(tokens)])
    return allowed.expand(B, tokens, tokens) & (True if mask is None else mask[:, None, :])


WEIGHINGS = {"softmax": torch.exp, "relumax": lambda z: (z - z.amax(-1, keepdim=True) + 1).clamp_min(0)}


def intercepts(p, q, k, v, ridge):
    """The intercept b of min sum_j p_j |v_j - b - W (k_j - q)|^2 + sum_d ridge_d |W_d|^2 of every row, by least squares
    on augmented rows; p [B, H, T, T], ridge [B, H, T, 1 or D]."""
    away = k[:, :, None] - q[:, :, :, None]
    root = p.sqrt()[..., None]
    slopes = torch.nn.functional.pad(torch.diag_embed(ridge.expand_as(q).sqrt()), (1, 0))
    left = torch.cat((root * torch.cat((torch.ones_like(root), away), -1), slopes), -2)
    right = torch.cat((root * v[:, :, None], v.new_zeros(*q.shape, v.shape[-1])), -2)
    return torch.linalg.lstsq(left, right, driver="gelsd").solution[..., 0, :]


def by_hand(module, x, allowed, weigh=torch.exp, scale=None, angles=None, norm=None, ridge=None):
    """The output: weights of `weigh(scores)` over the allowed keys [B, T, T], times values, projected.

    `angles` is [T, D/2] or [B or 1, T, D/2], `scale` a number or [B, 1, T, 1], `norm` a kind of `normalised`, and
    `ridge` [B, H, T, 1 or D] for degree 1.
    """
    parts = ("k" if module.share_query_key else "q", "k", "v")
    q, k, v = (getattr(module, f"{part}_proj")(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)
    if norm is not None:
        gains = [getattr(getattr(module, f"{part}_norm"), "weight", None) for part in parts[:2]]
        q, k = normalised(q, norm, gains[0]), normalised(k, norm, gains[1])
    if angles is not None:
        angles = angles[:, None] if angles.dim() == 3 else angles
        q, k = turn(q, angles), turn(k, angles)
    k, v = (y.repeat_interleave(H // y.shape[1], 1) for y in (k, v))
    z = (q @ k.mT * (D**-0.5 if scale is None else scale)).masked_fill(~allowed[:, None], -math.inf)
    p = weigh(z)
    p = (p / p.sum(-1, keepdim=True)).nan_to_num(0)
    out = p @ v if ridge is None else intercepts(p, q, k, v, ridge)
    return module.o_proj(out.transpose(1, 2).flatten(2))


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


def by_options(module, x, mask=None, angles=None, spec="softmax", window=None, exclude_self=False, temperature="fixed",
               qk_norm=None, ridge="fixed", **_):  # fmt: skip
    """The output of a layer that was made with these options, by `by_hand`."""
    tokens = x.shape[1]
    allowed = visible(tokens, mask, window, exclude_self)
    scale = torch.tensor([[multiplier(temperature, int(n)) for n in row] for row in allowed.sum(-1)]).double()
    scale = scale[:, None, :, None] * (D**0.5 if qk_norm == "l2" else D**-0.5)
    found = None
    if ridge != "fixed":
        found = x @ module.ridge_proj.weight.T + module.ridge_proj.bias
        found = ridge_values(ridge, found).view(B, tokens, H, -1).transpose(1, 2)
    elif "linear" in spec:
        found = torch.full((B, H, tokens, 1), 0.7 if "0.7" in spec else 0.1, dtype=torch.float64)
    weigh = WEIGHINGS["relumax" if "relumax" in spec else "softmax"]
    return by_hand(module, x, allowed, weigh, scale, angles, qk_norm, found)
