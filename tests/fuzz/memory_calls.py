"""Valid calls of the memories: associative, product-key, fast-weight and leaky."""

from __future__ import annotations

from typing import Any

import dense_fast_weights
import torch
from nn import fwmlp_oracle, lact_oracle
from torch import Tensor

import regard
from regard.estimators import fast_weight_mlp as mlp
from regard.estimators import fast_weights, large_chunk, leaky, product_key
from regard.estimators.fast_weight_rules import step_rules
from regard.memory import AssociativeMemory

from .attention_calls import Params, Refused
from .draw import Call, Draw
from .kinds import Anything, Flag, Floats, Integers, Kind, Mask, Other, Real, Sentence, Whole, Word

WEIGHTS = ("softmax", "sparsemax", "biweight")
SIGNED = Sentence(also=("linear", "local-linear", "rbf", "interpolated[mesa]"))


# Associative -------------------------------------------------------------------------------------------------------


def associative(draw: Draw) -> Call:
    slots = draw.one(0, 3)
    given = {
        "spec": draw.one("softmax", "biweight", "linear"),
        "scale": draw.one(None, 0.7),
        "params": draw.one(None, {}),
        "store": "pairs",
        "capacity": draw.one(None, 4),
        "overflow": draw.one("oldest", "error"),
        "slots": slots,
        "heads": draw.one(1, 2),
        "dim": 3 if slots else draw.one(None, 3),
        "value_dim": 3 if slots else None,
        "tied": draw.flag() if slots else False,
        "combine": draw.one("shared", "separate"),
        "impl": "auto",
        "generator": draw.one(None, torch.Generator()),
    }
    trends = tuple(regard.registries()["trend"].names()) if given["spec"] == "linear" and not given["capacity"] else ()
    sums = ("sums",) if given["spec"] == "linear" and not given["capacity"] else ()
    kinds: dict[str, Kind] = {
        "spec": Sentence(also=("softmx",)),
        "scale": Real(low=0.0, strict=True, none=True),
        "params": Params(none=True, names=()),
        "store": Word(words=("pairs", *sums, *trends)) if not sums else Anything(),
        "capacity": Whole(low=1, none=True),
        "overflow": Word(words=("oldest", "error")),
        "slots": _Small(low=0) if given["dim"] and not given["tied"] else Anything(),
        "heads": _Small(low=1),
        "dim": _Small(low=1, none=True) if not given["tied"] and not slots else Anything(),
        "tied": Flag() if slots else Flag(also=()),
        "combine": Word(words=("shared", "separate")),
        "impl": Word(words=("auto", "reference", "blocked", "cpu", "sdpa")),
        "generator": Other(none=True),
    }
    if given["dim"] is None:
        kinds["dim"] = Anything()
    if not slots:
        kinds["tied"] = _NeverTrue()
    return Call("AssociativeMemory", AssociativeMemory, given, kinds)


class _NeverTrue(Flag):
    def own(self, value: Any) -> bool:
        return value is False


class _Small(Whole):
    """A size: huge ones are left out, since they are valid and do not fit into memory."""

    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if not (isinstance(v, int) and v > 10**6)]


def _memory(draw: Draw, **options: Any) -> tuple[AssociativeMemory, Tensor, Tensor]:
    batch, heads, pairs, dim = draw.one(1, 2), draw.one(1, 2), draw.whole(1, 5), draw.whole(2, 4)
    made = AssociativeMemory(draw.one("softmax", "biweight", "rbf"), **options).double()
    return made, draw.normal(batch, heads, pairs, dim), draw.normal(batch, heads, pairs, dim)


def write(draw: Draw) -> Call:
    memory, keys, values = _memory(draw)
    memory.write(keys, values)
    given = {"keys": keys, "values": values, "mask": draw.one(None, draw.mask(keys.shape[0], keys.shape[2]))}
    many = keys.shape[0] > 1
    kinds: dict[str, Kind] = {
        "keys": Floats(fixed=(1, 3) if not many else (0, 1, 3), short=True),
        "values": Floats(none=True, fixed=(2, 3), short=True),
        "mask": Mask(none=True, fixed=(1,), short=True),
    }
    return Call("AssociativeMemory.write", memory.write, given, kinds)


def _held(draw: Draw, tied: bool) -> tuple[AssociativeMemory, Tensor, Tensor]:
    memory, keys, values = _memory(draw)
    values = keys if tied else values
    memory.write(keys) if tied else memory.write(keys, values)
    return memory, keys, values


