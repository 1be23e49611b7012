"""Peak memory of a forward and a backward pass, measured in a fresh process."""

import pytest
from peak import on_linux, peak

pytest.importorskip("numba")

SCORES = (2048, 2048)  # 16 MiB
HEAD = (1, 1, 16384, 64)  # all pairs at once are 1024 MiB
HEADS = (1, 8, 8192, 64)  # 16 MiB; all pairs at once are 256 MiB a head
NORMALISERS = ("entmax(z, 1.5", "entmax(z, 3.0", "sparsemax(z", "relumax(z", "normrelu(z", "topk_softmax(z, 32")
SPECS = ("biweight", "sparsemax", "relumax", "topk-softmax", "biweight*nearest(k=32)")
CASES = [
    *((f"lambda z: regard.{call}, impl='cpu')", SCORES, 2.6 * 16) for call in NORMALISERS),
    *((f"lambda q, k, v: regard.attention(q, k, v, '{s}', is_causal=True, impl='cpu')", HEAD, 64) for s in SPECS),
    *(
        (
            f"lambda q, k, v: regard.local_linear_attention(q, k, v, spec='{s}', ridge=0.1, tol=1e-3, is_causal=True)",
            HEADS,
            12 * 16 + 64,
        )
        for s in ("softmax", "biweight")
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@on_linux
@pytest.mark.parametrize(("call", "shape", "most"), CASES)
def test_peak_memory(call: str, shape: tuple[int, ...], most: float) -> None:
    """MiB beyond the inputs and the upstream gradient; output and gradients are included."""
    assert 1 < peak(call, *shape)[0] <= most
