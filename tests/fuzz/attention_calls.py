"""Valid calls of the attention functions and of the specs of the grammar."""

from dataclasses import replace
from typing import Any

import torch
from contracts import oracle
from contracts.cases import SPECS
from torch import Tensor

import regard

from .draw import Arguments, Call, Draw, arguments, called, public, split
from .kinds import ONLY_NONE, Anything, Flag, Floats, Integers, Kind, Mask, Real, SpecValue, Whole, Word

SMALLEST = 5e-324
"""The least number above 0."""
KNOWN = [s for s in SPECS.values() if oracle.knows(oracle.read(s))]
LOCAL = [s for s in KNOWN if s.degree == 0 and s.convex and s.kernel.name != "uniform"]


def _visible(given: dict[str, Any]) -> Tensor:
    """Which pairs the arguments of a call make visible."""
    (batch, heads, queries, _), keys = given["query"].shape, given["key"].shape[2]
    names = ("attn_mask", "is_causal", "exclude_self", "window", "query_offset", "segment_ids")
    return oracle.visible(batch, heads, queries, keys, **{n: given[n] for n in names if n in given})


def _tensors(draw: Draw) -> dict[str, Any]:
    """Queries, keys and values, with what limits who sees what."""
    batch, kv_heads, group = draw.whole(1, 2), draw.whole(1, 2), draw.one(1, 1, 2)
    queries, keys, dim = draw.whole(1, 6), draw.whole(1, 7), draw.whole(1, 5)
    dtype = draw.one(torch.float64, torch.float64, torch.float32)
    heads = kv_heads * group
    given: dict[str, Any] = {
        "query": draw.normal(batch, heads, queries, dim, dtype=dtype),
        "key": draw.normal(batch, kv_heads, keys, dim, dtype=dtype),
        "value": draw.normal(batch, kv_heads, keys, draw.whole(1, 4), dtype=dtype),
        "enable_gqa": group > 1 or draw.flag(),
        "is_causal": draw.flag(),
        "exclude_self": draw.often(True, False),
        "window": draw.one(None, None, 1, 3, 10**30),
        "return_diagnostics": draw.often(True, False),
    }
    axes = draw.one((keys,), (queries, keys), (batch, 1, 1, keys), (batch, heads, queries, keys))
    given["attn_mask"] = draw.often(draw.mask(*axes))
    if queries <= keys and draw.flag():
        given["segment_ids"] = draw.integers(2, draw.one(1, batch), keys)
        given["query_offset"] = draw.one(None, draw.whole(0, keys - queries))
    else:
        given["segment_ids"] = None
        given["query_offset"] = draw.one(None, draw.whole(-3, 8), draw.integers(9, batch) - 2)
    return given


def _rows(given: dict[str, Any]) -> tuple[int, ...]:
    return tuple(given["query"].shape[:3])


def _kinds(given: dict[str, Any], spec: regard.Spec) -> dict[str, Kind]:
    """What the shared arguments may be."""
    (batch, heads, queries, _), keys = given["query"].shape, given["key"].shape[2]
    with_segments = given["segment_ids"] is not None
    some_rows = (_rows(given),)
    segment = Integers(none=True, fixed=(1,))
    return {
        "query": Floats(fixed=(3,)),
        "key": Floats(fixed=(0, 2, 3) if batch > 1 else (2, 3)),
        "value": Floats(fixed=(2,)),
        "attn_mask": Mask(none=True, fixed=(-1,) if keys > 1 else (), broadcast=True),
        "is_causal": Flag(),
        "exclude_self": Flag(),
        "window": Whole(low=1, none=True),
        "query_offset": _offset(batch, keys - queries if with_segments else None),
        "segment_ids": segment if not isinstance(given["query_offset"], Tensor) else Anything(),
        "scale": Real(low=0.0, strict=True, none=True, rows=some_rows) if spec.takes_scale else ONLY_NONE,
        "params": parameters(*spec.params),
        "enable_gqa": Flag() if heads == given["key"].shape[1] else Kind(test=lambda value: value is True),
        "impl": Word(words=("auto",)),
        "return_diagnostics": Flag(),
        "spec": SpecValue(also=("linear*fixed(bias=1e999)",)),
    }


