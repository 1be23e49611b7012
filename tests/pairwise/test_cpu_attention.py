"""impl="cpu" of attention where the contracts' ten keys do not reach: blocks of several heads and of one, and blocks
that keep only the keys in marks with weight; with masks, windows, offsets, grouped heads, rows without support and
thresholds that hang on a key without weight. Expected values are dense float64 formulas, gradients by autograd."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contracts import oracle
from contracts.oracle import close
from operators import check_operators
from row_numbers import derivatives, leaves, numbers
from torch import Tensor

import regard
from regard.grammar import Spec

pytest.importorskip("numba")

from regard.pairwise.blocked.blocks import CHUNK, COLUMNS, Block
from regard.pairwise.cpu import implementation as cpu

K = 5
FIXED = "epanechnikov*fixed(bias=0.5)"
# Scores of the cases below are about 3 within a cluster and far below 0 outside.
CASES = [
    "sparsemax", "biweight", "triweight", "polynomial(r=1.5)*adaptive",
    "relumax", "polynomial(r=2.5)*anchored", "gaussian*anchored",
    FIXED, "biweight*fixed(bias=0.5,empty=zero)", "triweight*fixed(bias=0.5,empty=nearest)",
    "uniform*fixed(bias=0.5)",
    *(f"{kernel}*nearest(k={K})" for kernel in ("gaussian", "uniform", "biweight", "epanechnikov")),
]  # fmt: skip


@dataclass
class Narrowing:
    """How often products (with values forward, all of them backward) could leave keys out, did so, did so in a block of
    several heads, the most keys they kept, and the most heads of a block."""

    asked: int = 0
    done: int = 0
    shared: int = 0
    kept: int = 0
    weighed: int = 0
    heads: int = 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Narrowing:
    found, narrowed = Narrowing(), Block.narrowed

    def spy(self: Block, marks: Tensor) -> Block:
        block = narrowed(self, marks)
        found.asked += 1
        found.heads = max(found.heads, self.heads)
        if block.kept is not None:
            found.done += 1
            found.shared += self.heads > 1
            found.kept = max(found.kept, len(block.kept))
        return block

    add = Block.add_weighted

    def spy_forward(self: Block, out: Tensor, p: Tensor, v: Tensor, marks: Tensor) -> None:
        chunks = range(self.low // CHUNK, -(-self.high // CHUNK))
        alive = [bool(marks[:, c * CHUNK // COLUMNS : (c + 1) * CHUNK // COLUMNS].any()) for c in chunks]
        found.asked += 1
        if not all(alive):
            found.done += 1
            found.weighed = max(found.weighed, CHUNK * sum(alive))
        found.heads = max(found.heads, self.heads)
        add(self, out, p, v, marks)

    monkeypatch.setattr(Block, "add_weighted", spy_forward)
    monkeypatch.setattr(Block, "narrowed", spy)
    return found


@pytest.fixture
def narrowing(watched: Narrowing, monkeypatch: pytest.MonkeyPatch) -> Narrowing:
    """Blocks of one head and 16 queries, watched: the only ones that leave keys out, at lengths that are cheap."""
    monkeypatch.setattr(cpu.NumbaRows, "elements", 1)
    return watched


Inputs = dict[str, Tensor]
"""query [B, H, Tq, D], key [B, Hkv, Tk, D], value [B, Hkv, Tk, Dv], scale and the numbers of the rows, all leaves."""


def parts(data: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Inputs]:
    """Return query, key, value, scale and the other numbers."""
    q, k, v, scale, *_ = data.values()
    return q, k, v, scale, dict(list(data.items())[4:])


def clustered(
    label: str, queries: int, keys: int, *, batch: int = 1, heads: int = 1, kv_heads: int | None = None,
    learned: bool = False, spread: float = 0.3, seed: int = 0,
) -> Inputs:  # fmt: skip
    """Keys that form a cluster for every COLUMNS of them, along axes of their own, and queries in the middle of the
    clusters: a block of queries, which lie at the end of the keys, has weight in a few marks alone."""
    make = torch.Generator().manual_seed(1000 + seed)
    clusters = -(-keys // COLUMNS)
    dim = clusters + 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    centre = 3.5 * torch.eye(clusters, dim, dtype=torch.float64)
    centre[:, -1] = -9.0  # keys of other clusters score below zero
    at = torch.arange(keys) // COLUMNS
    place = torch.arange(keys - queries, keys) // COLUMNS
    k = centre[at] + spread * draw(batch, kv_heads or heads, keys, dim)
    q = centre[place.clamp(min=0)] + spread * draw(batch, heads, queries, dim)
    q[..., -1] = 1.0
    v = draw(batch, kv_heads or heads, keys, 3)
    rows = (batch, heads, queries)
    scale = 1 + 0.2 * torch.rand(rows, generator=make, dtype=torch.float64)
    wobble = torch.rand(rows, generator=make, dtype=torch.float64) * 0.2
    own = numbers(Spec.parse(label), wobble, learned)
    return leaves({"query": q, "key": k, "value": v, "scale": scale, **own}, torch.float64)


def truth(label: str, data: Inputs, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (output, weights), dense."""
    q, k, v, scale, params = parts(data)
    seen = oracle.visible(*q.shape[:3], k.shape[2], **call)
    return oracle.attention(oracle.read(Spec.parse(label)), q, k, v, seen, scale, params)


