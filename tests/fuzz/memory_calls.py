"""Valid calls of the memories: associative, product-key, fast-weight and leaky."""

from typing import Any

import torch
from contracts import oracle
from torch import Tensor

import regard
from regard.memory import fast_weight_mlp as mlp
from regard.memory import fast_weights, large_chunk, product_key
from regard.memory.associative import AssociativeMemory
from regard.memory.fast_weight_rules import step_rules
from regard.recurrent import leaky

from .attention_calls import parameters
from .draw import Arguments, Call, Draw, alike, arguments, called, public, split
from .kinds import (
    NEVER,
    ONLY_NONE,
    RAISES,
    RATE,
    SIZE,
    STEPS,
    Anything,
    Flag,
    Floats,
    Integers,
    Kind,
    Mask,
    Real,
    SpecValue,
    Whole,
    Word,
)

IMPLS = ("auto", "reference", "dense", "sparse")
SCORES = ("idw", "dot", "inverse-distance")
OPTIMIZERS = ("sgd", "momentum", "muon", "momentum-muon")
EPS = Real(low=0.0, high=1e30, strict=True)
WEIGHTS = ("softmax", "sparsemax", "biweight")
SIGNED = SpecValue(also=("linear", "local-linear", "rbf"))


@public("AssociativeMemory", AssociativeMemory)
def associative(draw: Draw) -> Arguments:
    slots, spec, capacity = draw.one(0, 3), draw.one("softmax", "biweight", "linear"), draw.one(None, 4)
    dim, tied = 3 if slots else draw.one(None, 3), draw.flag() if slots else False
    sums = spec == "linear" and not capacity
    return arguments(
        spec=(spec, SpecValue(also=("softmx",))),
        scale=(draw.one(None, 0.7), Real(low=0.0, strict=True, none=True)),
        params=(draw.one(None, {}), parameters()),
        store=("pairs", Anything() if sums else Word(words=("pairs",))),
        capacity=(capacity, Whole(low=1, none=True)),
        overflow=draw.word("oldest", "error"),
        slots=(slots, Whole(low=0, most=10**6) if dim and not tied else Anything()),
        heads=(draw.one(1, 2), SIZE),
        dim=(dim, Anything() if slots or dim is None else Whole(low=1, none=True, most=10**6)),
        value_dim=3 if slots else None,
        tied=(tied, Flag() if slots else NEVER),
        combine=draw.word("shared", "separate"),
        impl=("auto", Word(words=("auto", "reference", "blocked", "cpu", "sdpa"))),
        generator=(draw.one(None, torch.Generator()), Kind(none=True)),
    )


def _memory(draw: Draw, **options: Any) -> tuple[AssociativeMemory, Tensor, Tensor]:
    batch, heads, pairs, dim = draw.one(1, 2), draw.one(1, 2), draw.whole(1, 5), draw.whole(2, 4)
    made = AssociativeMemory(draw.one("softmax", "biweight", "rbf"), **options).double()
    return made, draw.normal(batch, heads, pairs, dim), draw.normal(batch, heads, pairs, dim)


@public("AssociativeMemory.write")
def write(draw: Draw) -> Call:
    memory, keys, values = _memory(draw)
    memory.write(keys, values)
    return called(
        "AssociativeMemory.write",
        memory.write,
        keys=(keys, Floats(fixed=(1, 3) if len(keys) == 1 else (0, 1, 3), short=True)),
        values=(values, Floats(none=True, fixed=(2, 3), short=True)),
        mask=(draw.one(None, draw.mask(keys.shape[0], keys.shape[2])), Mask(none=True, fixed=(1,), short=True)),
    )


def _held(draw: Draw, tied: bool) -> tuple[AssociativeMemory, Tensor, Tensor]:
    memory, keys, values = _memory(draw)
    values = keys if tied else values
    memory.write(keys) if tied else memory.write(keys, values)
    return memory, keys, values


def _asked(draw: Draw, memory: AssociativeMemory, keys: Tensor) -> dict[str, Any]:
    """What `read` and `energy` share."""
    queries = draw.normal(*keys.shape[:2], draw.whole(1, 4), keys.shape[3])
    rows = tuple(queries.shape[:3])
    scale = draw.one(None, 0.8, draw.uniform(0.5, 1.0, *rows))
    return {
        "queries": (queries, Floats(fixed=(0, 1, 3) if len(keys) > 1 else (1, 3), short=True)),
        "scale": (scale, Real(low=0.0, strict=True, none=True, rows=(rows,))),
        "params": (draw.one(None, {}), parameters(*memory.spec.params)),
    }


