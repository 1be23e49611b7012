"""Valid calls of the rest: configurations, tasks, measures, hooks and the bridge to transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard import inspect, models, tasks
from regard.inspect import gates, measures, mechanisms
from regard.integrations import transformers as bridge

from .draw import Call, Draw
from .kinds import Among, Flag, Floats, Integers, Kind, Other, Real, Sentence, Whole, Word
from .layer_calls import EPS, SIZE, _made, _Theta
from .memory_calls import _Small

TINY = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
PER_LAYER = (["softmax"], ["softmax", 3], ["softmax"] * 3, "softmx")
TOKEN = Whole(none=True, low=0, high=10)
BASE: dict[str, Kind] = {
    "vocab_size": _Small(low=4),
    "hidden_size": _Small(low=2, even=True),
    "num_attention_heads": Among(these=(1, 2), also=(3,)),
    "max_position_embeddings": SIZE,
    "mixers": Other(also=PER_LAYER),
    "initializer_range": EPS,
    "tie_word_embeddings": Flag(),
    "use_cache": Flag(),
    "pad_token_id": TOKEN,
    "bos_token_id": TOKEN,
}


def empty(value: Any) -> bool:
    """Whether a value is an empty text or mapping."""
    return isinstance(value, (str, dict)) and not value


def _base(draw: Draw) -> dict[str, Any]:
    return {
        **TINY,
        "mixers": draw.one("softmax", "biweight"),
        "initializer_range": 0.02,
        "tie_word_embeddings": draw.flag(),
        "use_cache": draw.flag(),
        "pad_token_id": draw.one(None, 3),
        "bos_token_id": None,
    }


def _kinds(given: dict[str, Any]) -> dict[str, Kind]:
    return {**BASE, "vocab_size": _Small(low=1 if given["pad_token_id"] is None else 4)}


def hybrid(draw: Draw) -> Call:
    given = {
        **_base(draw),
        "num_key_value_heads": None,
        "head_dim": 4,
        "intermediate_size": 6,
        "feed_forward": draw.one("swiglu", "gelu"),
        "norm": draw.one("rms", "layer"),
        "mixer_options": None,
        "window": draw.one(None, 3),
        "training_window": None,
        "training_window_share": 0.9,
        "output_gate": draw.flag(),
        "rotary_share": 1.0,
        "memories": None,
        "memory_place": "before-mixer",
        "memory_options": None,
        "temperatures": "fixed",
        "ridges": "fixed",
        "qk_norm": draw.one(None, "rms"),
        "share_query_key": False,
        "exclude_self": draw.flag(),
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "training_window_seed": 0,
    }
    kinds = {
        **_kinds(given),
        "hidden_size": SIZE,
        "num_attention_heads": SIZE,
        "head_dim": _Small(none=True, low=2, even=True),
        "intermediate_size": _Small(none=True, low=1),
        "feed_forward": Word(words=tuple(models.HybridConfig and ("swiglu", "gelu"))),
        "norm": Word(words=("rms", "layer")),
        "num_key_value_heads": Among(none=True, these=(1, 2), also=(3,)),
        "mixer_options": Other(none=True, test=empty, also=("x", {"x": {}}, {"lact": 3})),
        "window": _Window(none=True, low=1),
        "training_window": Whole(none=True, low=1),
        "training_window_share": Real(low=0.0, high=1.0),
        "output_gate": Flag(),
        "rotary_share": Real(low=0.0, strict=True, also=()),
        "memories": Other(none=True, test=empty, also=("FwPKM", "FwPKM@9", "x@1", "@")),
        "memory_place": Word(words=("before-mixer",)),
        "memory_options": Other(none=True, test=empty, also=("x", {"x": {}}, {"FwPKM": 3})),
        "temperatures": Other(also=("lg", ["log"], "log(slope=-1)")),
        "ridges": Other(also=("x", ["fixed"], "learned")),
        "qk_norm": Word(none=True, words=("rms", "l2")),
        "share_query_key": Flag(),
        "exclude_self": Flag(),
        "rope_theta": _Theta(low=0.0, strict=True),
        "rms_norm_eps": EPS,
        "training_window_seed": Whole(),
    }
    kinds["rotary_share"] = Real(low=1e-9, high=1.0)
    kinds["feed_forward"] = Other(also=("x",))
    kinds["memory_place"] = Other(also=("x",))
    return _made("HybridConfig", models.HybridConfig, given, kinds)


class _Window(Whole):
    """None, a number, or one for each layer."""

    def own(self, value: Any) -> bool:
        return super().own(value)


def mosaic(draw: Draw) -> Call:
    given = {
        **_base(draw),
        "persistent": "softmax",
        "persistent_slots": 3,
        "persistent_copies": 1,
        "persistent_keys": "own",
        "wiring": "sequential",
        "leaky": "sum",
        "look_ahead": "sum",
        "key_eps": 0.0,
        "scale_limit": 10.0,
        "persistent_scale_limit": 10.0,
        "learned": ("h", "bias"),
        "bandwidth_start": "wide",
        "uniform_gradient": "straight-through",
        "bias": draw.flag(),
        "norm_eps": 1e-5,
        "scale_logits": draw.flag(),
        "initializer": "fan-in",
    }
    word = Other(also=("x",))
    kinds = {
        **_kinds(given),
        "persistent": Other(also=("softmx", ["softmax"], "linear")),
        "persistent_slots": SIZE,
        "persistent_copies": SIZE,
        "persistent_keys": word,
        "wiring": word,
        "leaky": word,
        "look_ahead": word,
        "key_eps": Real(low=0.0),
        "scale_limit": Real(),
        "persistent_scale_limit": Real(),
        "learned": Other(test=lambda v: isinstance(v, (tuple, list)) and not v, also=("h", ["x"], [3])),
        "bandwidth_start": word,
        "uniform_gradient": word,
        "bias": Flag(),
        "norm_eps": EPS,
        "scale_logits": Flag(),
        "initializer": word,
    }
    kinds["persistent_slots"] = _Small(low=1, none=True)
    return _made("MemoryMosaicConfig", models.MemoryMosaicConfig, given, kinds)


def iclm(draw: Draw) -> Call:
    given = {
        **_base(draw),
        "phi_mixers": "softmax",
        "variant": "full",
        "f_attention_heads": None,
        "start": "param",
        "f_reads": "post",
        "phi_mlp": "gelu",
        "f_mlp": "inline",
        "f_feed_forward": "gelu",
        "intermediate_size": 6,
        "f_intermediate_size": 6,
        "f_rope": draw.flag(),
        "f_average": draw.flag(),
        "expectation": "none",
        "gd_steps": 1,
        "d_phi": None,
        "d_f": None,
        "tie_phi": draw.flag(),
        "norm_values": draw.flag(),
        "rope_theta": 1e4,
        "layer_norm_eps": 1e-5,
    }
    word = Other(also=("x",))
    kinds = {
        **_kinds(given),
        "mixers": Other(also=PER_LAYER[1:]),
        "hidden_size": Other(also=(7, -2)),
        "phi_mixers": Other(also=PER_LAYER[1:]),
        "variant": word,
        "start": word,
        "f_reads": word,
        "phi_mlp": word,
        "f_mlp": word,
        "f_feed_forward": word,
        "intermediate_size": _Small(low=1, none=True),
        "f_intermediate_size": _Small(low=1, none=True),
        "f_rope": Flag(),
        "f_average": Flag(),
        "expectation": word,
        "tie_phi": Flag(),
        "norm_values": Flag(),
        "rope_theta": _Theta(low=0.0, strict=True),
        "layer_norm_eps": EPS,
    }
    kinds["hidden_size"] = Among(these=(4, 8), also=(7, -2))
    kinds["num_attention_heads"] = Among(these=(1, 2), also=(3, -2))
    return _made("ICLMConfig", models.ICLMConfig, given, kinds)


@cache
def _model() -> Any:
    torch.manual_seed(0)
    return models.HybridForCausalLM(models.HybridConfig(**TINY)).eval()


def match(draw: Draw) -> Call:
    config = models.HybridConfig(**TINY)
    given = {"config": config, "target": 3000, "field": draw.one(None, "intermediate_size")}
    kinds: dict[str, Kind] = {
        "config": Other(),
        "target": _Target(low=1000),
        "field": Other(none=True, also=("hidden", "vocab_size ")),
    }
    return _made("match_parameters", models.match_parameters, given, kinds)


class _Target(Whole):
    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if not (isinstance(v, int) and v > 10**6)]


def count(draw: Draw) -> Call:
    return _made(
        "count_parameters", models.count_parameters, {"config": models.HybridConfig(**TINY)}, {"config": Other()}
    )


# Tasks -------------------------------------------------------------------------------------------------------------


def cone(draw: Draw) -> Call:
    given = {"dim": 4, "length": 16, "segment": 4, "noise": 0.1, "query_noise": 0.0}
    kinds: dict[str, Kind] = {
        "dim": _Small(low=2),
        "length": Among(also=(15, 12), these=(4, 8, 16)),
        "segment": Among(also=(3, 5, 32), these=(1, 2, 4, 8, 16)),
        "noise": Real(low=0.0),
        "query_noise": Real(low=0.0),
    }
    return _made("ConeRegression", tasks.ConeRegression, given, kinds)


def recall(draw: Draw) -> Call:
    given = {"keys": 8, "values": 8, "pairs": 4, "documents": 2, "reads": 2, "shuffled": draw.flag()}
    kinds: dict[str, Kind] = {
        "keys": Whole(low=4, high=2**40),
        "values": Whole(low=1, high=2**40),
        "pairs": Whole(low=1, high=8),
        "documents": Whole(low=1, high=2**40),
        "reads": Whole(low=1, high=2**40),
        "shuffled": Flag(),
    }
    return _made("CrossDocumentRecall", tasks.CrossDocumentRecall, given, kinds)


def needle(draw: Draw) -> Call:
    given = {
        "text": ["a", "b", "c"],
        "length": 64,
        "needles": 2,
        "encode": None,
        "decode": None,
        "breaks": None,
        "digits": 6,
        "id_digits": 4,
        "reserved": None,
        "template": "The secret number for {key} is {value}.",
        "key": "ID-{id}",
    }
    listed = lambda v: isinstance(v, (list, tuple, str, bytes)) and len(v) > 0  # noqa: E731
    kinds: dict[str, Kind] = {
        "text": Other(test=listed),
        "length": Whole(low=1, high=2**40),
        "needles": Other(test=lambda v: type(v) is int and 1 <= v <= 60000),
        "encode": Other(none=True, test=callable),
        "decode": Other(none=True, test=callable),
        "breaks": Other(none=True, also=(frozenset("x"),)),
        "digits": Whole(low=1, high=18),
        "id_digits": Whole(low=1, high=8),
        "reserved": Whole(none=True, low=2),
        "template": Other(also=("{key}", "{value} {key}", "{key {value}", "{key} {value} {x}", "{key} {value} {")),
        "key": Other(also=("ID", "{id", "{id} {x}", "{id} {")),
    }
    return _made("NeedleInHaystack", tasks.NeedleInHaystack, given, kinds)


def example(draw: Draw) -> Call:
    name = draw.one("NeedleInHaystack", "CrossDocumentRecall", "ConeRegression")
    made = {
        "NeedleInHaystack": lambda: tasks.NeedleInHaystack(["a", "b"], 64, 2),
        "CrossDocumentRecall": lambda: tasks.CrossDocumentRecall(8, 8, 4),
        "ConeRegression": lambda: tasks.ConeRegression(4, 16, 4),
    }[name]()
    whole = Whole(low=-(2**63), high=2**64)
    given = {"seed": 1, "index": 2}
    return _made(f"{name}.example", made.example, given, {"seed": whole, "index": Whole(low=0, high=2**63)})


def wilson(draw: Draw) -> Call:
    given = {"hits": 3, "trials": 7, "z": 1.96}
    kinds: dict[str, Kind] = {"hits": Whole(low=0, high=7), "trials": Whole(low=3), "z": Real(low=0.0, high=1e6)}
    kinds["z"] = _Theta(low=0.0, high=1e6)
    kinds["trials"] = _Small(low=3)
    return _made("wilson", tasks.wilson, given, kinds)


# Measures ----------------------------------------------------------------------------------------------------------


def _pattern(draw: Draw) -> Tensor:
    return draw.uniform(0.1, 1.0, 2, 2, 4, draw.one(4, 5))


PATTERN = Floats(fixed=(), dtype=False)


def sinks(draw: Draw) -> Call:
    call, name = draw.one((mechanisms.sinks, "sinks"), (mechanisms.evenness, "evenness"))
    given = {"pattern": _pattern(draw), "from_row": draw.whole(0, 3)}
    return _made(name, call, given, {"pattern": PATTERN, "from_row": Whole(low=0, high=3)})


def copying(draw: Draw) -> Call:
    pattern = _pattern(draw)
    given = {
        "pattern": pattern,
        "roles": mechanisms.ROLES["f"],
        "tokens": draw.integers(5, 2, 4),
        "wanted": draw.integers(5, 2, 4),
    }
    kinds: dict[str, Kind] = {
        "pattern": Floats(fixed=(0, 2), dtype=False),
        "roles": Other(),
        "tokens": Integers(fixed=(0,)),
        "wanted": Integers(fixed=(0, 1)),
    }
    return _made("copying", mechanisms.copying, given, kinds)


def induction(draw: Draw) -> Call:
    given = {"pattern": _pattern(draw), "roles": mechanisms.ROLES["f"], "period": 2}
    return _made(
        "induction", mechanisms.induction, given, {"pattern": PATTERN, "roles": Other(), "period": Whole(low=1, high=3)}
    )


def repeated(draw: Draw) -> Call:
    given = {"vocabulary": 9, "period": 3, "length": 8, "count": 2, "generator": torch.Generator(), "first": 0}
    kinds: dict[str, Kind] = {
        "vocabulary": _Small(low=3),
        "period": Whole(low=1, high=9),
        "length": _Small(low=0),
        "count": _Small(low=0),
        "generator": Other(none=True),
        "first": _Small(low=0),
    }
    return _made("repeated_blocks", mechanisms.repeated_blocks, given, kinds)


def eigenvalues(draw: Draw) -> Call:
    given = {"projections": draw.normal(2, 3, 3), "embedding": draw.normal(5, 3)}
    kinds: dict[str, Kind] = {
        "projections": Floats(fixed=(1, 2), dtype=False),
        "embedding": Floats(fixed=(1,), dtype=False),
    }
    return _made("copying_eigenvalues", mechanisms.copying_eigenvalues, given, kinds)


def histogram(draw: Draw) -> Call:
    call, name = draw.one((gates.histogram, "histogram"), (gates.bin_counts, "bin_counts"))
    given = {"gates": draw.uniform(0.0, 1.0, 2, 5), "bins": 4}
    return _made(name, call, given, {"gates": _Ranked(fixed=(), dtype=False, broadcast=True), "bins": SIZE})


class _Ranked(Floats):
    """Any floating tensor with an axis."""

    def values(self, given: Any) -> list[Any]:
        fine = lambda v: isinstance(v, Tensor) and v.is_floating_point() and v.dtype.itemsize > 1 and v.dim()  # noqa: E731
        return [v for v in super().values(given) if not fine(v)]


def surprisal(draw: Draw) -> Call:
    given = {"tokens": draw.integers(5, 6), "learned": draw.integers(5, 9), "vocabulary": 5}
    kinds: dict[str, Kind] = {"tokens": Integers(fixed=()), "learned": Integers(fixed=()), "vocabulary": _Small(low=5)}
    return _made("token_surprisal", gates.token_surprisal, given, kinds)


def words(draw: Draw) -> Call:
    given = {"labels": ["a ", "word"], "counts": gates.word_counts("a word or two")}
    kinds: dict[str, Kind] = {
        "labels": Other(
            test=lambda v: isinstance(v, (list, tuple)) and all(isinstance(x, str) for x in v), also=([3],)
        ),
        "counts": Other(test=lambda v: isinstance(v, dict) and len(v) < 2),
    }
    return _made("word_surprisal", gates.word_surprisal, given, kinds)


def correlation(draw: Draw) -> Call:
    given = {"x": draw.normal(6), "y": draw.normal(6)}
    one = Floats(fixed=(0,), dtype=False)
    return _made("rank_correlation", gates.rank_correlation, given, {"x": one, "y": one})


# Models ------------------------------------------------------------------------------------------------------------


def _entered(manager: Any) -> Any:
    """The value of a block, which is left again."""
    if isinstance(manager, AbstractContextManager):
        with manager as value:
            return value
    return manager


def capture(draw: Draw) -> Call:
    def run(**arguments: Any) -> None:
        _entered(inspect.capture(**arguments))

    return Call("capture", run, {"model": _model(), "weights": draw.flag()}, {"model": Other(), "weights": Flag()})


def hooked(draw: Draw) -> Call:
    names = list(inspect.named_hook_points(_model()))
    given = {"model": _model(), "hooks": [(lambda name: True, lambda tensor, hook: None)], "required": True}

    def run(**arguments: Any) -> None:
        _entered(inspect.hooked(**arguments))

    wrong = (3, [3], [("x",)], [("x", print)], [(names[0], 3)], [(3, print)], [(names[0], print, print)], "ab")
    kinds: dict[str, Kind] = {
        "model": Other(),
        "hooks": Other(also=wrong, test=lambda v: isinstance(v, (list, tuple, dict)) and not v),
        "required": Flag(),
    }
    return Call("hooked", run, given, kinds)


def points(draw: Draw) -> Call:
    return _made("named_hook_points", inspect.named_hook_points, {"model": _model()}, {"model": Other()})


IDS = (
    torch.tensor([[11]]),
    torch.tensor([[-1]]),
    torch.tensor([[0.5]]),
    torch.tensor([True]),
    torch.zeros(1, 1, 1, dtype=torch.long),
)


class _Names(Other):
    """Names of hook points, or a filter; what raises by itself is left out."""

    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if v is not object]


def with_cache(draw: Draw) -> Call:
    names = list(inspect.named_hook_points(_model()))
    given = {
        "model": _model(),
        "input_ids": draw.integers(11, 1, 4),
        "names": draw.one(names[0], [names[0]], None),
        "hooks": (),
    }
    nothing = lambda v: isinstance(v, (list, tuple, dict)) and not v  # noqa: E731
    kinds: dict[str, Kind] = {
        "model": Other(),
        "input_ids": Other(also=IDS),
        "names": _Names(
            none=True, also=("x", [3], ["x"]), test=lambda v: v is len or (isinstance(v, (list, tuple)) and not v)
        ),
        "hooks": Other(also=(3, [3], [("x", print)], [(names[0], 3)]), test=nothing),
    }
    return _made("run_with_cache", inspect.run_with_cache, given, kinds)


def with_hooks(draw: Draw) -> Call:
    call = with_cache(draw)
    given = {n: call.given[n] for n in ("model", "input_ids", "hooks")}
    return _made("run_with_hooks", inspect.run_with_hooks, given, {n: call.kinds[n] for n in given})


def maps(draw: Draw) -> Call:
    given = {"model": _model(), "input_ids": draw.integers(11, 3), "labels": ["a", "b", "c"]}
    ids = (torch.tensor([0, 1, 11]), torch.tensor([0.5, 1, 1]), torch.zeros(3, 1, dtype=torch.long))
    labels = Other(also=(["a"], [1, 2, 3], "ab"))
    kinds: dict[str, Kind] = {"model": Other(), "input_ids": Other(also=ids), "labels": labels}
    return _made("attention_maps", measures.attention_maps, given, kinds)


def register(draw: Draw) -> Call:
    given = {"sharp": "biweight*anchored(margin=0.5)"}
    return _made("register", bridge.register, given, {"sharp": Sentence()})


def convert(draw: Draw) -> Call:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    return _made(
        "convert", bridge.convert, {"model": model, "spec": "biweight"}, {"model": Other(), "spec": Sentence()}
    )
