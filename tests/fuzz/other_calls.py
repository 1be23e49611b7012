"""Valid calls of the rest: configurations, tasks, measures, hooks and the bridge to transformers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard import inspect, models, tasks
from regard.inspect import gates, measures, mechanisms
from regard.integrations import transformers as bridge

from .draw import Arguments, Call, Draw, alike, arguments, called, public
from .kinds import RAISES, RATE, SIZE, Anything, Floats, Integers, Kind, Real, SpecValue, Whole

TINY = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"max_position_embeddings": 16}
PER_LAYER = Kind(also=(["softmax", 3], ["softmax"] * 3, "softmx"))
TOKEN = Whole(none=True, low=0, high=10)
WORD = Kind(also=("x",))
EVEN = Whole(low=2, even=True, most=10**6)
WIDTH = Whole(low=1, none=True, most=10**6)


def empty(value: Any) -> bool:
    """Whether a value is an empty text or mapping."""
    return isinstance(value, (str, dict)) and not value


def _base(draw: Draw, **own: Any) -> dict[str, Any]:
    """What the configurations share, and what is their own or another's kind."""
    pad = draw.one(None, 3)
    return {
        "vocab_size": (11, Whole(low=1 if pad is None else 4, most=10**6)),
        "hidden_size": (8, EVEN),
        "num_hidden_layers": 2,
        "num_attention_heads": (2, Kind(fine=(1, 2), also=(3, -2))),
        "max_position_embeddings": (16, SIZE),
        "mixers": (draw.one("softmax", "biweight"), Kind(also=(["softmax"], *PER_LAYER.also))),
        "is_encoder_decoder": (False, Anything()),
        "pad_token_id": (pad, TOKEN),
        "bos_token_id": (None, TOKEN),
    } | own


@public("HybridConfig", models.HybridConfig)
def hybrid(draw: Draw) -> Arguments:
    return _base(
        draw,
        num_key_value_heads=(None, Kind(none=True, fine=(1, 2), also=(3,))),
        head_dim=(4, Whole(none=True, low=2, even=True, most=10**6)),
        intermediate_size=(6, WIDTH),
        feed_forward=(draw.one("swiglu", "gelu"), WORD),
        norm=draw.word("rms", "layer"),
        mixer_options=(None, Kind(none=True, test=empty, also=("x", {"x": {}}, {"lact": 3}))),
        window=(draw.one(None, 3), Whole(none=True, low=1)),
        training_window=(None, Whole(none=True, low=1)),
        training_window_share=(0.9, Real(low=0.0, high=1.0)),
        rotary_share=(1.0, Real(low=1e-9, high=1.0)),
        memories=(None, Kind(none=True, test=empty, also=("FwPKM", "FwPKM@9", "x@1", "@"))),
        memory_place=("before-mixer", WORD),
        memory_options=(None, Kind(none=True, test=empty, also=("x", {"x": {}}, {"FwPKM": 3}))),
        temperatures=("fixed", Kind(also=("lg", ["log"], "log(slope=-1)"))),
        ridges=("fixed", Kind(also=("x", ["fixed"], "learned"))),
        qk_norm=draw.word("rms", "l2", none=True),
        share_query_key=False,
        training_window_seed=(0, Whole()),
        **alike(SIZE, hidden_size=8, num_attention_heads=2),
    )


@public("MemoryMosaicConfig", models.MemoryMosaicConfig)
def mosaic(draw: Draw) -> Arguments:
    nothing = lambda v: isinstance(v, (tuple, list)) and not v  # noqa: E731
    return _base(
        draw,
        persistent=("softmax", Kind(also=("softmx", ["softmax"], "linear"))),
        persistent_slots=(3, WIDTH),
        persistent_copies=(1, SIZE),
        learned=(("h", "bias"), Kind(test=nothing, also=("h", ["x"], [3]))),
        **alike(
            WORD,
            persistent_keys="own",
            wiring="sequential",
            leaky="sum",
            look_ahead="sum",
            bandwidth_start="wide",
            uniform_gradient="straight-through",
            initializer="fan-in",
        ),
    )


@public("ICLMConfig", models.ICLMConfig)
def iclm(draw: Draw) -> Arguments:
    words = {"variant": "full", "start": "param", "f_reads": "post", "phi_mlp": "gelu", "f_mlp": "inline"}
    return _base(
        draw,
        hidden_size=(8, Kind(fine=(4, 8), also=(7, -2))),
        mixers=(draw.one("softmax", "biweight"), PER_LAYER),
        phi_mixers=("softmax", PER_LAYER),
        **{name: (word, WORD) for name, word in words.items()},
        f_attention_heads=None,
        gd_steps=1,
        d_phi=None,
        d_f=None,
        **alike(WORD, f_feed_forward="gelu", expectation="none"),
        **alike(WIDTH, intermediate_size=6, f_intermediate_size=6),
    )