def attend(label: str, data: Inputs, call: dict[str, Any]) -> Any:
    q, k, v, scale, params = parts(data)
    how = {"scale": scale, "params": params, "enable_gqa": q.shape[1] != k.shape[1], **call}
    return regard.attention(q, k, v, label, impl="cpu", **how)


def gradients(out: Tensor, data: Inputs) -> Inputs:
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return derivatives(out, data, g)


def compare(
    label: str, data: Inputs, call: dict[str, Any], tolerance: float, dtype: torch.dtype = torch.float64
) -> None:
    """Output and every gradient against the dense formula in float64; the inputs are left alone."""
    ours = leaves(data, dtype)
    exact = leaves(ours, torch.float64)
    out, expected = attend(label, ours, call), truth(label, exact, call)[0]
    close(out, expected, tolerance, "output")
    close(gradients(out, ours), gradients(expected, exact), tolerance, "gradients")
    assert all(torch.equal(x.double(), exact[name]) for name, x in ours.items())


@pytest.mark.parametrize(
    "keys", [1, 33, 129, 512, *(pytest.param(keys, marks=pytest.mark.slow) for keys in (31, 32, 127, 128, 511, 513))]
)
@pytest.mark.parametrize("label", CASES)
def test_several_heads_in_a_block(label: str, keys: int, watched: Narrowing) -> None:
    data = clustered(label, min(keys, 70), keys, batch=2, heads=4, kv_heads=2, learned=keys in (33, 129))
    compare(label, data, {"is_causal": True}, 2e-11)
    assert watched.heads > 1


CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"is_causal": True},
    "strict": {"exclude_self": True},
    "window": {"window": 600},
    "window, causal": {"window": 700, "is_causal": True},
    "padding": {"attn_mask": "keys"},
    "pairs, causal": {"attn_mask": "pairs", "is_causal": True},
    "offsets": {"is_causal": True, "query_offset": "offsets"},
    "offsets, window, strict": {"exclude_self": True, "query_offset": "offsets", "window": 600},
    "offsets, padding": {"is_causal": True, "query_offset": "offsets", "attn_mask": "keys"},
}
QUERIES, KEYS = 35, 1189  # no multiples of a block, a tile or a mark


def arguments(name: str, batch: int, heads: int, queries: int = QUERIES, keys: int = KEYS) -> dict[str, Any]:
    """The call with its tensors: a third of the keys hidden, some rows without any key, another offset for each."""
    make, call = torch.Generator().manual_seed(9), dict(CALLS[name])
    if call.get("attn_mask") == "keys":
        mask = torch.rand(batch, 1, 1, keys, generator=make) < 0.7
        mask[-1, ..., : keys // 3] = False
        call["attn_mask"] = mask
    if call.get("attn_mask") == "pairs":
        mask = torch.rand(batch, heads, queries, keys, generator=make) < 0.7
        mask[:, :, 3] = False
        call["attn_mask"] = mask
    if "query_offset" in call:
        call["query_offset"] = torch.tensor([keys - queries, keys - queries - 257])[:batch]
    return call


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "label", ["biweight", "relumax", FIXED, f"gaussian*nearest(k={K})", f"biweight*nearest(k={K})"]
)
def test_keys_without_weight_are_left_out(label: str, name: str, narrowing: Narrowing) -> None:
    """Grouped heads, and all ways to hide keys; that keys are left out really is what happens."""
    compare(label, clustered(label, QUERIES, KEYS, batch=2, heads=2, kv_heads=1), arguments(name, 2, 2), 5e-11)
    assert narrowing.asked >= 12
    assert narrowing.done >= narrowing.asked // 2
    assert narrowing.kept <= 0.6 * KEYS + COLUMNS  # backward, where it pays
    assert 0 < narrowing.weighed < KEYS  # forward