def _offset(batch: int, room: int | None) -> Kind:
    """Whole numbers, inside `room` where segments are given, or integers [batch] where they are not."""

    def fits(value: Any) -> bool:
        if isinstance(value, Tensor):
            one_each = value.dtype == torch.int64 and tuple(value.shape) == (batch,)
            return one_each and room is None and value.device.type == "cpu"
        return Whole(low=0, high=room).own(value) if room is not None else Whole().own(value)

    return Kind(none=True, also=(torch.zeros(batch), torch.zeros(batch + 1, dtype=torch.long)), test=fits)


def parameters(*names: str) -> Kind:
    """None, or a mapping of a spec's names to numbers."""
    first = names[0] if names else "alpha"
    numbers = ("1", None, True, float("nan"), torch.ones(3, dtype=torch.long), torch.ones(17, 19), [1.0], 1j)
    wrong = ({"alhpa": 1.0}, {3: 1.0}, {"": 1.0}, *({first: number} for number in numbers))
    return Kind(none=True, also=wrong, test=lambda value: isinstance(value, dict) and not value)


@public("attention")
def attention(draw: Draw) -> Call:
    given = _tensors(draw)
    spec = draw.one(*KNOWN)
    s = oracle.read(spec)
    signed = s.normalise and s.kernel in oracle.POINTWISE
    if signed or spec.degree:
        given = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}
    if spec.degree and s.solver == "learned":
        spec, s = KNOWN[0], oracle.read(KNOWN[0])
    given["spec"] = draw.one(spec, str(spec))
    dtype, rows = given["query"].dtype, _rows(given)
    of_rows, of_all = (draw.uniform(0.5, 1.5, *size, dtype=dtype) for size in (rows, (1,)))
    scale = draw.often(draw.one(0.7, of_rows, of_all))
    given["scale"] = scale if spec.takes_scale else None
    given["params"] = draw.one(None, {}, _numbers(draw, spec, rows, dtype))
    any_impl = not given["return_diagnostics"] and given["segment_ids"] is None
    given["impl"] = draw.one("auto", "reference") if any_impl else "auto"

    def truth(**wide: Any) -> Tensor:
        numbers = {n: _whole_rows(x, rows) for n, x in (wide["params"] or {}).items()}
        return oracle.attention(
            s, wide["query"], wide["key"], wide["value"], _visible(given), _whole_rows(wide["scale"], rows), numbers
        )[0]

    tolerance = 1e-7 if dtype == torch.float64 else 2e-3
    return Call("attention", regard.attention, given, _kinds(given, spec), truth, tolerance, ("query", "key", "value"))


def _whole_rows(x: Any, rows: tuple[int, ...]) -> Any:
    return x.expand(rows) if isinstance(x, Tensor) and x.dim() <= 3 else x


