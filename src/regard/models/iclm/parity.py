"""Which ICLMs are as large as the Transformer of the same layers, width and heads, and how near the others come.

An f block of variant "full" has (2 + H) C^2 attention parameters where a Transformer layer has 4 C^2, so that H = 2
alone is as large; "wv" has 4 C^2 and "slice" 3 C^2 (without biases, covariates as wide as f). What "full" with more
heads has too much, a narrower feed-forward layer on f can give back: it is then 4 - (H - 2) / 2 times C wide, if that
is above 0.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from ...checks import ArgumentError
from ...nn.functional_gradient import VARIANTS
from ..base.matching import count_parameters, match_parameters
from ..hybrid.configuration_hybrid import HybridConfig
from .configuration_iclm import PRESETS, ICLMConfig

Cells = tuple[str, ...]


@dataclass(frozen=True)
class ParityReport:
    """A table of parameter counts; `str` gives it as Markdown.

    Attributes:
        header, rows: cells as text; in groups, the Transformer first.
        note: a sentence below the table.
    """

    header: Cells
    rows: tuple[Cells, ...]
    note: str

    def __str__(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in (self.header, *self.rows)]
        lines.insert(1, "|---|---|" + "---:|" * (len(self.header) - 3) + "---|")
        return "\n".join([*lines, "", self.note])


def transformer_like(config: ICLMConfig, **changes: object) -> HybridConfig:
    """The Transformer that an ICLM of `config` is compared with (ICLM paper, section 7): as many layers, heads and
    channels, GPT-2's blocks, rotary positions, tied embeddings.

    Args:
        config: is not changed.
        changes: further fields of `HybridConfig`, such as `feed_forward="none"`.
    """
    fields = {
        name: getattr(config, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "initializer_range",
            "tie_word_embeddings",
            "rope_theta",
            "pad_token_id",
            "bos_token_id",
            "eos_token_id",
        )
    }
    kind = {"feed_forward": config.phi_mlp, "norm": "layer", "rms_norm_eps": config.layer_norm_eps}
    return HybridConfig(**{**fields, **kind, **changes})


def parity_report(*sizes: str) -> ParityReport:
    """How many parameters the variants have at the paper's sizes (all of them unless named), beside the Transformer.

    Raises:
        ArgumentError: an unknown size.

    Cost: counts shapes, allocates nothing; about a second a size.
    """
    rows = [row for size in sizes or PRESETS for row in _of(ICLMConfig.preset(size), size)]
    note = (
        "At parity: within 0.01 % (a start vector) of the Transformer with the same layers, width, heads and "
        "vocabulary. Variant full is there with two heads of f, or with a narrower feed-forward layer on f where "
        "one is narrow enough."
    )
    return ParityReport(("size", "model", "parameters", "beside the Transformer", "at parity"), tuple(rows), note)


def _of(base: ICLMConfig, size: str) -> list[Cells]:
    """The rows of one size."""
    wanted = count_parameters(transformer_like(base))

    def row(name: str, parameters: int) -> Cells:
        gap = parameters / wanted - 1
        return (
            size,
            name,
            f"{parameters / 1e6:.2f}M",
            f"{parameters - wanted:+,} ({gap:+.2%})",
            "yes" if abs(gap) <= 1e-4 else "no",
        )

    def iclm(**changes: object) -> ICLMConfig:
        config = copy.deepcopy(base)
        for name, value in changes.items():
            setattr(config, name, value)
        config.normalise()
        return config

    found: list[Cells] = [(size, "Transformer", f"{wanted / 1e6:.2f}M", "", "")]
    heads = base.num_attention_heads
    for variant in VARIANTS:
        found.append(row(f"{variant}, {heads} heads", count_parameters(iclm(variant=variant))))
        if variant == "full":
            found.append(row("full, 2 heads of f", count_parameters(iclm(variant="full", f_attention_heads=2))))
            try:
                matched = match_parameters(iclm(variant="full"), wanted)
            except ArgumentError:
                continue  # larger than the Transformer without any feed-forward layer on f
            width = f"{getattr(matched.config, base.size_field)} of {4 * base.hidden_size}"
            found.append(row(f"full, {heads} heads, feed-forward of f {width} wide", matched.parameters))
    return found