@cache
def _model() -> Any:
    torch.manual_seed(0)
    return models.HybridForCausalLM(models.HybridConfig(**TINY)).eval()


@public("match_parameters", models.match_parameters)
def match(draw: Draw) -> Arguments:
    return arguments(
        config=(models.HybridConfig(**TINY), Kind()),
        target=(3000, Whole(low=1000, most=10**6)),
        field=(draw.one(None, "intermediate_size"), Kind(none=True, also=("hidden", "vocab_size "))),
    )


public("count_parameters", models.count_parameters)(
    lambda draw: arguments(config=(models.HybridConfig(**TINY), Kind()))
)
FAR = Whole(low=1, high=2**40)


@public("ConeRegression", tasks.ConeRegression)
def cone(draw: Draw) -> Arguments:
    return arguments(
        dim=(4, Whole(low=2, most=10**6)),
        length=(16, Kind(also=(15, 12), fine=(4, 8, 16))),
        segment=(4, Kind(also=(3, 5, 32), fine=(1, 2, 4, 8, 16))),
        **alike(RATE, noise=0.1, query_noise=0.0),
    )


@public("CrossDocumentRecall", tasks.CrossDocumentRecall)
def recall(draw: Draw) -> Arguments:
    numbers = {"values": (8, FAR), "pairs": (4, Whole(low=1, high=8)), "documents": (2, FAR), "reads": (2, FAR)}
    return arguments(keys=(8, Whole(low=4, high=2**40)), **numbers)


@public("NeedleInHaystack", tasks.NeedleInHaystack)
def needle(draw: Draw) -> Arguments:
    listed = lambda v: isinstance(v, (list, tuple, str)) and len(v) > 0 and isinstance(v[0], str)  # noqa: E731
    templates = ("{key}", "{value} {key}", "{key {value}", "{key} {value} {x}", "{key} {value} {")
    return arguments(
        text=(["a", "b", "c"], Kind(test=listed)),
        length=(64, FAR),
        needles=(2, Kind(test=lambda v: type(v) is int and 1 <= v <= 60000)),
        encode=(None, Kind(none=True, test=callable)),
        decode=(None, Kind(none=True, test=callable)),
        breaks=(None, Kind(none=True, also=(frozenset("x"),))),
        digits=(6, Whole(low=1, high=18)),
        id_digits=(4, Whole(low=1, high=8)),
        reserved=(None, Whole(none=True, low=2)),
        template=("The secret number for {key} is {value}.", Kind(also=templates)),
        key=("ID-{id}", Kind(also=("ID", "{id", "{id} {x}", "{id} {"))),
    )


@public("tasks.example")
def example(draw: Draw) -> Call:
    needle, recall = tasks.NeedleInHaystack(["a", "b"], 64, 2), tasks.CrossDocumentRecall(8, 8, 4)
    task = draw.one(needle, recall, tasks.ConeRegression(4, 16, 4))
    seed, index = (1, Whole(low=-(2**63), high=2**64)), (2, Whole(low=0, high=2**63))
    return called(f"{type(task).__name__}.example", task.example, seed=seed, index=index)


def _pattern(draw: Draw) -> Tensor:
    return draw.uniform(0.1, 1.0, 2, 2, 4, draw.one(4, 5))


PATTERN = Floats(fixed=(), dtype=False)


@public("sinks")
def sinks(draw: Draw) -> Call:
    call, name = draw.one((mechanisms.sinks, "sinks"), (mechanisms.evenness, "evenness"))
    return called(name, call, pattern=(_pattern(draw), PATTERN), from_row=(draw.whole(0, 3), Whole(low=0, high=3)))


@public("copying", mechanisms.copying)
def copying(draw: Draw) -> Arguments:
    return arguments(
        pattern=(_pattern(draw), Floats(fixed=(0, 2), dtype=False)),
        roles=(mechanisms.ROLES["f"], Kind()),
        tokens=(draw.integers(5, 2, 4), Integers(fixed=(0,))),
        wanted=(draw.integers(5, 2, 4), Integers(fixed=(0, 1))),
    )


@public("induction", mechanisms.induction)
def induction(draw: Draw) -> Arguments:
    pattern, roles = (_pattern(draw), PATTERN), (mechanisms.ROLES["f"], Kind())
    return arguments(pattern=pattern, roles=roles, period=(2, Whole(low=1, high=3)))


@public("repeated_blocks", mechanisms.repeated_blocks)
def repeated(draw: Draw) -> Arguments:
    return arguments(
        vocabulary=(9, Whole(low=3, most=10**6)),
        period=(3, Whole(low=1, high=9)),
        length=(8, Whole(low=0, most=10**6)),
        count=(2, Whole(low=0, most=10**6)),
        generator=(torch.Generator(), Kind(none=True)),
        first=(0, Whole(low=0, most=10**6)),
    )