@pytest.mark.parametrize("label", CASES)
def test_every_rule_and_its_numbers_with_keys_left_out(label: str, narrowing: Narrowing) -> None:
    """Also in float32, for well-separated scores: what float32 itself rounds."""
    call = {"is_causal": True}
    for learned in (False, True):
        compare(label, clustered(label, QUERIES, KEYS, heads=2, kv_heads=1, learned=learned), call, 1e-10)
        assert narrowing.done >= 4
    compare(label, clustered(label, QUERIES, KEYS, heads=2, spread=0.2), call, 2e-5, torch.float32)
    assert narrowing.done >= 12


@pytest.mark.parametrize("queries", [1, 2, 127, 128, 129, 300])
def test_blocks_of_the_usual_size(queries: int, watched: Narrowing) -> None:
    for label in ("biweight", "relumax"):
        compare(label, clustered(label, queries, 2500), {"exclude_self": True}, 5e-11)
        assert watched.done == watched.asked >= 2
    if queries == 128:
        compare("biweight", clustered("biweight", queries, 1000, heads=4, kv_heads=2), {"is_causal": True}, 5e-11)
        assert watched.shared > 0


def test_8192_keys(watched: Narrowing) -> None:
    for label in ("biweight", f"gaussian*nearest(k={K})"):
        compare(label, clustered(label, 33, 8192), {"is_causal": True}, 5e-11)
    assert watched.done == watched.asked >= 3
    assert watched.kept <= 4 * COLUMNS


