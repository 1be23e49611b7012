"""Compare the recurrent functions with the naive forms of fla (PyPI: flash-linear-attention).

The naive forms compute in float32 and take [B, T, H, D]; regard takes [B, H, T, D]. Packed calls take `cu_seqlens`
there and `segment_ids` here.
"""

import warnings

import pytest
import torch
from torch import Tensor

import regard

pytest.importorskip("fla", reason="flash-linear-attention is not installed: run `make test-peers`")
pytestmark = pytest.mark.peers

B, H, T, K, V = 2, 3, 37, 16, 24
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.filterwarnings("ignore", message="Triton is not supported")


def _inputs(seed: int = 0, keys: int = T) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [B, H, T, K], unit keys [B, H, keys, K], v [B, H, keys, V] and beta in (0, 1) [B, H, keys]."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, T, K, generator=draw)
    k = torch.nn.functional.normalize(torch.randn(B, H, keys, K, generator=draw), dim=-1)
    v = torch.randn(B, H, keys, V, generator=draw)
    return q, k, v, torch.rand(B, H, keys, generator=draw)


def _decay(*sizes: int) -> Tensor:
    return -torch.rand(sizes, generator=torch.Generator().manual_seed(9))


def _turned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, T, ...] as [B, T, H, ...] and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


@pytest.mark.parametrize("form", ["chunked", "parallel", "recurrent"])
def test_delta_rule(form: str) -> None:
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    q, k, v, beta = _inputs()
    expected, state = delta_rule_recurrence(q, k, v, beta)
    out, after = regard.delta_rule(q, k, v, beta, scale=K**-0.5, form=form)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    torch.testing.assert_close(after.values, state, **TOLERANCE)


def test_gated_delta_rule() -> None:
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k, v, beta = _inputs()
    g = _decay(B, H, T)
    expected, state = naive_recurrent_gated_delta_rule(*_turned(q, k, v, beta, g), output_final_state=True)
    out, after = regard.delta_rule(q, k, v, beta, log_decay=g, scale=K**-0.5)
    torch.testing.assert_close(out, expected.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(after.values, state, **TOLERANCE)


def test_kimi_delta_attention_is_the_delta_rule_with_a_decay_per_channel() -> None:
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k, v, beta = _inputs()
    g = _decay(B, H, T, K)
    expected, state = naive_recurrent_kda(*_turned(q, k, v, g, beta), output_final_state=True)
    out, after = regard.delta_rule(q, k, v, beta, log_decay=g, scale=K**-0.5)
    torch.testing.assert_close(out, expected.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(after.values, state, **TOLERANCE)


def test_delta_product_is_the_delta_rule_with_interleaved_keys() -> None:
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    steps = 3
    q, k, v, beta = _inputs(keys=T * steps)
    beta, g = 2 * beta, _decay(B, H, T)
    expected, state = naive_recurrent_gated_delta_product(
        *_turned(q, k, v, g, beta), scale=K**-0.5, num_householder=steps
    )
    repeated = q.repeat_interleave(steps, 2)  # only the row after a token's last step is read
    fade = torch.nn.functional.pad(g[..., None], (0, steps - 1)).flatten(2)  # each token fades once, at its first step
    out, after = regard.delta_rule(repeated, k, v, beta, log_decay=fade, scale=K**-0.5)
    torch.testing.assert_close(out[:, :, steps - 1 :: steps], expected.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(after.values, state, **TOLERANCE)


def test_packed_delta_product() -> None:
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    q, k, v, beta = (x[:1] for x in _inputs())
    g, cuts = _decay(1, H, T), [0, 5, 21, T]
    expected, state = naive_recurrent_gated_delta_product(
        *_turned(q, k, v, g, beta), scale=K**-0.5, cu_seqlens=torch.tensor(cuts)
    )
    lengths = torch.tensor(cuts).diff()
    segments = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    out, after = regard.delta_rule(q, k, v, beta, log_decay=g, scale=K**-0.5, segment_ids=segments)
    torch.testing.assert_close(out, expected.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(after.values, state, **TOLERANCE)


def test_gated_linear_attention() -> None:
    from fla.ops.gla.naive import naive_recurrent_gla

    q, k, v, _ = _inputs()
    g = _decay(B, H, T, K)
    expected, state = naive_recurrent_gla(*_turned(q, k, v, g), output_final_state=True)
    out, after = regard.linear_attention(q, k, v, "linear*unnormalised", log_decay=g, scale=K**-0.5)
    torch.testing.assert_close(out, expected.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(after.values[:, :, :K], state, **TOLERANCE)


def test_retention() -> None:
    from fla.ops.retention.naive import naive_retention

    q, k, v, _ = _inputs()
    decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(H))))
    out, _ = regard.linear_attention(q, k, v, "linear*unnormalised", log_decay=decay, scale=K**-0.5)
    torch.testing.assert_close(out, naive_retention(q, k, v), **TOLERANCE)


def test_mesa() -> None:
    from fla.ops.mesa_net.naive import naive_mesa_net_exact

    q, k, v, beta = _inputs()
    v, g = v[..., :K], _decay(B, H, T)
    ridge = 0.25 + torch.rand(H, K, generator=torch.Generator().manual_seed(3))
    q_, k_, v_, g_, beta_ = _turned(q, k, v, g, beta)
    expected, gram, _ = naive_mesa_net_exact(q_, k_, v_, g_, ridge, beta_)
    out, after = regard.mesa_attention(q, k, v, ridge=ridge, log_decay=g, beta=beta)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(after.gram, gram, **TOLERANCE)


@pytest.mark.parametrize("window", [None, 7])
def test_parallax_is_local_linear_attention_with_a_given_probe(window: int | None) -> None:
    from fla.ops.parallax.naive import naive_parallax

    q, k, v, _ = _inputs()
    v, r = v[..., :K], torch.randn(B, H, T, K, generator=torch.Generator().manual_seed(5))
    q_, r_, k_, v_ = _turned(q, r, k, v)
    expected = naive_parallax(q_, r_, k_, v_, window_size=window)
    out = regard.local_linear_attention(q, k, v, solver="learned", probe=r, is_causal=True, window=window)
    torch.testing.assert_close(out, expected.transpose(1, 2), **TOLERANCE)
