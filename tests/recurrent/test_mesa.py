"""Mesa attention: least squares, hard systems and what is reported of them, speed."""

import itertools
import time
import warnings

import pytest
import torch
from recurrences import CASES, SOLVERS, close

from regard import mesa_attention

CASE = CASES["mesa, ridge by number"]


def test_it_is_least_squares() -> None:
    """Against torch.linalg.lstsq on the data with sqrt(ridge) I below; and a linear map is found from D pairs on."""
    q, k, v, _ = CASE.draw(12, grad=False).values()
    for way in SOLVERS:
        out, _, found = mesa_attention(q, k, v, ridge=0.5, return_diagnostics=True, **way)
        for b, h, i in itertools.product(range(2), range(4), (0, 3, 11)):
            rows = torch.cat([k[b, h // 2, : i + 1], 0.5**0.5 * torch.eye(4, dtype=torch.float64)])
            right = torch.cat([v[b, h // 2, : i + 1], torch.zeros(4, 3, dtype=torch.float64)])
            close(out[b, h, i], q[b, h, i] @ torch.linalg.lstsq(rows, right).solution, 1e-12)
        assert not found["status"].any()
        assert found["residual"].shape == (2, 4, 12)
        assert found["residual"].max() <= 1e-12
        close(mesa_attention(q, k, v, ridge=0.5, scale=3.0, **way)[0], 3 * out, 1e-12)
    truth = torch.randn(4, 3, dtype=torch.float64)
    out, _ = mesa_attention(q, k, k @ truth, ridge=1e-9, tol=1e-5)
    close(out[:, :, 6:], q[:, :, 6:] @ truth, 1e-6)


def test_hard_keys_are_answered_or_reported() -> None:
    """Duplicated, collinear, zero and enormous keys; a ridge too small for the precision."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 40, d, generator=make) for h, d in ((4, 8), (2, 8), (2, 3)))
    for keys in (k[:, :, :1].expand_as(k), torch.zeros_like(k), k[..., :1] * torch.ones(8), k * 1e4):
        few = [x[:, :, :8] for x in (q, keys, v)]
        exact = mesa_attention(*(x.double() for x in few), ridge=1.0, form="recurrent")[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the enormous ones
            out, _, found = mesa_attention(*few, ridge=1.0, return_diagnostics=True)
        sound = (found["status"] == 0)[..., None]
        close(torch.where(sound, out, 0), torch.where(sound, exact, 0), 2e-3)
        assert out.isfinite().all()
    with pytest.warns(RuntimeWarning, match="systems are unconverged, with residuals up to"):
        found = mesa_attention(q, k * 1e4, v, ridge=1e-6, return_diagnostics=True)[2]
    assert (found["status"] == 3).any()
    with pytest.warns(RuntimeWarning, match="unconverged"):
        found = mesa_attention(q, k, v, ridge=0.5, solver="cg", max_iter=2, return_diagnostics=True)[2]
    assert found["iterations"].max() == 2
    assert ((found["residual"] > 3.5e-4) == (found["status"] == 3)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "factor"), [(None, 2.0), (-0.05, 1.1)])
def test_chunks_are_faster_than_steps(decay: float | None, factor: float) -> None:
    """T = 1024, D = 128, forward and backward, processor time of one thread; the best of three. Measured: 11 and 2."""
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 1024, 128, generator=make).requires_grad_() for _ in range(3)]
    best, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    for form in ("chunked", "recurrent"):
        times = []
        for _ in range(3):
            start = time.process_time()
            out, _ = mesa_attention(*inputs, ridge=1.0, form=form, log_decay=decay)
            torch.autograd.grad(out.sum(), inputs)
            times.append(time.process_time() - start)
        best[form] = min(times)
    torch.set_num_threads(threads)
    assert best["recurrent"] >= factor * best["chunked"], best