@public("AssociativeMemory.read")
def read(draw: Draw) -> Call:
    memory, keys, values = _held(draw, tied := draw.flag())
    steps = draw.whole(1, 3)

    def run(**arguments: Any) -> Any:
        found = memory.read(**arguments)
        return found if isinstance(found, Tensor) else found.values

    def truth(**wide: Any) -> Tensor:
        query, scale = wide["queries"], wide["scale"]
        seen = torch.ones(*query.shape[:3], keys.shape[2], dtype=torch.bool)
        for _ in range(steps):
            query = oracle.attention(oracle.read(memory.spec), query, keys, values, seen, scale)[0]
        return query

    call = called(
        "AssociativeMemory.read",
        run,
        **_asked(draw, memory, keys),
        steps=(steps, Whole(low=1, most=100)),
        return_trajectory=draw.flag(),
        return_energy=(tied and draw.flag(), Flag() if tied else NEVER),
        return_diagnostics=draw.flag(),
    )
    call.truth, call.tolerance, call.gradients = truth, 1e-7, ("queries",)
    return call


@public("AssociativeMemory.energy")
def energy(draw: Draw) -> Call:
    memory, keys, _ = _held(draw, True)
    return called("AssociativeMemory.energy", memory.energy, **_asked(draw, memory, keys))


@public("AssociativeMemory.forget")
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
        "indices": Kind(test=places, also=([n], [-n - 1], [0.5], [True], torch.tensor([0.0]), torch.tensor([[0]]))),
        "oldest": Whole(low=0),
        "everything": Kind(test=lambda v: v is True),
    }
    kinds = {way: kinds[way], "pairs": Kind(none=True, also=((keys, values),))}
    return Call("AssociativeMemory.forget", run, given, kinds)


@public("AssociativeMemory.forget-pairs")
def forget_pairs(draw: Draw) -> Call:
    batch, heads, n = draw.one(1, 2), draw.one(1, 2), draw.whole(1, 4)
    keys, values = draw.normal(batch, heads, n, 3), draw.normal(batch, heads, n, 2)
    memory = AssociativeMemory("linear", store="sums")

    def run(**arguments: Any) -> Any:
        memory.forget(everything=True)
        memory.write(keys, values)
        return memory.forget(**arguments)

    wrong = ((keys,), (keys, values, values), (keys, values[:, :, :, :1]), (keys[:, :1], 3), keys, (None, None))
    return Call("AssociativeMemory.forget", run, {"pairs": (keys, values)}, {"pairs": Kind(also=wrong)})


@public("AssociativeMemory.transform")
def transform(draw: Draw) -> Call:
    memory, keys, values = _memory(draw)
    memory.write(keys, values)
    bad = (lambda t: t[:, :, :1, :1, None], lambda t: t.half(), lambda t: None, lambda t: t.to("meta"))
    halved = (lambda t: 0.5 * t, Kind(also=bad, skip=RAISES))
    return called("AssociativeMemory.transform", memory.transform, fn=halved)


def _search(draw: Draw) -> dict[str, Any]:
    batch, tokens, heads, n, half = draw.one(1, 2), draw.whole(1, 4), draw.one(1, 2), draw.whole(2, 5), draw.whole(1, 3)
    dtype = draw.one(torch.float64, torch.float64, torch.float32)
    own = draw.often((batch,), ())
    keys = Floats(fixed=(0, 1, 2, 4) if own else (0, 1, 3), dtype=False, broadcast=bool(own) or batch == 1)
    return {
        "query": (draw.normal(batch, tokens, heads, 2 * half, dtype=dtype), Floats(fixed=(2, 3), dtype=False)),
        "keys": (draw.normal(*own, heads, 2, n, half, dtype=dtype), keys),
        "top_k": (draw.whole(1, n), Whole(low=1, high=n)),
        "score": draw.word(*SCORES),
        "eps": (draw.one(1e-3, 0.1), EPS),
    }


@public("product_key_search")
def product_key_search(draw: Draw) -> Call:
    def run(**arguments: Any) -> Tensor:
        return product_key.product_key_search(**arguments).scores

    return called("product_key_search", run, **_search(draw))


@public("product_key_read", product_key.product_key_read)
def product_key_read(draw: Draw) -> Arguments:
    given = _search(draw)
    (query, _), n = given["query"], given["keys"][0].shape[-2]
    values = draw.normal(n * n, draw.whole(1, 3), dtype=query.dtype)
    return arguments(**given, values=(values, Floats(fixed=(0,), dtype=False)), spec=(draw.one(*WEIGHTS), SIGNED))


