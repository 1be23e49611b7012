"""Memory of the calls with a state, forward and backward, in a fresh process: linear in the length."""

import pytest
from peak import on_linux, peak

CALLS = {
    "linear": "regard.linear_attention(q, k, v, 'shift-cosine')[0]",
    "decay": "regard.linear_attention(q, k, v, 'linear', log_decay=-0.01)[0]",
    "delta": "regard.delta_rule(q, k / 8, v, 1.0)[0]",
    "mesa": "regard.mesa_attention(q, k, v, ridge=1.0)[0]",
    "fading mesa": "regard.mesa_attention(q, k, v, ridge=1.0, log_decay=-0.01)[0]",
    "leaky": "leaky_average(q + k + v, 0.1)[0]",
    "packed leaky": "leaky_average(q + k + v, 0.1, segment_ids=torch.arange(q.shape[2])[None] // 100)[0]",
}


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(("which", "long"), [(name, 65536 if name == "linear" else 16384) for name in CALLS])
def test_memory_grows_with_the_length_and_no_faster(which: str, long: int) -> None:
    """The queries are 4 MiB at 16384, where a matrix for every query would be 256 MiB and all pairs 1 GiB."""
    few, many = (peak(f"lambda q, k, v: {CALLS[which]}", 1, 1, length, 64)[0] for length in (long // 4, long))
    assert many <= 4.4 * few
    assert many <= 24 * long / 4096