def _numbers(draw: Draw, spec: regard.Spec, rows: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """A number or a tensor for every parameter of the spec, near its default."""
    found: dict[str, Any] = {}
    for name, info in spec.params.items():
        if name != "probe":
            centre = float(info.default) + (0.1 if info.low is not None and float(info.default) <= info.low else 0.0)
            room = 1.0 if info.low is None else min(1.0, centre - info.low)
            found[name] = draw.uniform(centre, centre + 0.2 * room, *rows, dtype=dtype)
    return found


def _boundaries(draw: Draw, sequences: int) -> Tensor:
    """Boundaries of sequences, some of them without tokens."""
    lengths = torch.cat([torch.zeros(1, dtype=torch.long), draw.integers(4, sequences)])
    lengths[1] += 1
    return lengths.cumsum(0).to(draw.one(torch.int32, torch.int64))


@public("segment_ids")
def segment_ids(draw: Draw) -> Call:
    ends = _boundaries(draw, draw.whole(1, 3))
    total = int(ends[-1])
    length = (draw.one(None, total), Kind(fine=(total,), none=True))
    wrong = Integers(fixed=(), alone=True, also=(ends[:0], ends.flip(0), ends + 1))
    return called("segment_ids", regard.segment_ids, cu_seqlens=(ends, wrong), length=length)


@public("varlen_attention", regard.varlen_attention)
def varlen(draw: Draw) -> Arguments:
    sequences, heads, dim = draw.whole(1, 3), draw.whole(1, 2), draw.whole(1, 4)
    ends_q, ends_k = _boundaries(draw, sequences), _boundaries(draw, sequences)
    query = draw.normal(int(ends_q[-1]), heads, dim)
    key, value = (draw.normal(int(ends_k[-1]), heads, dim) for _ in range(2))
    longest = lambda ends: Whole(low=int(ends.diff().max()), none=True)  # noqa: E731
    numbers = Integers(fixed=(0,), also=(ends_q[:0], ends_q.flip(0)))
    return arguments(
        query=(query, Floats(fixed=(0,))),
        key=(key, Floats(fixed=(0, 1, 2))),
        value=(value, Floats(fixed=(0, 1))),
        cu_seqlens_q=(ends_q, numbers),
        cu_seqlens_k=(ends_k, Integers(none=len(query) == len(key), fixed=(0,), also=(ends_k[:0],))),
        max_seqlen_q=(draw.one(None, int(ends_q.diff().max())), longest(ends_q)),
        max_seqlen_k=(None, longest(ends_k)),
        spec=(draw.one("softmax", "biweight", "epanechnikov*anchored(margin=1)"), SpecValue()),
        is_causal=draw.flag(),
        window=(draw.one(None, 2), Whole(low=1, none=True)),
    )


@public("local_linear_attention")
def local_linear(draw: Draw) -> Call:
    given = _tensors(draw)
    given = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}
    spec, rows = draw.one(*LOCAL), _rows(given)
    ridge = draw.one(0.1, 0.5, draw.uniform(0.2, 1.0, *rows), draw.uniform(0.2, 1.0, *rows, given["query"].shape[3]))
    solver = draw.one("auto", "cholesky", "cg", "block-diagonal")
    mass = spec.kernel.ranked and spec.bandwidth.name in ("fixed", "anchored")
    mode = draw.one("relative", "absolute") if mass else "relative"
    cg = solver in ("auto", "cg")
    modes = ("relative", "absolute") if mass or spec.kernel.name == "gaussian" else ("relative",)
    steps, tol = (draw.often(200), draw.often(1e-12)) if cg else (None, None)
    strict = solver == "cg" or steps is not None or tol is not None
    wrong = ("linear", "geometric*fixed*cosine*unnormalised")
    values, own = split(
        arguments(
            ridge=(ridge, Real(low=0.0, strict=strict, rows=(rows, tuple(given["query"].shape)))),
            spec=(draw.one(spec, str(spec)), SpecValue(wrong, fine=("rbf",))),
            solver=(solver, Word(words=("auto", "cholesky", "cg", "block-diagonal"), also=("learned",))),
            ridge_mode=(mode, Word(words=modes)),
            max_iter=(steps, Whole(low=0, high=2**31, none=True) if cg else ONLY_NONE),
            tol=(tol, Real(low=SMALLEST, high=1.0, none=True) if cg else ONLY_NONE),
            probe=(None, ONLY_NONE),
        )
    )
    given |= {**values, "params": None, "scale": None, "impl": "auto"}
    call = Call("local_linear_attention", regard.local_linear_attention, given, (_kinds(given, spec) | own))
    if solver != "block-diagonal" and steps is None:
        choices = replace(oracle.read(spec), degree=1, absolute=mode == "absolute")

        def truth(**wide: Any) -> Tensor:
            tensors = (wide[name] for name in ("query", "key", "value"))
            return oracle.attention(choices, *tensors, _visible(given), params={"ridge": wide["ridge"]})[0]

        call.truth, call.tolerance = truth, 1e-4 if cg else 1e-6
    return call


