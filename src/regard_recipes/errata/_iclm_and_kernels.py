"""Errata of the ICLM paper and of the paper on generalized memory and kernel selection."""

from ._listing import Numbers, erratum, normal


@erratum("ICLM", "section 7")
def parameters_of_whole_embeddings() -> Numbers:
    """Found: ICLM and Transformer have the same number of parameters; W_v is removed and the projections are adjusted.
    Correct: eight heads that average whole embeddings need (2 + H) d² for 4 d²; only with heads on W_v are they
    equal."""
    from regard.models import HybridConfig, ICLMConfig
    from regard.models.base.catalogue import count_parameters

    shape = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 50257}
    transformer = HybridConfig(**shape, mixers="softmax", feed_forward="gelu")
    full, heads = (ICLMConfig(**shape, variant=variant) for variant in ("full", "wv"))
    models = {"Transformer": transformer, "ICLM, whole embeddings": full, "ICLM, heads on W_v": heads}
    return {f"million parameters, {name}": count_parameters(config) / 1e6 for name, config in models.items()}


@erratum("Generalized memory and kernel selection", "equation 8b")
def sums_of_signed_kernels() -> Numbers:
    """Found: every kernel may be divided by the sum of its values. Correct: linear and cosine kernels are signed: their
    sum is often near 0 or below it."""
    q, k = normal(2, 256, 32)
    return {"share of rows with a sum below 0": float(((q @ k.T).tril().sum(1) < 0).double().mean())}
