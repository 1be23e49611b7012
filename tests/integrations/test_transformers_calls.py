"""The names, the mask function and the attention function by themselves, and what they refuse."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import any_model
import pytest
import torch
import transformers as hf
from contracts import oracle
from mistakes import refuses
from programs import python
from tiny_models import left_padding, right_padding, tiny, tokens
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import regard
from regard.integrations.transformers import attend, convert, register, visible_keys

register()


def test_every_preset_has_a_name() -> None:
    names = register()
    presets = [f"regard_{preset}" for preset in regard.presets()]
    assert names[: len(presets)] == presets
    weights = [name.removeprefix("regard_local-linear[").removesuffix("]") for name in names[len(presets) :]]
    assert {"softmax", "biweight", "relumax", "triweight", "topk-softmax", "rbf", "relu"} <= set(weights)
    assert set(weights) <= set(regard.presets()) - {"linear", "cosine", "local-linear"}  # signed, or linear already
    for name in names:
        assert name in AttentionInterface._global_mapping
        assert AttentionMaskInterface._global_mapping[name] is visible_keys
    assert register() == names


def test_the_page_names_presets_and_shows_what_the_example_prints() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "huggingface.md").read_text(encoding="utf-8")
    named = set(re.findall(r"regard_[a-z0-9-]+[a-z0-9]", page)) - {"regard_sharp", "regard_epanechnikov"}
    assert {"regard_softmax"} <= named <= set(register())
    assert re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL) == [python(root / "examples" / "huggingface.py")]


def test_sentences_and_names_of_your_own() -> None:
    text = "biweight*anchored(margin=2)"
    spec = regard.Spec.parse("triweight*anchored(margin=0.5)")
    names = register(text, " epanechnikov * nearest(k=4) ", spec, sharp="biweight*anchored(margin=0.5)")
    assert names[-4:] == [
        "regard_biweight*anchored(margin=2)",
        "regard_epanechnikov*nearest(k=4)",
        "regard_triweight*anchored(margin=0.5)",
        "regard_sharp",
    ]
    assert register(sharp="biweight*anchored(margin=0.5)")[-1] == "regard_sharp"  # again: the same
    by_name = tiny("llama", "regard_sharp")(tokens()).logits
    model = tiny("llama", "sdpa")
    for given in ("biweight*anchored(margin=0.5)", regard.Spec.parse("biweight*anchored(margin=0.5)"), "regard_sharp"):
        convert(model, given)
        assert torch.equal(model(tokens()).logits, by_name)
    assert (tiny("llama", names[-4])(tokens()).logits - by_name).abs().max() > 1e-3


def test_a_preset_of_another_package_has_a_name_at_once() -> None:
    from regard.grammar import presets_registry

    presets_registry.register("elsewhere")(regard.Spec.parse("triweight*anchored(margin=0.25)"))
    try:
        assert "regard_elsewhere" in register()
        assert tiny("bert", "regard_elsewhere")(tokens()).logits.isfinite().all()
    finally:
        del presets_registry._objects["elsewhere"]
        for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
            for name in ("regard_elsewhere", "regard_local-linear[elsewhere]"):
                mapping.pop(name)


@pytest.mark.parametrize(
    ("positional", "named", "message"),
    [
        (["biwieght"], {}, "Did you mean 'biweight'"),
        ([], {"softmax": "biweight"}, "'regard_softmax' is already softmax"),
        ([], {"a/b": "biweight"}, "reads '/'"),
        ([], {"flashy": "biweight"}, "reads 'flash'"),
        ([], {"sdpa2": "biweight"}, "reads 'sdpa'"),
        ([3], {}, "expected a Spec or its text"),
    ],
)
def test_names_that_are_refused(positional: list[Any], named: dict[str, Any], message: str) -> None:
    before = set(AttentionInterface._global_mapping)
    refuses(message, register, *positional, **named)
    assert set(AttentionInterface._global_mapping) == before


@pytest.mark.parametrize(
    "model",
    [
        lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2)),
        lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=2)),
        lambda: any_model.make("transformer", "softmax", torch.float32),
    ],
)
def test_models_with_attention_of_their_own_are_not_converted(model: Any) -> None:
    made = model()
    before = made.config._attn_implementation
    refuses("computes attention by itself", convert, made, "biweight")
    assert made.config._attn_implementation == before
    refuses("model is a Linear", convert, torch.nn.Linear(2, 2), "biweight")


def as_pairs(mask: Tensor | None, causal: bool, batch: int, queries: int, keys: int) -> Tensor:
    """What a form of mask means: boolean [B, Tq, Tk]."""
    end = torch.arange(queries)[:, None] + keys - queries
    order = (torch.arange(keys) <= end) if causal else torch.ones(queries, keys, dtype=torch.bool)
    if mask is None:
        return order.expand(batch, queries, keys)
    if mask.dim() == 2:
        assert causal
        return order & mask[:, None, :]
    return mask[:, 0].expand(batch, queries, keys)


MASKS = [None, left_padding().bool(), right_padding().bool(), torch.ones(2, 12, dtype=torch.bool)]


@pytest.mark.parametrize(("queries", "past"), [(12, 0), (7, 5), (1, 11)])
@pytest.mark.parametrize("slots", [0, 8])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "sliding", "chunked"])
def test_masks_mean_what_those_of_transformers_mean(queries: int, past: int, slots: int, kind: str) -> None:
    function = {
        "causal": masking_utils.causal_mask_function,
        "bidirectional": masking_utils.bidirectional_mask_function,
        "sliding": masking_utils.sliding_window_causal_mask_function(5),
        "chunked": masking_utils.chunked_causal_mask_function(5, torch.tensor([4, 0])),
    }[kind]
    for padding, tensor in itertools.product(MASKS, (False, True)):
        keys = queries + past + slots
        call = {
            "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": torch.tensor(past) if tensor else past,
            "mask_function": function, "attention_mask": padding,
            "local_size": 5 if kind in ("sliding", "chunked") else None,
        }  # fmt: skip
        want = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)[:, 0]
        for skip in (False, True):
            both = {"allow_is_causal_skip": skip, "allow_is_bidirectional_skip": skip and kind == "bidirectional"}
            found = visible_keys(**call, **both)
            if not skip:
                assert found is not None
                assert found.dim() == 4
            assert torch.equal(as_pairs(found, kind != "bidirectional", 2, queries, keys), want)


def test_masks_take_the_smallest_form() -> None:
    call: dict[str, Any] = {"batch_size": 2, "q_length": 12, "kv_length": 12}
    both = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    full = torch.ones(2, 12, dtype=torch.bool)
    assert visible_keys(**call) is None
    assert visible_keys(**call, attention_mask=full) is None
    assert visible_keys(**{**call, "q_length": 7}, q_offset=5, attention_mask=full) is None  # a prompt in pieces
    assert visible_keys(**call, attention_mask=left_padding().bool()).shape == (2, 12)
    assert visible_keys(**call, **both, attention_mask=full) is None
    assert visible_keys(**call, **both, attention_mask=left_padding().bool()).shape == (2, 1, 1, 12)
    # a window narrower than the keys, and an empty cache of fixed length, need the pairs
    window = {"mask_function": masking_utils.sliding_window_causal_mask_function(5), "local_size": 5}
    assert visible_keys(**call, **window).shape == (2, 1, 12, 12)
    assert visible_keys(**{**call, "kv_length": 20}).shape == (2, 1, 12, 20)
    padding = left_padding().bool()  # a window's cache has dropped the oldest keys; the mask covers all positions
    assert torch.equal(visible_keys(2, 2, 10, q_offset=10, kv_offset=2, attention_mask=padding), padding[:, 2:])


CAUSAL, BOTH = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)
SOFTMAX = regard.Spec.parse("softmax")


def inputs(queries: int = 5, keys: int = 7, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    normal = lambda *size: torch.randn(*size, dtype=torch.float64, generator=made)  # noqa: E731
    return normal(2, heads, queries, 8), normal(2, kv_heads, keys, 8), normal(2, kv_heads, keys, 6)


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Dense softmax attention: output [B, Tq, H, Dv] and weights; `seen` broadcasts to [B, H, Tq, Tk]."""
    seen = seen.expand(*q.shape[:3], k.shape[2])
    out, weights = oracle.attention(oracle.PRESETS["softmax"], q, k, v, seen, scale)
    return out.transpose(1, 2), weights