@public("explain", regard.explain)
def explain(draw: Draw) -> Arguments:
    shapes = ((2, 4), (2, 4, 5, -8), (2, 4, 5.0, 8), (2, 4, True, 8), "2458", (0, 0, 0, 0, 0), (2, 4, None, 8))
    apart = ((3, 2, 5, 8), (2, 2, 5, 9), (2, 3, 5, 8), (2, 0, 5, 8))
    devices = ("cpu", "cuda", "meta", torch.device("cpu"))
    known = lambda v: isinstance(v, (str, torch.device)) and v in devices  # noqa: E731
    dtypes = ("float32", torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    return arguments(
        spec=(draw.one("softmax", "biweight", "local-linear"), SpecValue()),
        query_shape=((2, 4, draw.whole(0, 9), 8), Kind(also=shapes)),
        key_shape=(draw.one(None, (2, 2, 5, 8)), Kind(none=True, also=(*shapes, *apart))),
        value_dim=(draw.one(None, 3), Whole(low=1, high=2**48, none=True)),
        dtype=(draw.one(torch.float32, torch.bfloat16, torch.float64), Kind(also=dtypes)),
        device=(draw.one("cpu", "cuda"), Kind(test=known, also=("gpu", "cuda:x"))),
        **draw.flags("is_causal", "exclude_self"),
        window=(draw.one(None, 2), Whole(low=1, none=True)),
        query_offset=(draw.one(None, 3), Whole(none=True)),
        mask=draw.word("keys", "pairs", none=True),
        **draw.flags("segments", "return_diagnostics"),
    )


@public("Spec", regard.Spec)
def spec(draw: Draw) -> Arguments:
    bandwidth = draw.one(None, "fixed")
    ranked = Kind(none=True, test=lambda v: v in ("fixed", "anchored", "nearest"), also=("gaussian", "fixd"))
    return arguments(
        kernel=(draw.one("gaussian", "epanechnikov", "biweight"), Word(also=("softmax", "fixed", "dot"))),
        bandwidth=(bandwidth, Anything() if bandwidth is None else ranked),
        degree=1,
        ridge=(0.3, Real(low=0.0, none=True)),
        solver=(draw.one("auto", "cholesky", None), Word(none=True, words=("auto", "cholesky", "cg"))),
        similarity=(draw.one("dot", "euclidean"), Word(words=("dot", "cosine", "euclidean"))),
        normalise=(draw.one(None, True), Kind(none=True, test=lambda v: v is True)),
        ridge_mode=("relative", Word(words=("relative",))),
    )


def _parses(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(regard.Spec.parse(value))
    except regard.checks.ArgumentError:
        return False


@public("Spec.parse", regard.Spec.parse)
def parse(draw: Draw) -> Arguments:
    text = draw.one("softmax", "biweight*anchored(margin=1)", "gaussian*fixed*linear(ridge=0.1,solver=cg(tol=1e-4))")
    broken = [text[:at] + piece + text[at:] for at in range(len(text)) for piece in ("*", "(", "=", "\x00", "é", "9")]
    cut = [text[:at] for at in range(len(text))]
    return arguments(text=(text, Kind(also=(*broken, *cut), test=_parses)))


@public("Spec.from_json", regard.Spec.from_json)
def from_json(draw: Draw) -> Arguments:
    text = regard.Spec.parse(draw.one("biweight", "local-linear", "relumax")).to_json()
    changes = (("name", "nam"), ("null", "{}"), ("null", "[]"), ("null", "3"), ("true", "3"), ('"', "'"))
    changed = (*(text.replace(*change) for change in changes), text.replace(":", ": [", 1))
    broken = (
        "[]", "null", "{}", "[" * 100_000, '{"kernel": 3}', '{"kernel": {"name": []}}', '{"kernel": "softmax"}',
        '{"kernel": {"name": "gaussian", "x": 1}}', '{"kernel": "gaussian", "degree": []}',
        '{"kernel": "gaussian", "ridge_mode": []}',
    )  # fmt: skip
    return arguments(text=(text, Kind(also=(*(c for c in changed if c != text), *broken))))