def read(draw: Draw) -> Call:
    memory, keys, values = _held(draw, tied := draw.flag())
    queries = draw.normal(*keys.shape[:2], draw.whole(1, 4), keys.shape[3])
    rows = tuple(queries.shape[:3])
    given = {
        "queries": queries,
        "steps": draw.whole(1, 3),
        "scale": draw.one(None, 0.8, draw.uniform(0.5, 1.0, *rows)),
        "params": draw.one(None, {}),
        "return_trajectory": draw.flag(),
        "return_energy": tied and draw.flag(),
        "return_diagnostics": draw.flag(),
    }
    kinds: dict[str, Kind] = {
        "queries": Floats(fixed=(0, 1, 3) if keys.shape[0] > 1 else (1, 3), short=True),
        "steps": Whole(low=1, high=1000),
        "scale": Real(low=0.0, strict=True, none=True, rows=(rows,)),
        "params": Params(none=True, names=tuple(memory.spec.params)),
        "return_trajectory": Flag(),
        "return_energy": Flag() if tied else Flag(also=()),
        "return_diagnostics": Flag(),
    }
    if not tied:
        kinds["return_energy"] = _NeverTrue()
    kinds["steps"] = _Few(low=1)

    def run(**arguments: Any) -> Any:
        found = memory.read(**arguments)
        return found if isinstance(found, Tensor) else found.values

    spec = memory.spec

    def truth(**wide: Any) -> Tensor:
        from contracts import oracle

        query, scale = wide["queries"], wide["scale"]
        seen = torch.ones(*query.shape[:3], keys.shape[2], dtype=torch.bool)
        for _ in range(given["steps"]):
            query = oracle.attention(oracle.read(spec), query, keys, values, seen, scale)[0]
        return query

    return Call("AssociativeMemory.read", run, given, kinds, truth, 1e-7, ("queries",))


class _Few(Whole):
    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if not (isinstance(v, int) and v > 100)]


def energy(draw: Draw) -> Call:
    memory, keys, _ = _held(draw, True)
    queries = draw.normal(*keys.shape[:2], draw.whole(1, 4), keys.shape[3])
    rows = tuple(queries.shape[:3])
    given = {"queries": queries, "scale": draw.one(None, 0.8), "params": draw.one(None, {})}
    kinds: dict[str, Kind] = {
        "queries": Floats(fixed=(0, 1, 3) if keys.shape[0] > 1 else (1, 3), short=True),
        "scale": Real(low=0.0, strict=True, none=True, rows=(rows,)),
        "params": Params(none=True, names=tuple(memory.spec.params)),
    }
    return Call("AssociativeMemory.energy", memory.energy, given, kinds)


def forget(draw: Draw) -> Call:
    memory, keys, values = _memory(draw)
    n = keys.shape[2]
    way = draw.one("indices", "oldest", "everything")
    given = {"indices": None, "oldest": None, "everything": False, "pairs": None}
    given[way] = {"indices": [0], "oldest": 1, "everything": True}[way]

    def run(**arguments: Any) -> Any:
        memory.forget(everything=True)
        memory.write(keys, values)
        return memory.forget(**arguments)

    inside = lambda i: isinstance(i, int) and not isinstance(i, bool) and -n <= i < n  # noqa: E731
    places = lambda v: isinstance(v, (list, tuple)) and all(map(inside, v))  # noqa: E731
    kinds: dict[str, Kind] = {
        "indices": Other(test=places, also=([n], [-n - 1], [0.5], [True], torch.tensor([0.0]), torch.tensor([[0]]))),
        "oldest": Whole(low=0),
        "everything": Other(test=lambda v: v is True),
    }
    kinds = {way: kinds[way], "pairs": Refused(none=True, also=((keys, values),))}
    return Call("AssociativeMemory.forget", run, given, kinds)


def forget_pairs(draw: Draw) -> Call:
    batch, heads, n = draw.one(1, 2), draw.one(1, 2), draw.whole(1, 4)
    keys, values = draw.normal(batch, heads, n, 3), draw.normal(batch, heads, n, 2)
    memory = AssociativeMemory("linear", store="sums")

    def run(**arguments: Any) -> Any:
        memory.forget(everything=True)
        memory.write(keys, values)
        return memory.forget(**arguments)

    pair = Other(
        also=((keys,), (keys, values, values), (keys, values[:, :, :, :1]), (keys[:, :1], 3), keys, (None, None))
    )
    return Call("AssociativeMemory.forget", run, {"pairs": (keys, values)}, {"pairs": pair})