def test_causal_order_stands_at_the_end_of_the_keys() -> None:
    q, k, v = inputs()
    seen = torch.arange(7) <= torch.arange(5)[:, None] + 2
    want, _ = by_hand(q, k, v, seen, 0.3)
    got, weights = attend(SOFTMAX, CAUSAL, q, k, v, None, scaling=0.3)
    assert weights is None
    assert got.shape == (2, 5, 4, 6)
    assert got.is_contiguous()
    assert (got - want).abs().max() < 1e-12
    assert torch.equal(attend(SOFTMAX, BOTH, q, k, v, None, scaling=0.3, is_causal=True)[0], got)
    assert torch.equal(attend(SOFTMAX, SimpleNamespace(), q, k, v, None, scaling=0.3)[0], got)
    free, _ = by_hand(q, k, v, torch.ones(7, dtype=torch.bool), 8**-0.5)
    for module, more in ((BOTH, {}), (CAUSAL, {"is_causal": False})):
        assert (attend(SOFTMAX, module, q, k, v, None, **more)[0] - free).abs().max() < 1e-12


@pytest.mark.parametrize("queries", [1, 5])
def test_a_window_where_there_is_no_mask(queries: int) -> None:
    q, k, v = inputs(queries)
    at = torch.arange(queries)[:, None] + 7 - queries
    keys = torch.arange(7)
    for module, seen in ((CAUSAL, (keys <= at) & (keys > at - 3)), (BOTH, (keys - at).abs() < 3)):
        want, _ = by_hand(q, k, v, seen, 8**-0.5)
        assert (attend(SOFTMAX, module, q, k, v, None, sliding_window=3)[0] - want).abs().max() < 1e-12