def by_scores(z: Tensor, **numbers: Tensor) -> Inputs:
    """Queries and keys whose products are z [Tq, Tk] exactly: the queries are unit vectors."""
    queries, keys = z.shape
    v = torch.randn(1, 1, keys, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    tensors = {"query": torch.eye(queries)[None, None], "key": z.T[None, None].contiguous(), "value": v}
    return leaves({**tensors, "scale": torch.ones(1, 1, queries), **numbers}, torch.float64)


def distinct(queries: int, keys: int) -> Tensor:
    """Scores far below zero, no two of a row alike."""
    make = torch.Generator().manual_seed(8)
    order = torch.stack([torch.randperm(keys, generator=make) for _ in range(queries)])
    return -30 - order.double() / 256


@pytest.mark.parametrize("label", [f"biweight*nearest(k={K})", f"epanechnikov*nearest(k={K})"])
def test_the_key_on_which_a_threshold_hangs_lies_alone(label: str, narrowing: Narrowing) -> None:
    """The K best lie in one mark; the next one, without weight but with a gradient, in a mark of its own."""
    for place in (0, 7 * COLUMNS - 1, 7 * COLUMNS, 1280 - 1):
        z = distinct(20, 1280)
        z[:, 300 : 300 + K] = torch.arange(K).double() / 4 + torch.arange(20)[:, None] / 64
        z[:, place] = -1.0
        data = by_scores(z)
        compare(label, data, {}, 1e-11)
        assert float(gradients(attend(label, data, {}), data)["key"][0, 0, place].abs().min()) > 0
    assert narrowing.done == narrowing.asked
    assert narrowing.kept <= 2 * COLUMNS


def test_fewer_keys_than_k(narrowing: Narrowing) -> None:
    """The lowest visible key is what the threshold hangs on, one below it."""
    mask = torch.zeros(4, 1280, dtype=torch.bool)
    mask[:, [5, 700, 1200]] = True
    data = by_scores(torch.where(mask, distinct(4, 1280), 0.0))
    compare(f"biweight*nearest(k={K})", data, {"attn_mask": mask}, 1e-11)
    assert narrowing.done == narrowing.asked > 0


@pytest.mark.parametrize("label", ["relumax", f"gaussian*nearest(k={K})", f"epanechnikov*nearest(k={K})", "biweight"])
def test_ties_across_marks(label: str, narrowing: Narrowing) -> None:
    """Ties for the best score share its gradient; ties for the last place go by index; kept keys that all tie with the
    threshold weigh the same. In three marks of ten, the first not among them."""
    z = distinct(6, 1280)
    tied = torch.tensor([303, 305, 380, 700, 701, 1100, 1101])
    z[:, tied] = torch.arange(6).double()[:, None] / 4
    z[3:, 704] = 0.25 + torch.arange(3, 6).double() / 4  # one better than the tie
    compare(label, by_scores(z, **({"margin": torch.ones(1, 1, 6)} if label == "relumax" else {})), {}, 1e-11)
    assert narrowing.done == narrowing.asked > 0


@pytest.mark.parametrize("label", [label for label in CASES if "fixed" in label and "uniform" not in label])
@pytest.mark.parametrize("every", [False, True])
def test_rows_without_support(label: str, every: bool, narrowing: Narrowing) -> None:
    """Some rows of a block, or all of them, find no key inside."""
    data = clustered(label, QUERIES, KEYS)
    with torch.no_grad():
        data["bias"][..., :: 1 if every else 3] = -1e3
    compare(label, data, {"is_causal": True}, 1e-10)
    uniform = label == FIXED  # which looks at all keys then
    assert (narrowing.done == 0) == uniform


def test_rows_that_see_nothing_between_rows_that_do(narrowing: Narrowing) -> None:
    call = {"is_causal": True, "query_offset": torch.tensor([KEYS - 60, -20]), "attn_mask": torch.ones(KEYS) > 0}
    call["attn_mask"][1150:] = False
    for label in ("biweight", f"biweight*nearest(k={K})", FIXED):
        data = clustered(label, 60, KEYS, batch=2)
        compare(label, data, call, 5e-11)
        out = attend(label, data, call)
        assert not bool(out[1, :, :20].any())
        assert bool(out[1, :, 20:].any())
    assert narrowing.done > 0


@pytest.mark.parametrize("keys", [128, 256, 1280])
@pytest.mark.parametrize("label", [f"biweight*nearest(k={K})", f"uniform*nearest(k={K})", "relumax"])
def test_windows_beyond_the_last_key(label: str, keys: int) -> None:
    """Where no position is left for a row, after the last mark."""
    for offset in (keys - 3, keys, keys + 1000):
        call = {"is_causal": True, "window": 4, "query_offset": torch.tensor([offset])}
        compare(label, clustered(label, 20, keys), call, 2e-11)


@pytest.mark.parametrize("label", [label for label in CASES if not label.startswith("uniform")])
def test_the_last_bit_of_a_score_may_differ_when_it_is_computed_again(
    label: str, narrowing: Narrowing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product over fewer keys may be summed in another order, on some machines and for some shapes. Here it always
    is: every score is moved by one unit in the last place when keys are left out."""
    plain = Block.scores

    def scores(self: Block, q: Tensor, k: Tensor) -> Tensor:
        z = plain(self, q, k)
        if self.kept is None:
            return z
        up = torch.arange(z.shape[-1]) % 2 == 0
        return torch.nextafter(z, torch.where(up, torch.inf, -torch.inf).to(z.dtype).expand_as(z).contiguous())

    monkeypatch.setattr(Block, "scores", scores)
    compare(label, clustered(label, 40, KEYS), {"is_causal": True}, 1e-9)
    assert narrowing.done >= 2


@pytest.mark.parametrize("label", ["biweight", "relumax", f"gaussian*nearest(k={K})"])
def test_a_row_changes_no_bit_of_another(label: str) -> None:
    data = leaves(clustered(label, KEYS, KEYS, batch=2, heads=2), torch.float32)
    before = attend(label, data, {"is_causal": True})
    with torch.no_grad():
        data["query"][:, :, -1] = 0  # sees every key with weight
        data["query"][1, 1, :9] = torch.nan
    after = attend(label, data, {"is_causal": True})
    assert torch.equal(before[0, :, :-1], after[0, :, :-1])
    assert torch.equal(before[1, 0, :-1], after[1, 0, :-1])
    assert torch.equal(before[1, 1, 9:-1], after[1, 1, 9:-1])


@pytest.mark.parametrize("label", ["biweight", "relumax", f"biweight*nearest(k={K})", FIXED])
def test_opcheck(label: str) -> None:
    for keys, name in ((40, "pairs, causal"), (KEYS, "offsets, padding")):
        data = clustered(label, 17, keys, batch=2, heads=2, kv_heads=1, learned=True)
        check_operators(lambda: attend(label, data, arguments(name, 2, 2, 17, keys)), "blocked")  # noqa: B023


def test_auto_takes_it_and_says_so() -> None:
    for label in (*CASES, "local-linear[biweight]"):
        assert regard.explain(label, (1, 2, 300, 16)).chosen == "cpu", label
    for label in ("softmax", "linear", "gaussian*nearest(k=5,gradient=soft)", "local-linear"):
        explained = regard.explain(label, (1, 2, 300, 16))
        assert explained.chosen != "cpu"
        assert next(reason for name, reason, _ in explained.rows if name == "cpu")