def transform(draw: Draw) -> Call:
    memory, keys, values = _memory(draw)
    memory.write(keys, values)
    bad = (lambda t: t[:, :, :1, :1, None], lambda t: t.half(), lambda t: None, lambda t: t.to("meta"))
    return Call("AssociativeMemory.transform", memory.transform, {"fn": lambda t: 0.5 * t}, {"fn": _Function(also=bad)})


class _Function(Other):
    """A function of a tensor; what raises by itself is left out."""

    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if v is not object]


# Product keys ------------------------------------------------------------------------------------------------------


def _search(draw: Draw) -> tuple[dict[str, Any], dict[str, Kind]]:
    batch, tokens, heads, n, half = draw.one(1, 2), draw.whole(1, 4), draw.one(1, 2), draw.whole(2, 5), draw.whole(1, 3)
    dtype = draw.one(torch.float64, torch.float64, torch.float32)
    own = draw.often((batch,), ())
    given = {
        "query": draw.normal(batch, tokens, heads, 2 * half, dtype=dtype),
        "keys": draw.normal(*own, heads, 2, n, half, dtype=dtype),
        "top_k": draw.whole(1, n),
        "score": draw.one("idw", "dot"),
        "eps": draw.one(1e-3, 0.1),
    }
    axes = tuple(range(1 if own and batch == 1 else 0, 3 + len(own))) if own else (0, 1, 3)
    kinds: dict[str, Kind] = {
        "query": Floats(fixed=(2, 3), dtype=False),
        "keys": Floats(fixed=axes[:-1] if own else axes, dtype=False, broadcast=batch == 1),
        "top_k": Whole(low=1, high=n),
        "score": Word(words=("idw", "dot", "inverse-distance")),
        "eps": Real(low=0.0, high=1e30, strict=True),
    }
    if own:
        kinds["keys"] = Floats(fixed=(0, 1, 2, 4), dtype=False, broadcast=True)
    return given, kinds


def product_key_search(draw: Draw) -> Call:
    given, kinds = _search(draw)

    def run(**arguments: Any) -> Tensor:
        return product_key.product_key_search(**arguments).scores

    def truth(**wide: Any) -> Tensor:
        keys = wide["keys"] if wide["keys"].dim() == 4 else wide["keys"][:, None]
        scores = dense_fast_weights.all_scores(
            dense_fast_weights.half_scores(wide["query"], keys, given["score"], given["eps"])
        )
        return scores.sort(dim=-1, descending=True).values[..., : given["top_k"]]

    tolerance = 1e-9 if given["query"].dtype == torch.float64 else 1e-3
    return Call("product_key_search", run, given, kinds, truth, tolerance, ("query", "keys"))


def product_key_read(draw: Draw) -> Call:
    given, kinds = _search(draw)
    n = given["keys"].shape[-2]
    given |= {
        "values": draw.normal(n * n, draw.whole(1, 3), dtype=given["query"].dtype),
        "spec": draw.one(*WEIGHTS),
        "joint": draw.flag(),
    }
    kinds |= {"values": Floats(fixed=(0,), dtype=False), "spec": SIGNED, "joint": Flag()}
    return Call("product_key_read", product_key.product_key_read, given, kinds)


def slot_weights(draw: Draw) -> Call:
    given, _ = _search(draw)
    found = product_key.product_key_search(**given)
    arguments = {"found": found, "spec": draw.one(*WEIGHTS), "joint": draw.flag()}
    return Call(
        "slot_weights", product_key.slot_weights, arguments, {"found": Other(), "spec": SIGNED, "joint": Flag()}
    )


# Fast weights ------------------------------------------------------------------------------------------------------