@pytest.mark.parametrize("form", ["keys", "broadcast", "pairs", "heads", "additive", "lowest"])
def test_forms_of_masks(form: str) -> None:
    q, k, v = inputs()
    padding = torch.tensor([[False, False, True, True, True, True, True], [True] * 6 + [False]])
    order = torch.arange(7) <= torch.arange(5)[:, None] + 2
    pairs = (padding[:, None] & order)[:, None]
    pairs[0, 0, 1] = False  # a row that sees nothing
    mask, seen = {
        "keys": (padding, (padding[:, None] & order)[:, None]),
        "broadcast": (padding[:, None, None], padding[:, None, None]),
        "pairs": (pairs, pairs),
        "heads": (pairs.expand(2, 4, 5, 7).clone(), pairs),
        "additive": (torch.where(pairs, 0.0, -torch.inf), pairs),
        "lowest": (torch.where(pairs, 0.0, torch.finfo(torch.bfloat16).min).bfloat16(), pairs),
    }[form]
    want, rows = by_hand(q, k, v, seen, 8**-0.5)
    got, weights = attend(SOFTMAX, CAUSAL, q, k, v, mask, output_attentions=True)
    assert (got - want).abs().max() < 1e-12
    assert (weights - rows).abs().max() < 1e-12
    assert (attend(SOFTMAX, CAUSAL, q, k, v, mask)[0] - want).abs().max() < 1e-12
    if form == "pairs":
        assert (got[0, 1] == 0).all()


def test_kernels_with_a_scale_of_their_own_ignore_that_of_the_model() -> None:
    q, k, v = inputs()
    for preset in ("geometric", "relu", "shift-cosine", "clipped-geometric"):
        spec = regard.Spec.parse(preset)
        assert torch.equal(*(attend(spec, CAUSAL, q, k, v, None, scaling=scale)[0] for scale in (0.1, 9.0)))
    one, two = (attend(SOFTMAX, CAUSAL, q, k, v, None, scaling=s)[0] for s in (torch.tensor(0.3), 0.3))
    assert (one - two).abs().max() < 1e-7


@pytest.mark.parametrize("name", ["softmax", "local-linear"])
def test_dropout_is_on_the_weights(name: str) -> None:
    """Many draws average to the output without it."""
    q, k, v = inputs()
    spec = regard.Spec.parse(name)
    want, whole = attend(spec, CAUSAL, q, k, v, None, output_attentions=True)
    torch.manual_seed(0)
    got, weights = attend(spec, CAUSAL, q, k, v, None, dropout=0.25, output_attentions=True)
    kept = weights != 0
    assert (weights - torch.where(kept, whole / 0.75, 0)).abs().max() < 1e-12
    assert 0.6 < kept[whole != 0].double().mean() < 0.9
    assert ((weights @ v.repeat_interleave(2, 1)).transpose(1, 2) - got).abs().max() < 1e-12
    many = torch.stack([attend(spec, CAUSAL, q, k, v, None, dropout=0.25)[0] for _ in range(2000)])
    assert ((many.mean(0) - want).abs() < 6 * many.std(0) / 2000**0.5 + 1e-9).all()


@pytest.mark.parametrize("more", [{}, {"output_attentions": True}, {"dropout": 0.5}])
def test_hidden_values_never_matter_and_seen_ones_mark_their_row(more: dict[str, Any]) -> None:
    q, k, v = inputs(7)
    for bad in (torch.nan, torch.inf):
        spoiled = v.clone()
        spoiled[0, 0, 4] = bad
        torch.manual_seed(0)
        got, _ = attend(SOFTMAX, CAUSAL, q, k, spoiled, None, **more)
        torch.manual_seed(0)
        want, _ = attend(SOFTMAX, CAUSAL, q, k, v, None, **more)
        marked = torch.zeros(2, 7, 4, dtype=torch.bool)
        marked[0, 4:, :2] = True
        assert torch.equal(got.isnan().all(-1), marked)
        assert torch.equal(got[~marked], want[~marked])


