"""Measure how attention weights spread as a memory grows, for every kernel, without training.

One key of the memory is near the query, all others are random. Softmax gives every key some weight, so the right key
loses weight as keys are added (dispersion; sparse-attention paper, section 2.1). Each kernel gets the scale with which
the right key has a weight of 0.9 among the fewest keys. Then only the number of keys changes.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

import regard
from regard.training.fields import read_spec, split_specs

from ..lib.claims import Claim, claims_of, paired
from ..lib.display import interval, lines, pivot
from ..lib.recipe import Cell, Recipe, Results

PAPER, SOFTMAX, LOG = "Sparse attention", "softmax", "softmax, scale × log n"
WEIGHT = 0.9  # mean weight of the right key among the fewest keys, to which each scale is fitted
SPARSE = ("sparsemax", "biweight", "triweight", "relumax")
STEPS = 24  # bisections of the scale, from 2^-4 to 2^12


class Dispersion(Recipe, name="dispersion"):
    """Weight of the right key, support and retrieval error against the number of keys, for every kernel."""

    seeds: int = 5  # Memories of each length.
    specs: str = "softmax,sparsemax,biweight,triweight,relumax,topk-softmax"
    """Attention specs with commas between them, each of which takes a scale."""
    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)  # Numbers of keys; the scale is fitted at the first.
    dim: int = 64  # Width of keys and queries.
    similarity: float = 0.7
    """Mean cosine of the query and its key. All other keys are random, with cosines of about 1/sqrt(dim)."""
    queries: int = 64  # Queries of each memory.
    limits: ClassVar = {"lengths": (2, 2**24), "dim": (2, 4096), "similarity": (0.0, 1.0), "queries": (1, 2**16)}
    by_size: ClassVar = {
        "quick": {"seeds": 3, "lengths": (64, 256, 1024), "queries": 32},
        "paper": {"lengths": (64, 256, 1024, 4096, 16384, 65536, 262144), "seeds": 10},
    }

    @property
    def spec_names(self) -> list[str]:
        return split_specs(self.specs)

    def check(self) -> None:
        for text in self.spec_names:
            read_spec(text, "--specs", self.call())

    def cells(self) -> list[Cell]:
        names = [name for text in self.spec_names for name in ([text, LOG] if text == SOFTMAX else [text])]
        return [{"kernel": name, "keys": length} for name in names for length in self.lengths]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        name = cell["kernel"]
        spec = SOFTMAX if name == LOG else name
        scale = self.fitted_scale(spec)
        if name == LOG:
            scale *= math.log(cell["keys"]) / math.log(self.lengths[0])
        generator = torch.Generator().manual_seed(seed)
        p, target = self.weights(spec, scale, cell["keys"], generator)
        right = p.gather(-1, target[:, None])[:, 0]
        value = torch.randn(cell["keys"], 32, generator=generator)
        error = (p @ value - value[target]).square().sum(-1) / value[target].square().sum(-1)
        measured = {"weight": right, "support": (p > 0).sum(-1).float(), "effective": 1 / p.square().sum(-1),
                    "missed": (right == 0).float(), "error": error}  # fmt: skip
        yield {**{column: float(values.mean()) for column, values in measured.items()}, "scale": scale}

    def weights(self, spec: str, scale: float, keys: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the weights [queries, keys] of a random memory, and the place of each query's key."""
        k = normalize(torch.randn(keys, self.dim, generator=generator), dim=1)
        target = torch.randint(keys, (self.queries,), generator=generator)
        noise = torch.randn(self.queries, self.dim, generator=generator) / self.dim**0.5
        q = normalize(self.similarity * k[target] + (1 - self.similarity**2) ** 0.5 * noise, dim=1)
        shaped = [x[None, None] for x in (q, k, torch.zeros(keys, 1))]
        _, diagnostics = regard.attention(*shaped, spec, scale=scale, impl="reference", return_diagnostics=True)
        return diagnostics.weights[0, 0], target

    def fitted_scale(self, spec: str) -> float:
        """Return the scale with which the right key has the mean weight `WEIGHT` among the fewest keys."""
        low, high = -4.0, 12.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            generator = torch.Generator().manual_seed(2**31)  # no memory that is measured
            p, target = self.weights(spec, 2**middle, self.lengths[0], generator)
            enough = float(p.gather(-1, target[:, None]).mean()) >= WEIGHT
            low, high = (low, middle) if enough else (middle, high)
        return float(2**high)

    def claims(self, results: Results) -> list[Claim]:
        short, long = min(self.lengths), max(self.lengths)
        at = lambda name, keys: results.select(kernel=name, keys=keys)  # noqa: E731
        if SOFTMAX not in self.spec_names or short == long:
            return []
        softmax, sparse = at(SOFTMAX, long), [name for name in SPARSE if name in self.spec_names]
        less, more = ({name: paired(at(name, long), softmax, column) for name in sparse}
                      for column in ("error", "weight"))  # fmt: skip
        fall = paired(softmax, at(SOFTMAX, short), "weight")
        note = f"At {long:,} keys, less softmax's."
        return claims_of(PAPER, [
            ("section 2.1", "Softmax attention disperses over long contexts", fall, "below", 0,
             f"Weight of the right key at {long:,} keys less that at {short:,}."),
            ("section 2.1", "Compact kernels keep their weight on the right key", more, "above", 0,
             f"Weight of the right key. {note}"),
            ("section 4.3", "They retrieve better from long contexts", less, "below", 0,
             f"Squared error over the squared value. {note}"),
        ])  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        titles = {"weight": "Weight of the right key", "error": "Squared error of retrieval, over the squared value",
                  "support": "Keys with a weight", "missed": "Share of queries whose key has no weight"}  # fmt: skip
        note = f"± half the 95 % interval over memories. Scales are fitted to a weight of {WEIGHT} at the fewest keys."
        return {title: pivot(results.frame, ["kernel"], {"": interval(column)}, "keys", note=note)
                for column, title in titles.items()}  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        columns = {"weight": "weight of the right key", "error": "error of retrieval"}
        return {"lengths": lines({"": results.frame}, "keys", columns, "kernel", log_x=True)}
