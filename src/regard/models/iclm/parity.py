"""Parameter counts of ICLM variants, compared with the Transformer of the same layers, width and heads.

An f block of variant "full" has (2 + H) C^2 attention parameters and a Transformer layer 4 C^2, so that they are equal
for H = 2; "wv" has 4 C^2 and "slice" 3 C^2 (without biases, covariates as wide as f). With more heads, "full" is equal
with a narrower feed-forward layer on f, of inner width (4 - (H - 2) / 2) C, if that is positive.
"""

from dataclasses import dataclass

from ...checks import ArgumentError
from ...nn.functional_gradient import VARIANTS
from ..base.catalogue import count_parameters, match_parameters
from ..hybrid.configuration_hybrid import HybridConfig
from .configuration_iclm import PRESETS, ICLMConfig

Cells = tuple[str, ...]


@dataclass(frozen=True)
class ParityReport:
    """A table of parameter counts, formatted as Markdown by `str`."""

    header: Cells
    rows: tuple[Cells, ...]  # the Transformer first in each size
    note: str  # below the table

    def __str__(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in (self.header, *self.rows)]
        lines.insert(1, "|---|---|" + "---:|" * (len(self.header) - 3) + "---|")
        return "\n".join([*lines, "", self.note])


def transformer_like(config: ICLMConfig, **changes: object) -> HybridConfig:
    """Return the Transformer to compare an ICLM with (ICLM paper, section 7).

    It has the same layers, heads and width, GPT-2's blocks, rotary positions and tied embeddings. `changes` are further
    fields of `HybridConfig`, such as `feed_forward="none"`.
    """
    shared = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        *("initializer_range", "tie_word_embeddings", "rope_theta", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
    fields = {name: getattr(config, name) for name in shared}
    kind = {"feed_forward": config.phi_mlp, "norm": "layer", "rms_norm_eps": config.layer_norm_eps}
    return HybridConfig(**{**fields, **kind, **changes})


def parity_report(*sizes: str) -> ParityReport:
    """Count the parameters of the variants and of the Transformer at the paper's sizes (default: all).

    Allocates no weights; takes about a second per size. Raises ArgumentError for an unknown size.
    """
    rows = [row for size in sizes or PRESETS for row in _of(ICLMConfig.preset(size), size)]
    note = (
        "At parity: within 0.01 % (a start vector) of the Transformer with the same layers, width, heads and "
        "vocabulary. Variant full is at parity with two heads of f, or with a narrower feed-forward layer on f."
    )
    return ParityReport(("size", "model", "parameters", "minus the Transformer", "at parity"), tuple(rows), note)


def _of(base: ICLMConfig, size: str) -> list[Cells]:
    target = count_parameters(transformer_like(base))

    def row(name: str, parameters: int) -> Cells:
        gap = parameters / target - 1
        near = "yes" if abs(gap) <= 1e-4 else "no"
        return size, name, f"{parameters / 1e6:.2f}M", f"{parameters - target:+,} ({gap:+.2%})", near

    table: list[Cells] = [(size, "Transformer", f"{target / 1e6:.2f}M", "", "")]
    heads = base.num_attention_heads
    for variant in VARIANTS:
        config = ICLMConfig.preset(size, variant=variant)
        table.append(row(f"{variant}, {heads} heads", count_parameters(config)))
        if variant == "full":
            two = ICLMConfig.preset(size, variant="full", f_attention_heads=2)
            table.append(row("full, 2 heads of f", count_parameters(two)))
            try:
                matched = match_parameters(config, target)
            except ArgumentError:
                continue  # larger than the Transformer without any feed-forward layer on f
            width = f"{getattr(matched.config, base.size_field)} of {4 * base.hidden_size}"
            table.append(row(f"full, {heads} heads, feed-forward of f {width} wide", matched.parameters))
    return table
