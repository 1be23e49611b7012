"""Small models of every kind that is registered, and texts for them: what the tests of models share."""

import pytest
import torch
import torch.nn.functional as F
from hostile import some

from regard.models import language_models, token_mixers
from regard.models.base.arguments import CACHE
from regard.nn.memories import memory_layers

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "pad_token_id": 0}
T = 13
SMALL = {
    "gated-deltanet": {"num_heads": 2, "head_dim": 8},
    "lact": {"fast_heads": 2, "window": 4, "chunk_size": 3},
    "fwpkm": {"sub_keys": 8, "key_dim": 8, "value_dim": 8, "top_k": 4, "chunk_size": 3},
    "fwmlp": {"in_dim": 8, "hidden_dim": 12, "value_dim": 8, "chunk_size": 3},
    "pkm": {"sub_keys": 8, "key_dim": 8, "top_k": 4},
}
"""Options that make mixers and memories small; those that are not named here are tested with their defaults."""
TRANSFORMER = {
    "elu": {"mixers": ["elu", "topk-softmax"], "num_hidden_layers": 2},
    "linear": {"mixers": ["linear", "normrelu"], "num_hidden_layers": 2, "feed_forward": "gelu", "norm": "layer"},
    "grouped": {"mixers": ["shift-cosine", "softmax"], "num_hidden_layers": 2, "num_key_value_heads": 1},
    "local-linear": {"mixers": ["local-linear", "local-linear[biweight]"], "qk_norm": "rms",
                     "ridges": ["learned", "learned-per-dimension"],
                     "num_key_value_heads": 1, "num_hidden_layers": 2},
    "window": {"mixers": ["softmax", "elu", "biweight", "local-linear"], "window": 3},
    "window-without-self": {"mixers": ["softmax", "shift-cosine", "biweight"], "num_hidden_layers": 3, "window": 4,
                            "exclude_self": True},
    "one-key": {"mixers": ["softmax", "biweight"], "num_hidden_layers": 2, "window": [1, None], "rotary_share": 0.5},
    "qk_norm": {"mixers": ["softmax", "biweight"], "num_hidden_layers": 2, "qk_norm": "l2"},
    "learned": {"mixers": ["softmax", "biweight"], "num_hidden_layers": 2, "temperatures": "learned",
                "tie_word_embeddings": False},
    "log": {"mixers": ["linear", "biweight"], "num_hidden_layers": 2, "temperatures": "log", "output_norm": True},
    "power": {"mixers": ["linear", "softmax"], "num_hidden_layers": 2, "temperatures": "power", "window": 4},
    "shared": {"mixers": ["linear", "softmax"], "num_hidden_layers": 2, "share_query_key": True, "exclude_self": True,
               "output_gate": True, "temperatures": ["power(exponent=0.5)", "log"]},
}  # fmt: skip
MOSAIC = {
    "distance": {"mixers": ["epanechnikov*fixed(h=1)*cosine", "relumax"]},
    "local-linear": {"mixers": ["local-linear", "linear"], "tie_word_embeddings": False},
    "persistent": {"persistent": "biweight", "persistent_copies": 2},
    "average": {"leaky": "average", "key_eps": 1e-6},
    "convex": {"look_ahead": "convex", "bias": True},
    "parallel": {"wiring": "parallel"},
    "shared": {"wiring": "parallel", "persistent_keys": "shared", "mixers": ["biweight", "softmax"]},
    "nano": {"look_ahead": "convex", "key_eps": 1e-10, "scale_logits": False, "initializer": "gpt2"},
    "library": {"look_ahead": "convex", "leaky": "average", "persistent_copies": 2},
}
ICLM = {
    "f-none": {"f_mlp": "none", "num_hidden_layers": 2},
    "side-wv": {"f_mlp": "side", "variant": "wv"},
    "slice-bos": {"f_mlp": "none", "variant": "slice", "start": "bos"},
    "steps-bos": {"variant": "wv", "start": "bos", "expectation": "exact", "gd_steps": 2},
    "steps": {"expectation": "exact", "gd_steps": 2, "phi_mixers": "relumax"},
    "linear-pre": {"f_mlp": "none", "mixers": "linear", "expectation": "mean", "f_reads": "pre"},
    "sum": {"mixers": "elu", "f_average": False, "f_rope": False, "phi_mlp": "none"},
    "local-linear": {"f_mlp": "none", "mixers": "local-linear", "norm_values": True, "tie_word_embeddings": False},
    "two-tables": {"mixers": "biweight", "tie_phi": False, "d_phi": 32, "f_attention_heads": 4},
    "pre-bos": {"num_hidden_layers": 2, "f_reads": "pre", "start": "bos"},
}


def _parts() -> dict[str, tuple[str, dict]]:
    found, sizes = {}, {"num_hidden_layers": 2}
    for name in token_mixers.names():
        fields = {"mixers": [name, "biweight"], "mixer_options": {name: SMALL.get(name, {})}, **sizes}
        found[f"mixer-{name}"] = ("transformer", fields)
    for name in memory_layers.names():
        for place in ("before-mixer", "after-mixer"):
            fields = {"memories": f"{name}@1", "memory_options": {name: SMALL.get(name, {})}, **sizes}
            found[f"memory-{name}-{place}"] = ("transformer", {**fields, "memory_place": place})
    mixed = {"memories": "pkm@0+fwpkm@0", "memory_options": {name: SMALL[name] for name in ("pkm", "fwpkm")}}
    found["memory-of-two-kinds"] = ("transformer", {"mixers": ["gated-deltanet", "softmax"], **mixed, **sizes,
                                    "mixer_options": {"gated-deltanet": SMALL["gated-deltanet"]}})  # fmt: skip
    return found