def test_gradients_through_the_weights() -> None:
    """A loss on the weights reaches queries and keys, as in transformers' eager attention."""
    q, k, v = inputs()
    q.requires_grad_()
    k.requires_grad_()
    seen = torch.arange(7) <= torch.arange(5)[:, None] + 2
    _, weights = attend(SOFTMAX, CAUSAL, q, k, v, None, output_attentions=True)
    got = torch.autograd.grad(weights.square().sum(), (q, k))
    want = torch.autograd.grad(by_hand(q, k, v, seen, 8**-0.5)[1].square().sum(), (q, k))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))


def test_precisions() -> None:
    q, k, v = inputs()
    want, rows = by_hand(q, k, v, torch.ones(7, dtype=torch.bool), 8**-0.5)
    for more in ({}, {"output_attentions": True}):
        got, weights = attend(SOFTMAX, BOTH, q.float(), k.float(), v.bfloat16(), None, **more)
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() < 0.02
        if weights is not None:
            assert weights.dtype == torch.bfloat16
            assert (weights - rows).abs().max() < 4e-3


def test_the_attention_function_compiles_as_one_graph() -> None:
    biweight = regard.Spec.parse("biweight")

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weights: bool) -> tuple[Tensor, Tensor | None]:
        return attend(biweight, CAUSAL, q, k, v, mask, scaling=0.5, output_attentions=weights)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    padding = torch.tensor([[False, False, True, True, True, True, True], [True] * 6 + [False]])
    for mask, weights in itertools.product((None, padding), (False, True)):
        got, want = compiled(*inputs(), mask, weights), call(*inputs(), mask, weights)
        assert (got[0] - want[0]).abs().max() < 1e-9
        if weights:
            assert (got[1] - want[1]).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("mask", "more", "message"),
    [
        (None, {"softcap": 50.0}, "softcap caps the scores"),
        (None, {"s_aux": torch.zeros(4)}, "s_aux adds a sink"),
        (None, {"position_bias": torch.zeros(1)}, "position_bias adds a bias"),
        (None, {"head_mask": torch.ones(4)}, "head_mask multiplies the weights"),
        (None, {"cache": object()}, "cache pages the keys"),
        (None, {"scaling": torch.ones(4, 1, 1)}, r"scaling has shape \[4, 1, 1\]"),
        (torch.ones(5, 7, dtype=torch.bool)[None], {}, r"attention_mask is \[1, 5, 7\]"),
        ("causal", {}, "attention_mask is a str"),
        (torch.ones(2, 1, 5, 7, dtype=torch.long), {}, "dtype torch.int64"),
        (torch.linspace(-1, 0, 7).expand(2, 1, 5, 7), {}, "adds numbers to the scores"),
        (torch.ones(2, 7, dtype=torch.bool), {"is_causal": False}, "for causal layers"),
    ],
)
def test_what_is_refused(mask: Any, more: dict[str, Any], message: str) -> None:
    q, k, v = inputs()
    refuses(message, attend, SOFTMAX, CAUSAL, q, k, v, mask, **more)
    for name, value in more.items():
        if name not in ("scaling", "is_causal"):
            assert attend(SOFTMAX, CAUSAL, q, k, v, None, **{name: None})[0].isfinite().all(), value


SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
FEW_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL)), "softcap"),
        (lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, **FEW_EXPERTS)), "s_aux"),
    ],
)
def test_models_that_ask_for_more_say_so(model: Any, message: str) -> None:
    refuses(message, convert(model(), "biweight"), tokens())


def test_a_relative_bias_is_refused() -> None:
    """By the layer, or by `convert` where a release of transformers has T5 compute attention by itself."""
    config = hf.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    run = lambda: convert(hf.T5Model(config), "biweight")(input_ids=tokens(), decoder_input_ids=tokens())  # noqa: E731
    refuses(r"position_bias adds a bias|computes attention by itself", run)


def test_cross_attention() -> None:
    made = {impl: tiny("gpt2", impl, add_cross_attention=True) for impl in ("regard_softmax", "sdpa")}
    memory = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(2, 9, dtype=torch.long)
    hidden[0, 6:] = 0
    for mask in (None, hidden):
        given = {"encoder_hidden_states": memory, "encoder_attention_mask": mask}
        ours, theirs = (m(tokens(), **given).logits for m in made.values())
        assert (ours - theirs).abs().max() < 1e-5