@public("copying_eigenvalues", mechanisms.copying_eigenvalues)
def eigenvalues(draw: Draw) -> Arguments:
    projections = (draw.normal(2, 3, 3), Floats(fixed=(1, 2), dtype=False))
    return arguments(projections=projections, embedding=(draw.normal(5, 3), Floats(fixed=(1,), dtype=False)))


@public("histogram")
def histogram(draw: Draw) -> Call:
    call, name = draw.one((gates.histogram, "histogram"), (gates.bin_counts, "bin_counts"))
    fine = lambda v, given: isinstance(v, Tensor) and v.is_floating_point() and v.dtype.itemsize > 1 and v.dim()  # noqa: E731
    ranked = Floats(fixed=(), dtype=False, broadcast=True, skip=fine)  # any with an axis
    return called(name, call, gates=(draw.uniform(0.0, 1.0, 2, 5), ranked), bins=(4, SIZE))


@public("token_surprisal", gates.token_surprisal)
def surprisal(draw: Draw) -> Arguments:
    tokens, learned = ((draw.integers(5, size), Integers(fixed=())) for size in (6, 9))
    return arguments(tokens=tokens, learned=learned, vocabulary=(5, Whole(low=5, most=10**6)))


@public("word_surprisal", gates.word_surprisal)
def words(draw: Draw) -> Arguments:
    texts = lambda v: isinstance(v, (list, tuple)) and all(isinstance(x, str) for x in v)  # noqa: E731
    counts = (gates.word_counts("a word or two"), Kind(test=lambda v: isinstance(v, dict) and len(v) < 2))
    return arguments(labels=(["a ", "word"], Kind(test=texts, also=([3],))), counts=counts)


@public("rank_correlation", gates.rank_correlation)
def correlation(draw: Draw) -> Arguments:
    one = Floats(fixed=(0,), dtype=False)
    return arguments(x=(draw.normal(6), one), y=(draw.normal(6), one))


def _entered(block: Callable[..., AbstractContextManager[Any]]) -> Callable[..., None]:
    """A function that enters a block and leaves it again."""

    def run(**arguments: Any) -> None:
        with block(**arguments):
            pass

    return run


def _hooks(*wrong: Any) -> Kind:
    """Hooks, which may be none, wrong in several ways."""
    always = (3, [3], [("x", print)], [(next(iter(inspect.named_hook_points(_model()))), 3)])
    return Kind(also=(*always, *wrong), test=lambda v: isinstance(v, (list, tuple, dict)) and not v)


@public("capture", _entered(inspect.capture))
def capture(draw: Draw) -> Arguments:
    return arguments(model=(_model(), Kind()), weights=draw.flag())


@public("hooked", _entered(inspect.hooked))
def hooked(draw: Draw) -> Arguments:
    first = next(iter(inspect.named_hook_points(_model())))
    hooks = _hooks([("x",)], [(3, print)], [(first, print, print)], "ab")
    return arguments(
        model=(_model(), Kind()), hooks=([(lambda name: True, lambda tensor, hook: None)], hooks), required=True
    )


public("named_hook_points", inspect.named_hook_points)(lambda draw: arguments(model=(_model(), Kind())))
IDS = (*(torch.tensor(wrong) for wrong in ([[11]], [[-1]], [[0.5]], [True])), torch.zeros(1, 1, 1, dtype=torch.long))


@public("run_with_hooks", inspect.run_with_hooks)
def with_hooks(draw: Draw) -> Arguments:
    ids = (draw.integers(11, 1, 4), Kind(also=IDS))
    return arguments(model=(_model(), Kind()), input_ids=ids, hooks=((), _hooks()))


@public("run_with_cache", inspect.run_with_cache)
def with_cache(draw: Draw) -> Arguments:
    first = next(iter(inspect.named_hook_points(_model())))
    fine = lambda v: v is len or (isinstance(v, (list, tuple)) and not v)  # noqa: E731
    names = (draw.one(first, [first], None), Kind(none=True, also=("x", [3], ["x"]), test=fine, skip=RAISES))
    ids = (draw.integers(11, 1, 4), Kind(also=IDS))
    return arguments(model=(_model(), Kind()), input_ids=ids, hooks=((), _hooks()), names=names)


@public("attention_maps", measures.attention_maps)
def maps(draw: Draw) -> Arguments:
    ids = (torch.tensor([0, 1, 11]), torch.tensor([0.5, 1, 1]), torch.zeros(3, 1, dtype=torch.long))
    labels = (["a", "b", "c"], Kind(also=(["a"], [1, 2, 3], "ab")))
    return arguments(model=(_model(), Kind()), input_ids=(draw.integers(11, 3), Kind(also=ids)), labels=labels)


public("register", bridge.register)(lambda draw: arguments(sharp=("biweight*anchored(margin=0.5)", SpecValue())))


@public("convert", bridge.convert)
def convert(draw: Draw) -> Arguments:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    return arguments(model=(model, Kind()), spec=("biweight", SpecValue()))