def fast_weight_memory(draw: Draw) -> Call:
    batch, tokens, heads, n, half = draw.one(1, 2), draw.whole(1, 9), draw.one(1, 2), draw.whole(2, 4), draw.whole(1, 3)
    width, chunk = draw.whole(1, 3), draw.whole(2, 5)
    rule = draw.one("normalized", "paper", "reference")
    gate = draw.uniform(0.1, 0.9, batch, tokens)
    segments = draw.often(draw.integers(2, draw.one(1, batch), tokens).sort(1).values)
    shared = segments is None and batch == 1 and draw.flag()
    given = {
        "query": draw.normal(batch, tokens, heads, 2 * half),
        "value": draw.normal(batch, tokens, width),
        "gate": draw.one(gate, gate, None),
        "keys": draw.normal(heads, 2, n, half),
        "values": draw.normal(n * n, width),
        "rule": rule,
        "top_k": draw.whole(1, n),
        "chunk_size": chunk,
        "spec": "softmax",
        "score": draw.one("idw", "dot"),
        "eps": draw.one(1e-3, 0.1),
        "shared": shared,
        "state": None,
        "mask": draw.often(draw.mask(batch, tokens)),
        "segment_ids": segments,
        "frozen": draw.often(True, False),
        "mix": draw.often(True, False),
        "meta_grad": draw.one(True, False, 2),
        "storage": None,
        "impl": draw.one("auto", "reference", "sparse"),
        "observer": None,
        "sync": None,
    }
    states = _states(given)
    kinds: dict[str, Kind] = {
        "query": Floats(fixed=(0, 1, 2, 3) if batch > 1 else (1, 2, 3), dtype=False),
        "value": Floats(fixed=(0, 1, 2), dtype=False),
        "gate": Floats(none=True, fixed=(0, 1), dtype=False),
        "keys": Floats(fixed=(0, 1, 3), dtype=False),
        "values": Floats(fixed=(0, 1), dtype=False),
        "rule": Word(words=tuple(step_rules.names(aliases=True))),
        "top_k": Whole(low=1, high=n),
        "chunk_size": Whole(low=2),
        "spec": SIGNED,
        "score": Word(words=("idw", "dot", "inverse-distance")),
        "eps": Real(low=0.0, high=1e30, strict=True),
        "shared": Flag() if segments is None else _NeverTrue(),
        "state": Other(none=True, also=states),
        "mask": Mask(none=True, fixed=(0, 1)),
        "segment_ids": Integers(none=True, fixed=(1,)) if not shared else Refused(none=True),
        "frozen": Flag(),
        "mix": Flag(),
        "meta_grad": Other(test=lambda v: (isinstance(v, int) and v >= 1) or v is False),
        "storage": Other(none=True, also=("float32", torch.int8, torch.bool, torch.float8_e4m3fn)),
        "impl": Word(words=("auto", "reference", "dense", "sparse"), also=("triton",)),
        "sync": Refused(none=True),
        "observer": Other(none=True),
    }
    call = Call("fast_weight_memory", regard.fast_weight_memory, given, kinds)
    plain = given["mask"] is None and segments is None and not given["frozen"] and not given["mix"]
    if plain and given["gate"] is not None and batch == 1:

        def truth(**wide: Any) -> Tensor:
            memory = dense_fast_weights.Dense(
                wide["keys"], wide["values"], given["top_k"], rule, score=given["score"], eps=given["eps"]
            )
            return dense_fast_weights.stream(memory, wide["query"], wide["value"], wide["gate"], chunk)

        call.truth, call.tolerance = truth, 1e-6
    return call


def _states(given: dict[str, Any]) -> tuple[Any, ...]:
    """States of other memories."""
    one = {n: given[n] for n in ("query", "value", "keys", "values", "chunk_size", "rule")} | {"gate": None, "top_k": 1}
    other = regard.fast_weight_memory(
        **{**one, "values": torch.cat([one["values"]] * 2, 1), "value": torch.cat([one["value"]] * 2, 2)}
    )[1]
    many = regard.fast_weight_memory(
        **{**one, "query": one["query"].repeat(3, 1, 1, 1), "value": one["value"].repeat(3, 1, 1)}
    )[1]
    return other, many, regard.LinearState.empty("elu", 1, 1, 2, 2)


def write_rule(draw: Draw) -> Call:
    given = {
        "name": draw.one("normalized", "paper", "reference"),
        "learning_rate": 0.5,
        "address_weight": 2.0,
        "key_update": draw.one("entropy", "mse", "none"),
        "look_ahead": draw.flag(),
        "border": draw.flag(),
        "gate_loss": draw.flag(),
    }
    kinds: dict[str, Kind] = {
        "name": Word(words=tuple(step_rules.names(aliases=True))),
        "learning_rate": Real(low=0.0),
        "address_weight": Real(low=0.0),
        "key_update": Word(words=("entropy", "mse", "none")),
        "look_ahead": Flag(),
        "border": Flag(),
        "gate_loss": Flag(),
    }
    return Call("WriteRule", regard.WriteRule, given, kinds)


