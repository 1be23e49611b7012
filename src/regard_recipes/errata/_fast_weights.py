"""Errata of the FwPKM paper (arXiv 2601.00671) and of its published program."""

from functools import partial

import torch

import regard

from ._listing import Numbers, erratum

here = partial(erratum, "Fast-weight product key memory")


def remaining_error(weights: torch.Tensor, factor: float) -> float:
    """Return the share of the error left after one step, V_i <- V_i - factor w_i (v̂ - v)."""
    return float(1 - factor * weights.square().sum())


@here("equation 16 and section 3.2.1")
def one_step_rewriting() -> Numbers:
    """Found: one step rewrites a slot, so that the next read returns the target. Correct: the share 1 − Σ w² of the
    error is left; dividing the step by Σ w² leaves nothing."""
    w = torch.full((8,), 1 / 8, dtype=torch.float64)
    exact = remaining_error(w, float(1 / w.square().sum()))
    return {"error left, 8 equal weights": remaining_error(w, 1), "with the step over Σ w²": exact}


@here("published program, equations 17 and 18")
def factor_of_the_step() -> Numbers:
    """Found: the step has no further factor. Correct: it is multiplied by the number of slots read, k: exact for equal
    weights, divergent for a query near a key."""
    near = torch.tensor([0.99] + [0.01 / 7] * 7, dtype=torch.float64)
    return {"error after 4 writes with k = 8, largest weight 0.99": abs(remaining_error(near, 8)) ** 4}


@here("equation 20")
def sign_of_the_entropy() -> Numbers:
    """Found: the loss of the sub-keys is −Σ p log p. Correct: its sign is the other one: the entropy is maximised."""
    numbers = {}
    for name, sign in (("as printed", 1), ("as released", -1)):
        z = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
        entropy = lambda z: -(z.softmax(0) * z.log_softmax(0)).sum()  # noqa: E731
        step = torch.autograd.grad(sign * entropy(z), z)[0]
        numbers[f"change of the entropy, {name}"] = float((entropy(z - step) - entropy(z)).detach())
    return numbers


@here("section 4.3 and the published program, needles")
def reads_before_the_answer() -> Numbers:
    """Found: n-iter: the model reads the haystack n times before it answers. Correct: the chunk is as long as the
    input, so the first answer token sees n − 1 writes; at n = 1 nothing of the haystack."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    query, keys, slots = draw(1, 64, 1, 8), draw(1, 2, 8, 4), draw(64, 8)
    numbers = {}
    for chunk in (64, 16):
        value = draw(1, 64, 8).requires_grad_()
        out, _ = regard.fast_weight_memory(query, value, None, keys, slots, chunk_size=chunk)
        gradient = torch.autograd.grad(out[0, -1].sum() + 0 * value.sum(), value)[0]
        what = f"gradient of the last read by earlier values, {chunk} of 64 tokens a chunk"
        numbers[what] = float(gradient.abs().max())
    return numbers


@here("section 4.3, full attention beyond 4 K")
def rotary_base_of_full_attention() -> Numbers:
    """Found: full attention degrades with the length of the context. Correct: it is evaluated with another rotary
    embedding (YaRN from 1024 positions) than it was trained with."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 1024}
    config = LlamaConfig(**shape, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0})
    scaled, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    plain = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    largest = "largest ratio of rotary frequencies, trained over evaluated"
    return {largest: float((plain / scaled).max()), "factor on queries and keys": float(attention_factor)}


@here("section 4.2 and the published program, streaming perplexity")
def segments_of_the_stream() -> Numbers:
    """Found: segments of 4096 tokens in order. Correct: segment s begins at 4097 s and ends at 4096 (s + 1) + 1: it has
    4097 − s tokens, and s are left out after it."""
    segments = range(2000)
    kept = sum(4096 * (s + 1) + 1 - 4097 * s for s in segments)
    return {"share of the tokens left out, 2000 segments": 1 - kept / (4097 * len(segments))}


@here("configuration of the ablation 'without look-ahead'")
def look_ahead_ablation() -> Numbers:
    """Found: the model trains without look-ahead. Correct: it sets fwpkm_target_lookahead, but the model reads
    fwpkm_target_value_lookahead: look-ahead stays 1."""
    return {}  # read in the published configuration and model


@here("table 3, LaCT")
def columns_of_lact() -> Numbers:
    """Found: window 512, chunk 2048. Correct: chunk 512, window 2048, as the text and the configuration say."""
    return {}  # read in the published configuration