@public("slot_weights", product_key.slot_weights)
def slot_weights(draw: Draw) -> Arguments:
    found = product_key.product_key_search(**split(_search(draw))[0])
    return arguments(found=(found, Kind()), spec=(draw.one(*WEIGHTS), SIGNED))


@public("fast_weight_memory")
def fast_weight_memory(draw: Draw) -> Call:
    batch, tokens, heads, n, half = draw.one(1, 2), draw.whole(1, 9), draw.one(1, 2), draw.whole(2, 4), draw.whole(1, 3)
    width, chunk, few = draw.whole(1, 3), draw.whole(2, 5), draw.whole(1, n)
    gate = draw.uniform(0.1, 0.9, batch, tokens)
    segments = draw.often(draw.integers(2, draw.one(1, batch), tokens).sort(1).values)
    shared = segments is None and batch == 1 and draw.flag()
    rule = (draw.one("normalized", "paper", "reference"), Word(words=tuple(step_rules.names(aliases=True))))
    dtypes = ("float32", torch.int8, torch.bool, torch.float8_e4m3fn)
    sizes = (batch, tokens, heads, 2 * half)
    call = called(
        "fast_weight_memory",
        regard.fast_weight_memory,
        query=(draw.normal(*sizes), Floats(fixed=(0, 1, 2, 3) if batch > 1 else (1, 2, 3), dtype=False)),
        value=(draw.normal(batch, tokens, width), Floats(fixed=(0, 1, 2), dtype=False)),
        gate=(draw.one(gate, gate, None), Floats(none=True, fixed=(0, 1), dtype=False)),
        keys=(draw.normal(heads, 2, n, half), Floats(fixed=(0, 1, 3), dtype=False)),
        values=(draw.normal(n * n, width), Floats(fixed=(0, 1), dtype=False)),
        rule=rule,
        top_k=(few, Whole(low=1, high=n)),
        chunk_size=(chunk, Whole(low=2)),
        spec=("softmax", SIGNED),
        score=draw.word(*SCORES),
        eps=(draw.one(1e-3, 0.1), EPS),
        shared=(shared, Flag() if segments is None else NEVER),
        mask=(draw.often(draw.mask(batch, tokens)), Mask(none=True, fixed=(0, 1))),
        segment_ids=(segments, ONLY_NONE if shared else Integers(none=True, fixed=(1,))),
        frozen=draw.often(True, False),
        mix=draw.often(True, False),
        meta_grad=(draw.one(True, False, 2), STEPS),
        storage=(None, Kind(none=True, also=dtypes)),
        impl=(draw.one("auto", "reference", "sparse"), Word(words=IMPLS, also=("triton",))),
        observer=(None, Kind(none=True)),
        sync=(None, ONLY_NONE),
    )
    call.given["state"], call.kinds["state"] = None, Kind(none=True, also=_states(call.given))
    return call


def _states(given: dict[str, Any]) -> tuple[Any, ...]:
    """States of other memories."""
    one = {n: given[n] for n in ("query", "value", "keys", "values", "chunk_size", "rule")} | {"gate": None, "top_k": 1}
    wider = {"values": torch.cat([one["values"]] * 2, 1), "value": torch.cat([one["value"]] * 2, 2)}
    more = {"query": one["query"].repeat(3, 1, 1, 1), "value": one["value"].repeat(3, 1, 1)}
    others = (regard.fast_weight_memory(**{**one, **changes})[1] for changes in (wider, more))
    return *others, regard.LinearState.empty("elu", 1, 1, 2, 2)


@public("WriteRule", regard.WriteRule)
def write_rule(draw: Draw) -> Arguments:
    name = (draw.one("normalized", "paper", "reference"), Word(words=tuple(step_rules.names(aliases=True))))
    return arguments(
        name=name, key_update=draw.word("entropy", "mse", "none"), **alike(RATE, learning_rate=0.5, address_weight=2.0)
    )


@public("fast_weight_memory.flush")
def flush_memory(draw: Draw) -> Call:
    first = fast_weight_memory(draw)
    first.given |= {"mask": None, "segment_ids": None, "frozen": False}
    state = first.run(**first.given)[1]
    names = ("rule", "spec", "score", "meta_grad")
    given = {"state": state, **{n: first.given[n] for n in names}, "observer": None, "sync": None}
    kinds = {"state": Kind(), **{n: first.kinds[n] for n in (*names, "sync")}}

    def run(**arguments: Any) -> Any:
        return fast_weights.flush(**arguments).keys

    return Call("fast_weight_memory.flush", run, given, kinds)


