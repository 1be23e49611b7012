"""ICLM against its equations, written out once more: loops over heads and blocks (ICLM paper, 7 to 12 and 18).

The weights of a model are taken by name; the formulas of specs are those of `contracts.oracle`.

Legend: T tokens of one row x_0..x_{T-1}; slot s has the tokens before x_s as its context; phi [slots, C]; f [slots, E].
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_model import ICLM, in_chunks, same_gradients, text
from any_model import make as any_make
from contracts import oracle
from mistakes import refuses
from packed import documents, packed_rows, runs
from torch import Tensor

from regard import Spec, presets
from regard.models import ICLMConfig, ICLMForCausalLM

Weights = dict[str, Tensor]
GAUSSIAN = "gaussian*fixed*euclidean*unnormalised"
UNNORMALISED = ("linear", GAUSSIAN)


def averages(spec: str, q: Tensor, k: Tensor, v: Tensor, strict: bool = False, divide: bool = False) -> Tensor:
    """sum_j kappa(q_s, k_j) v_j over the n keys up to slot s, or before it: [slots, Dv]."""
    seen = torch.ones(len(q), len(k)).tril(-int(strict)) > 0
    out = oracle.of_one_head(Spec.parse(spec), q, k, v, seen)
    return out / seen.sum(-1, keepdim=True).clamp(min=1) if divide and spec in UNNORMALISED else out


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def feed_forward(w: Weights, name: str, x: Tensor) -> Tensor:
    x, at = norm(w, f"{name}.norm", x), f"{name}.feed_forward"
    if f"{at}.gate_proj.weight" in w:
        inner = F.silu(x @ w[f"{at}.gate_proj.weight"].T) * (x @ w[f"{at}.up_proj.weight"].T)
        return inner @ w[f"{at}.down_proj.weight"].T
    inner = x @ w[f"{at}.up_proj.weight"].T + w[f"{at}.up_proj.bias"]
    return (inner * (1 + torch.erf(inner / 2**0.5)) / 2) @ w[f"{at}.down_proj.weight"].T + w[f"{at}.down_proj.bias"]


def turned(x: Tensor, on: bool) -> Tensor:
    """Row s [n, D] turned by s times 10000^(-2i/D) in the plane of channels i and i + D/2."""
    if not on:
        return x
    half = x.shape[1] // 2
    # angles and their cosines in float32, whatever the dtype of x
    rates = 10000.0 ** (-torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = torch.arange(len(x), dtype=torch.float32)[:, None] * rates
    cos, sin = angle.cos().double(), angle.sin().double()
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)


def split(w: Weights, name: str, x: Tensor, heads: int) -> list[Tensor]:
    return list((x @ w[f"{name}.weight"].T).chunk(heads, 1))


def covariates(w: Weights, at: str, phi: Tensor, spec: str, config: ICLMConfig) -> Tensor:
    """Equation 9."""
    x, heads = norm(w, f"{at}.norm", phi), []
    parts = (split(w, f"{at}.attn.{n}_proj", x, config.num_attention_heads) for n in "qkv")
    for q, k, v in zip(*parts, strict=True):
        q, k = turned(q, True), turned(k, True)
        heads.append(averages(spec, q, k, v))
    phi = phi + torch.cat(heads, 1) @ w[f"{at}.attn.o_proj.weight"].T
    return phi if config.phi_mlp == "none" else phi + feed_forward(w, f"{at}.mlp", phi)


def updates(w: Weights, at: str, phi: Tensor, values: Tensor, spec: str, config: ICLMConfig) -> Tensor:
    """Equation 11 of each head [H, slots, E]: slot s sees the pairs (phi_j, values_j) with j < s."""
    count, x = config.f_attention_heads, norm(w, f"{at}.norm", phi)
    queries, keys = (split(w, f"{at}.attn.{n}_proj", x, count) for n in "qk")
    outputs = w[f"{at}.attn.o_proj.weight"].chunk(count, 1)
    rows = []
    for h in range(count):
        q, k = turned(queries[h], config.f_rope), turned(keys[h], config.f_rope)
        v = values
        if config.variant == "wv":
            v = split(w, f"{at}.attn.v_proj", values, count)[h]
        if config.variant == "slice":
            v = values.chunk(count, 1)[h]
        v = torch.cat([v, v.new_zeros(1, v.shape[1])])[: len(k)]  # nobody sees the last slot
        rows.append(averages(spec, q, k, v, strict=True, divide=config.f_average) @ outputs[h].T)
    return torch.stack(rows)


def expected_embedding(table: Tensor, f: Tensor) -> Tensor:
    """Equation 8: W_e softmax(W_e^T f), each row [E] of f by itself."""
    return torch.stack([sum(p * word for p, word in zip((table @ row).softmax(0), table, strict=True)) for row in f])


def hidden(
    w: Weights, ids: Tensor, config: ICLMConfig, stages: list[tuple[Tensor, Tensor]] | None = None, only: Any = None
) -> Tensor:
    """f [T, E] that predicts what follows each token, before the last norm. `stages` receives what the heads of every
    block add, and f after it; with `only`, the values of all other tokens are zero."""
    table = w["model.embed_tokens.weight"]
    words = table[ids]
    own = words[:, : config.d_phi] if config.tie_phi else w["model.embed_covariates.weight"][ids]
    if config.start == "param":
        phi = torch.cat([w["model.start.weight"][None], own])
    else:
        phi, words = own, words[1:]
    if config.norm_values:
        words = norm(w, "model.norm_values", words)
    f = torch.zeros(len(phi), config.d_f, dtype=phi.dtype)
    side, values, pairs = 0 * f, words, config.num_hidden_layers // 2
    for pair in range(pairs):
        if pair % (pairs // config.gd_steps) == 0 and config.expectation != "none":
            at = f if config.expectation == "exact" else 0 * f
            values = words - expected_embedding(table, at)[: len(words)]
        if only is not None:
            values = torch.where(torch.arange(len(ids))[len(ids) - len(values) :, None] == only, values, 0.0)
        if config.f_reads == "post":
            phi = covariates(w, f"model.phi.{pair}", phi, config.phi_mixers[pair], config)
        added_by_head = updates(w, f"model.f.{pair}", phi, values, config.mixers[pair], config)
        f = f + added_by_head.sum(0)
        if config.f_mlp != "none":
            added = feed_forward(w, f"model.f.{pair}.mlp", f)
            f, side = (f + added, side) if config.f_mlp == "inline" else (f, side + added)
        if stages is not None:
            stages.append((added_by_head, f))
        if config.f_reads == "pre" and pair < pairs - 1:
            phi = covariates(w, f"model.phi.{pair}", phi, config.phi_mixers[pair], config)
    return (f + side)[1:] if config.start == "param" else f + side


def logits(w: Weights, ids: Tensor, config: ICLMConfig) -> Tensor:
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(w, "model.ln_final", hidden(w, ids, config)) @ head.T


def make(mixers="softmax", **fields: object) -> ICLMForCausalLM:
    sizes = {"hidden_size": 12, "intermediate_size": 10, "f_intermediate_size": 14}
    return any_make("iclm", mixers, **{**sizes, **fields})


def rows_of(model: ICLMForCausalLM, tokens: Tensor) -> Tensor:
    return torch.stack([logits(dict(model.named_parameters()), ids, model.config) for ids in tokens])


SPECS = (
    "softmax", "biweight", "triweight", "relumax", "epanechnikov*fixed(h=1.2)*cosine", "uniform*nearest(k=3)", "linear",
    GAUSSIAN, "local-linear", "local-linear[biweight]",
)  # fmt: skip
OPTIONS: list[dict[str, object]] = [
    {},
    {"start": "bos", "variant": "full"},
    {"start": "bos", "variant": "wv", "f_mlp": "side"},
    {"start": "bos", "variant": "slice", "f_mlp": "none"},
    {"variant": "wv", "f_rope": False},
    {"variant": "slice", "f_attention_heads": 3},
    {"f_reads": "pre"},
    {"f_mlp": "side", "phi_mlp": "none"},
    {"f_mlp": "none", "phi_mlp": "swiglu"},
    {"f_feed_forward": "swiglu", "f_attention_heads": 4, "f_rope": False},
    {"d_phi": 8, "norm_values": True},
    {"d_phi": 16, "tie_phi": False, "tie_word_embeddings": False},
    {"expectation": "mean", "f_attention_heads": 1},
    {"expectation": "mean", "variant": "wv", "start": "bos"},
    {"expectation": "mean", "variant": "slice"},
    {"expectation": "exact"},
    {"expectation": "exact", "gd_steps": 2},
    {"expectation": "exact", "gd_steps": 2, "variant": "wv", "start": "bos", "f_mlp": "none"},
    {"expectation": "exact", "gd_steps": 2, "variant": "slice", "f_reads": "pre", "mixers": "linear"},
    {"mixers": "linear", "f_average": False},
    {"mixers": GAUSSIAN, "f_average": False, "f_mlp": "none", "f_rope": False, "expectation": "exact", "gd_steps": 2},
    {"mixers": ["biweight", "linear"], "phi_mixers": ["relumax", "biweight"]},
]


@torch.no_grad()
@pytest.mark.parametrize("start", ["param", "bos"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_kernel_by_loops(spec, start):
    model = make(mixers=spec, start=start)
    for length in (1, 2, 3, 9):
        tokens = text(2, length, seed=length)
        oracle.close(model(tokens, use_cache=False).logits, rows_of(model, tokens), 1e-9, f"{spec}, T={length}")


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_by_loops_with_and_without_a_cache(options):
    model, tokens = make(**options), text(2, 9)
    expected = rows_of(model, tokens)
    shown, stages = model(tokens, use_cache=False, output_hidden_states=True), []
    oracle.close(shown.logits, expected, 1e-9, "whole")
    hidden(dict(model.named_parameters()), tokens[0], model.config, stages)
    f = shown.hidden_states[2:]  # after the states of the covariates
    assert not f[0].any()
    oracle.close(f[1][0], stages[0][1][-9:], 1e-9, "f after the first block")
    for sizes in ([9], [1] * 9, [2, 1, 4, 2], [4, 5]):
        oracle.close(in_chunks(model, tokens, sizes)[0], expected, 1e-9, f"chunks of {sizes}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixers": ["biweight", "relumax"], "variant": "wv", "start": "bos"},
        {"mixers": "linear", "variant": "slice", "f_mlp": "side", "d_phi": 8, "norm_values": True},
        {"expectation": "exact", "gd_steps": 2},
        {"expectation": "mean", "tie_phi": False, "tie_word_embeddings": False, "f_reads": "pre"},
        {"mixers": "local-linear[biweight]", "f_mlp": "none"},
    ],
    ids=str,
)
def test_every_gradient_by_loops(options):
    model, tokens = make(**options), text(2, 7, seed=1)
    same_gradients(model, tokens, rows_of(model, tokens))


@torch.no_grad()
@pytest.mark.parametrize("options", [o for o in OPTIONS if "gd_steps" not in o], ids=str)
def test_contributions_of_one_token_at_a_time(options):
    model, ids = make(**options), text(1, 6, seed=4)[0]
    found, w = model.contributions(ids[None]), dict(model.named_parameters())
    oracle.close(found.logits()[0], logits(w, ids, model.config), 1e-9, "sum of all parts")
    f = hidden(w, ids, model.config)
    divisor = (f.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    head, parts = w.get("lm_head.weight", w["model.embed_tokens.weight"]), found.parts(torch.arange(29))[0]
    oracle.close(found.per_token()[0], parts.sum((2, 3)), 1e-9, "tokens")
    oracle.close(found.per_head()[0], parts.sum(1), 1e-9, "heads")
    oracle.close(found.per_layer()[0], parts.sum((1, 3)), 1e-9, "layers")
    for token in range(6):  # kernels do not depend on values, and f is linear in them
        stages: list[tuple[Tensor, Tensor]] = []
        hidden(w, ids, model.config, stages, only=token)
        part = torch.stack([each for each, _ in stages])[:, :, -6:]
        part = (part - part.mean(-1, keepdim=True)) / divisor * w["model.ln_final.weight"] @ head.T
        oracle.close(parts[:, token], part.permute(2, 0, 1, 3), 1e-9, f"token {token}")
        assert (parts[:token, token] == 0).all()


IDS = text(2, 9, seed=4)
BOUND = {"atol": 1e-8, "rtol": 1e-8}


@pytest.mark.parametrize("fields", [*ICLM.values(), *({"mixers": name} for name in presets())], ids=str)
def test_the_parts_of_packed_rows_add_up_to_their_logits(fields):
    model, (tokens, ids) = any_make("iclm", **fields), packed_rows(documents())
    some = torch.tensor([3, 11, 20])
    found, logits = model.contributions(tokens, segment_ids=ids), model(tokens, segment_ids=ids).logits
    torch.testing.assert_close(found.logits(), logits, **BOUND)
    rest, logits = found.mlp(some).sum(2) + found.bias(some), logits[..., some]
    torch.testing.assert_close(found.per_token(some).sum(2) + rest, logits, **BOUND)
    torch.testing.assert_close(found.per_head(some).sum((2, 3)) + rest, logits, **BOUND)
    torch.testing.assert_close(found.per_layer(some).sum(2) + rest, logits, **BOUND)
    torch.testing.assert_close(found.parts(some).sum((2, 3, 4)) + rest, logits, **BOUND)
    assert found.mlp().shape[2] == (0 if model.config.f_mlp == "none" else len(model.model.f))
    if model.config.f_mlp != "none":
        assert found.mlp().abs().max() > 0.05, "a remainder that is no rounding error"


@pytest.mark.parametrize("name", ICLM)
def test_contributions_of_packed_rows_are_those_of_their_documents(name):
    model, (tokens, ids) = any_make(f"iclm-{name}"), packed_rows(documents())
    some = torch.tensor([3, 11, 20])
    found = model.contributions(tokens, segment_ids=ids)
    assert not found.per_token(some)[~(ids[:, :, None] == ids[:, None]).tril()].any()
    for row, span in runs(ids):
        own = model.contributions(tokens[row, span][None])
        torch.testing.assert_close(found.parts(some)[row, span, span], own.parts(some)[0], **BOUND)
        torch.testing.assert_close(found.mlp(some)[row, span], own.mlp(some)[0], **BOUND)
    few = model.contributions(tokens, positions=[-1, 6], segment_ids=ids)
    torch.testing.assert_close(few.per_token(some), found.per_token(some)[:, [12, 6]], **BOUND)
    real = torch.ones(2, 19, dtype=torch.bool)
    real[:, [0, 1, 7, 12, 13, 18]] = False  # before, between, inside and after documents
    spread = lambda x, filler: x.new_full(real.shape, filler).masked_scatter(real, x)  # noqa: E731
    hidden = model.contributions(spread(tokens, 3), real, segment_ids=spread(ids, 9))
    torch.testing.assert_close(hidden.logits()[real], found.logits().flatten(0, 1), **BOUND)
    inner = hidden.per_token(some)[real].view(2, 13, 19, 3)
    assert not inner[:, :, ~real[0]].any()
    torch.testing.assert_close(inner[:, :, real[0]], found.per_token(some), **BOUND)


def test_tokens_and_positions_can_be_chosen():
    model = any_make("iclm")
    whole = model.contributions(IDS)
    few = model.contributions(IDS, positions=[4, -1])
    assert few.positions.tolist() == [4, 8]
    torch.testing.assert_close(few.per_token(), whole.per_token()[:, [4, 8]])
    chosen = torch.tensor([5, 0, 28])
    own = chosen.expand(2, 2, 3)
    for name in ("per_token", "per_head", "per_layer", "mlp", "logits", "parts"):
        everything = getattr(few, name)(torch.arange(29))
        for given in (chosen, own):
            found = getattr(few, name)(given)
            torch.testing.assert_close(found, everything[..., chosen], atol=1e-6, rtol=1e-5)
    assert few.bias(own).shape == (2, 2, 3)
    target = torch.tensor([[[1], [2]], [[3], [4]]])  # a token of its own at every position
    found = few.per_token(target)
    for b in range(2):
        for q in range(2):
            torch.testing.assert_close(found[b, q, :, 0], few.per_token()[b, q, :, target[b, q, 0]])


def test_the_vocabulary_comes_in_pieces():
    found = any_make("iclm").contributions(IDS)
    pieces = list(found.vocabulary(8))
    assert [len(piece) for piece in pieces] == [8, 8, 8, 5]
    torch.testing.assert_close(torch.cat([found.per_token(piece) for piece in pieces], -1), found.per_token())


def test_differences_and_types():
    found = any_make("iclm").contributions(IDS)
    one, other = torch.tensor([3]), torch.tensor([9])
    each = found.per_token()
    torch.testing.assert_close(found.difference(one, other)[..., 0], each[..., 3] - each[..., 9])
    types, sums = found.per_type(one)
    assert types.tolist() == sorted(set(IDS.flatten().tolist()))
    for place, kind in enumerate(types.tolist()):
        for b in range(2):
            wanted = each[b, :, IDS[b] == kind, 3].sum(-1)
            torch.testing.assert_close(sums[b, :, place, 0], wanted, atol=1e-6, rtol=1e-5)


def test_one_token_is_a_text_and_its_parts_hold_no_graph():
    for start in ("param", "bos"):
        model = any_make("iclm", start=start)
        found = model.contributions(IDS[:, :1])
        assert not found.logits().requires_grad
        torch.testing.assert_close(found.logits(), model(IDS[:, :1]).logits.detach(), atol=1e-5, rtol=1e-6)
        assert found.per_token().any() == (start == "param")


def test_nothing_listens_afterwards():
    model = any_make("iclm")
    model.contributions(IDS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    refuses("input_ids holds 0 to 99", model.contributions, torch.tensor([[0, 99]]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


WRONG = ([9], [], [0.5], [[1]], [-10])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tokens": torch.tensor([29])}, "tokens holds 29 to 29, expected tokens from 0 to 28"),
        ({"tokens": torch.tensor([0.5])}, r"tokens is a torch.float32 .*\[1\], expected integers \[M\] or \[2, 9, M\]"),
        ({"tokens": torch.zeros(1, 9, 2, dtype=torch.long)}, r"tokens is .*\[1, 9, 2\], expected integers \[M\] or"),
        *(({"positions": p}, r"positions is .*, expected integers \[Q\] from -9 to 8") for p in WRONG),
        ({"input_ids": [[1, 2]]}, r"input_ids is \[\[1, 2\]\], expected an integer tensor"),
        ({"input_ids": torch.arange(3)}, r"input_ids is a torch.int64 tensor \[3\], expected an integer tensor"),
    ],
)
def test_bad_calls(call, message):
    model, tokens, given = any_make("iclm"), call.get("tokens"), {"input_ids": IDS, **call}
    given.pop("tokens", None)
    refuses(message, lambda: model.contributions(**given).per_token(tokens))