OPTIONS: dict[str, tuple[str, dict]] = {
    **{f"transformer-{name}": ("transformer", fields) for name, fields in TRANSFORMER.items()},
    **{f"mosaic-{name}": ("memory-mosaic", {"num_hidden_layers": 2, **fields}) for name, fields in MOSAIC.items()},
    **{f"iclm-{name}": ("iclm", fields) for name, fields in ICLM.items()},
}
"""Models with other fields than the default ones: name -> (registered model, fields)."""
PARTS = _parts()
"""Models with each token mixer and each memory that is registered."""
CASES = {name: (name, {}) for name in language_models.names()} | OPTIONS | PARTS
KERNELS = ("biweight", "relumax", "shift-cosine")
CASES |= {f"{name}-{kernel}": (name, {"mixers": kernel}) for name in language_models.names() for kernel in KERNELS}


def cases(names, second=()):
    """A parametrisation over cases; the last two kernels of each model, and `second`, are in the second tier."""
    later = {case for case in names if case in second or case.endswith(("-relumax", "-shift-cosine"))}
    return pytest.mark.parametrize("case", some(names, *(case for case in names if case not in later)))


every_model = pytest.mark.parametrize("name", language_models.names())
every_case = cases(CASES)
parts_first = cases(CASES, second=OPTIONS)
"""Models, mixers and memories in the first tier; other fields in the second."""
plain_case = cases([case for case in CASES if case not in OPTIONS and case not in PARTS])


def counts_padding(case):
    """Whether windows count hidden tokens, so that hiding a token inside a text is not leaving it out."""
    return any(word in case for word in ("window", "one-key", "power", "lact"))


def tolerance(case):
    """The delta rule is computed in float32, whatever the dtype of the model."""
    return 1e-5 if "gated-deltanet" in str(CASES[case]) else 1e-9


def takes_embeddings(case):
    """Whether the model of a case takes embeddings in the place of tokens."""
    return CASES[case][1].get("tie_phi", True)


def moved(model, seed=3, size=0.2):
    """Numbers of heads are moved less: models may take exponentials of them."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            step = size if weight.dim() > 1 else size / 10
            weight += step * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
    return model


def make(name, mixers="softmax", dtype=torch.float64, **fields):
    """The registered model or case of this name, away from its initial values."""
    kind, own = CASES[name]
    entry = language_models.get(kind)
    torch.manual_seed(0)
    return moved(entry.model(entry.config(**{**SIZES, "mixers": mixers, **own, **fields})).to(dtype).eval())


def text(rows=1, length=T, seed=0):
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(seed=1):
    """(tokens, mask) [5, T]: full, padded on the left, on the right, in the middle, and down to one token."""
    tokens, mask = text(5, seed=seed), torch.ones(5, T, dtype=torch.long)
    mask[1, :4], mask[2, 8:], mask[3, [2, 5, 6]] = 0, 0, 0
    mask[4] = 0
    mask[4, 7] = 1
    return tokens, mask


def in_chunks(model, tokens, sizes, mask=None, cache=None):
    """The logits of tokens [B, T], or of embeddings, that are given in pieces, and the cache."""
    parts, seen = [], 0
    for chunk in tokens.split(sizes, dim=1):
        seen += chunk.shape[1]
        given = {"inputs_embeds" if chunk.is_floating_point() else "input_ids": chunk}
        whole = None if mask is None else mask[:, :seen]
        out = model(**given, attention_mask=whole, past_key_values=cache, use_cache=True)
        cache, parts = getattr(out, CACHE), [*parts, out.logits]
    return torch.cat(parts, 1), cache


def loss_of(model, tokens, **kwargs):
    """The mean cross entropy of the visible pairs in float64 (a model's own loss is float32), and the logits."""
    logits = model(None if "inputs_embeds" in kwargs else tokens, **kwargs).logits
    seen = kwargs.get("attention_mask", torch.ones_like(tokens)).bool()
    pairs = seen[:, 1:] & seen[:, :-1]
    return F.cross_entropy(logits[:, :-1][pairs], tokens[:, 1:][pairs]), logits


def gradients(model):
    """The gradients that parameters hold, by path."""
    return {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def central_difference(value, parameters, along, step=1e-6):
    """The slope of `value()` by parameters that move along these directions."""
    sides = []
    for move in (step, -2 * step):
        for p, direction in zip(parameters, along, strict=True):
            p += move * direction
        sides.append(value())
    for p, direction in zip(parameters, along, strict=True):
        p += step * direction
    return (sides[0] - sides[1]) / (2 * step)


def same_by_path(found, expected, bound):
    """Compare tensors by path; entries of tensors with large numbers may be off by more."""
    assert found.keys() == expected.keys()
    for path, wanted in expected.items():
        told, size = (lambda words, path=path: f"{path}: {words}"), float(wanted.abs().amax().clamp(min=1))
        torch.testing.assert_close(found[path], wanted, atol=size * bound, rtol=bound, msg=told)


def same_gradients(model, tokens, expected):
    """Compare the gradients of the loss by all parameters with those by way of `expected` logits; none is zero."""
    named = dict(model.named_parameters())
    found, wanted = (
        torch.autograd.grad(F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), list(named.values()))
        for x in (model(tokens).logits, expected)
    )
    for path, a, b in zip(named, found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6, msg=lambda words, path=path: f"{path}: {words}")
        assert (b != 0).any(), f"{path} plays no part"


def refused(error, word=""):
    """One line that names the thing refused."""
    assert word in str(error)
    assert "\n" not in str(error)