def flush_memory(draw: Draw) -> Call:
    first = fast_weight_memory(draw)
    first.given |= {"mask": None, "segment_ids": None, "frozen": False}
    state = first.run(**first.given)[1]
    names = ("rule", "spec", "score", "meta_grad")
    given = {"state": state, **{n: first.given[n] for n in names}, "observer": None, "sync": None}
    kinds = {"state": Other(), **{n: first.kinds[n] for n in (*names, "sync")}}

    def run(**arguments: Any) -> Any:
        return fast_weights.flush(**arguments).keys

    return Call("fast_weight_memory.flush", run, given, kinds)


def _chunked(draw: Draw, batch: int, tokens: int) -> tuple[dict[str, Any], dict[str, Kind]]:
    given = {
        "state": None,
        "mask": draw.often(draw.mask(batch, tokens)),
        "frozen": draw.often(True, False),
        "segment_ids": draw.often(draw.integers(2, batch, tokens).sort(1).values),
        "meta_grad": draw.one(True, False, 2),
    }
    kinds: dict[str, Kind] = {
        "state": Other(none=True, also=(regard.LinearState.empty("elu", 1, 1, 2, 2),)),
        "mask": Mask(none=True, fixed=(0, 1)),
        "segment_ids": Integers(none=True, fixed=(1,)),
        "frozen": Flag(),
        "meta_grad": Other(test=lambda v: (isinstance(v, int) and v >= 1) or v is False),
    }
    return given, kinds


def _networks(weights: tuple[Tensor, ...]) -> Other:
    """Weights of networks, which may be wrong in many ways."""
    a, b, c = weights
    return Other(
        also=(
            (a, b),
            (a, b, c, c),
            (a, b, None),
            (a, b, 3),
            (a.long(), b, c),
            (a, b[:1, ...], c[..., :-1]),
            (a[None], b, c),
            (a.to("meta"), b, c),
            (a, b, c.to(torch.complex64)),
            a,
            "abc",
        )
    )


def fast_weight_mlp(draw: Draw) -> Call:
    batch, tokens, wide, inner, out = (
        draw.one(1, 2),
        draw.whole(1, 9),
        draw.whole(1, 3),
        draw.whole(1, 4),
        draw.whole(1, 3),
    )
    chunk = draw.whole(2, 4)
    weights = tuple(draw.normal(*s, scale=0.5) for s in ((inner, wide + 1), (inner, wide + 1), (out, inner + 1)))
    given, kinds = _chunked(draw, batch, tokens)
    given |= {
        "query": draw.normal(batch, tokens, wide),
        "value": draw.normal(batch, tokens, out),
        "weights": weights,
        "chunk_size": chunk,
        "learning_rate": 0.1,
        "target": draw.one("mean", "look-ahead"),
        "shared": False,
    }
    kinds |= {
        "query": Floats(fixed=(0, 1, 2), dtype=False),
        "value": Floats(fixed=(0, 1, 2), dtype=False),
        "weights": _networks(weights),
        "chunk_size": Whole(low=2),
        "learning_rate": Real(low=0.0, also=(), high=1e10),
        "target": Word(words=("mean", "look-ahead")),
        "shared": Flag() if given["segment_ids"] is None else _NeverTrue(),
    }
    kinds["learning_rate"] = _NotHuge(low=0.0)
    call = Call("fast_weight_mlp", mlp.fast_weight_mlp, given, kinds)
    if given["mask"] is None and given["segment_ids"] is None and not given["frozen"]:

        def truth(**w: Any) -> Tensor:
            rows = zip(w["query"], w["value"], strict=True)
            return torch.stack([fwmlp_oracle.stream(q, v, w["weights"], given["target"], chunk)[0] for q, v in rows])

        call.truth = truth
    return call


class _NotHuge(Real):
    """Rates: numbers so large that results overflow are left out."""

    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if not (isinstance(v, (int, float)) and v > 1e6)]