def _chunked(draw: Draw, batch: int, tokens: int) -> dict[str, Any]:
    segments = draw.often(draw.integers(2, batch, tokens).sort(1).values)
    return {
        "state": (None, Kind(none=True, also=(regard.LinearState.empty("elu", 1, 1, 2, 2),))),
        "mask": (draw.often(draw.mask(batch, tokens)), Mask(none=True, fixed=(0, 1))),
        "frozen": draw.often(True, False),
        "segment_ids": (segments, Integers(none=True, fixed=(1,))),
        "meta_grad": (draw.one(True, False, 2), STEPS),
    }


def _networks(weights: tuple[Tensor, ...]) -> Kind:
    """Weights of networks, which may be wrong in many ways."""
    a, b, c = weights
    kinds = ((a.long(), b, c), (a.to("meta"), b, c), (a, b, c.to(torch.complex64)))
    sizes = ((a, b[:1, ...], c[..., :-1]), (a[None], b, c))
    return Kind(also=((a, b), (a, b, c, c), (a, b, None), (a, b, 3), a, "abc", *kinds, *sizes))


@public("fast_weight_mlp", mlp.fast_weight_mlp)
def fast_weight_mlp(draw: Draw) -> Arguments:
    batch, tokens, wide, inner, out = (draw.whole(1, most) for most in (2, 9, 3, 4, 3))
    full, shared = Floats(fixed=(0, 1, 2), dtype=False), _chunked(draw, batch, tokens)
    weights = tuple(draw.normal(*s, scale=0.5) for s in ((inner, wide + 1), (inner, wide + 1), (out, inner + 1)))
    return arguments(
        **shared,
        query=(draw.normal(batch, tokens, wide), full),
        value=(draw.normal(batch, tokens, out), full),
        weights=(weights, _networks(weights)),
        chunk_size=(draw.whole(2, 4), Whole(low=2)),
        learning_rate=(0.1, Real(low=0.0, most=1e6)),
        target=draw.word("mean", "look-ahead"),
        shared=(False, Flag() if shared["segment_ids"][0] is None else NEVER),
    )


@public("large_chunk_ttt", large_chunk.large_chunk_ttt)
def large_chunk_ttt(draw: Draw) -> Arguments:
    batch, tokens, heads, inner, dim = *(draw.whole(1, most) for most in (2, 9, 2, 4)), draw.whole(2, 3)
    size, optimizer = (batch, tokens, heads), draw.word(*OPTIMIZERS)
    weights = tuple(draw.normal(heads, *s, scale=0.5) for s in ((inner, dim), (inner, dim), (dim, inner)))
    full = Floats(fixed=(0, 1, 2, 3), dtype=False)
    share = Floats(none="momentum" not in str(optimizer[0]), fixed=(0, 1, 2), dtype=False)
    return arguments(
        **_chunked(draw, batch, tokens),
        query=(draw.normal(*size, dim), full),
        key=(draw.normal(*size, dim), full),
        value=(draw.normal(*size, dim), full),
        rates=(draw.uniform(0.0, 0.1, *size, 3), full),
        weights=(weights, _networks(weights)),
        share=(draw.uniform(0.1, 0.9, *size), share),
        chunk_size=(draw.whole(1, 4), Whole(low=1)),
        optimizer=optimizer,
    )


@public("leaky_average", leaky.leaky_average)
def leaky_average(draw: Draw) -> Arguments:
    batch, heads, tokens, dim = (draw.whole(1, most) for most in (2, 2, 9, 3))
    dtype = draw.one(torch.float64, torch.float32)
    x = draw.normal(batch, heads, tokens, dim, dtype=dtype)
    rate = draw.one(0.0, 0.3, draw.uniform(0.0, 1.0, heads, dtype=dtype))
    wrong = leaky.leaky_average(x.repeat(3, 1, 1, 1), 0.1)[1]
    return arguments(
        x=(x, Floats(fixed=(), dtype=False, alone=True)),
        rate=(rate, Real(low=0.0, rows=((heads,),))),
        mask=(draw.often(draw.mask(batch, tokens)), Mask(none=True, fixed=(0, 1))),
        state=(None, Kind(none=True, also=(wrong, regard.LinearState.empty("elu", 1, 1, 2, 2)))),
        average=draw.flag(),
        chunk_size=(draw.one(None, 2), Whole(low=1, none=True)),
    )