def large_chunk_ttt(draw: Draw) -> Call:
    batch, tokens, heads, dim, inner = (
        draw.one(1, 2),
        draw.whole(1, 9),
        draw.one(1, 2),
        draw.whole(2, 3),
        draw.whole(1, 4),
    )
    size = (batch, tokens, heads)
    weights = tuple(draw.normal(heads, *s, scale=0.5) for s in ((inner, dim), (inner, dim), (dim, inner)))
    given, kinds = _chunked(draw, batch, tokens)
    optimizer = draw.one("sgd", "momentum", "muon", "momentum-muon")
    given |= {
        "query": draw.normal(*size, dim),
        "key": draw.normal(*size, dim),
        "value": draw.normal(*size, dim),
        "rates": draw.uniform(0.0, 0.1, *size, 3),
        "weights": weights,
        "share": draw.uniform(0.1, 0.9, *size),
        "chunk_size": draw.whole(1, 4),
        "optimizer": optimizer,
    }
    all_axes = Floats(fixed=(0, 1, 2, 3), dtype=False)
    kinds |= {
        "query": all_axes,
        "key": all_axes,
        "value": all_axes,
        "rates": all_axes,
        "weights": _networks(weights),
        "share": Floats(none="momentum" not in optimizer, fixed=(0, 1, 2), dtype=False),
        "chunk_size": Whole(low=1),
        "optimizer": Word(words=("sgd", "momentum", "muon", "momentum-muon")),
    }
    call = Call("large_chunk_ttt", large_chunk.large_chunk_ttt, given, kinds)
    if given["mask"] is None and given["segment_ids"] is None and not given["frozen"]:
        names = ("query", "key", "value", "rates", "share")

        def truth(**w: Any) -> Tensor:
            rows = [
                torch.stack(
                    [
                        _lact(given, {n: w[n][b, :, h] for n in names}, tuple(x[h] for x in w["weights"]))
                        for h in range(heads)
                    ],
                    1,
                )
                for b in range(batch)
            ]
            return torch.stack(rows)

        call.truth, call.tolerance = truth, 1e-6
    return call


def _lact(given: dict[str, Any], x: dict[str, Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    """One head of one row, chunk after chunk."""
    learner, chunk, out = lact_oracle.Learner(weights, given["optimizer"]), given["chunk_size"], []
    for start in range(0, len(x["query"]), chunk):
        if start:
            span = slice(start - chunk, start)
            learner.teach(x["key"][span], x["value"][span], x["rates"][span], x["share"][span])
        out.append(lact_oracle.network(x["query"][start : start + chunk], learner.w))
    return torch.cat(out).detach()


def leaky_average(draw: Draw) -> Call:
    batch, heads, tokens, dim = draw.one(1, 2), draw.one(1, 2), draw.whole(1, 9), draw.whole(1, 3)
    dtype = draw.one(torch.float64, torch.float32)
    given = {
        "x": draw.normal(batch, heads, tokens, dim, dtype=dtype),
        "rate": draw.one(0.0, 0.3, draw.uniform(0.0, 1.0, heads, dtype=dtype)),
        "mask": draw.often(draw.mask(batch, tokens)),
        "state": None,
        "average": draw.flag(),
        "chunk_size": draw.one(None, 2),
    }
    wrong = leaky.leaky_average(given["x"].repeat(3, 1, 1, 1), 0.1)[1]
    kinds: dict[str, Kind] = {
        "x": Floats(fixed=(), dtype=False, alone=True),
        "rate": Real(low=0.0, rows=((heads,),)),
        "mask": Mask(none=True, fixed=(0, 1)),
        "state": Other(none=True, also=(wrong, regard.LinearState.empty("elu", 1, 1, 2, 2))),
        "average": Flag(),
        "chunk_size": Whole(low=1, none=True),
    }

    def truth(**w: Any) -> Tensor:
        rate = w["rate"] if isinstance(w["rate"], Tensor) else torch.full((heads,), w["rate"], dtype=torch.float64)
        h, out = torch.zeros(batch, heads, dim, dtype=torch.float64), []
        for t in range(tokens):
            real = torch.ones(batch, dtype=torch.bool) if given["mask"] is None else given["mask"][:, t]
            h = torch.where(real[:, None, None], w["x"][:, :, t] + (-rate).exp()[:, None] * h, h)
            out.append(h * (1 - (-rate).exp())[:, None] if given["average"] else h)
        return torch.stack(out, 2)

    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    return Call("leaky_average", leaky.leaky_average, given, kinds, truth, tolerance, ("x",))
