"""Count how many slots of a product-key memory are read, with and without batch norm of its queries.

Fast-weight Product Key Memory paper, section 3.3.1, which quotes the product-key paper (Lample et al.,
arXiv:1907.05242), and adds that query norms are inefficient with one head x 8 slots a token in place of four x 32.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.memory.product_key import product_key_search
from regard.nn import ProductKeyMemory

from ..lib.claims import Claim, claims_of, mean_interval, paired
from ..lib.display import dots, interval, pivot, stat
from ..lib.language_text import windows
from ..lib.recipe import Cell, Results, select
from ..lib.text_recipe import TextRecipe

PAPER, WHERE = "Fast-weight Product Key Memory", "section 3.3.1"
NORMS = {"none": "no norm", "rms": "RMS norm", "batch": "batch norm"}
WIDE, FEW = "many slots", "few slots"


class SlotUse(TextRecipe, name="slot-use"):
    """Share of a product-key memory's slots that are read, by the norm of the queries and the slots of a token."""

    sub_keys: int = 128  # The square root of the slots; the paper has 512.
    memory_dim: int = 64  # Channels of a memory's keys and values.
    top_k: int = 8  # Slots that each of four heads reads where many are read: a sixteenth of the sub-keys.
    few: int = 2  # Slots that the one head reads where few are read.
    steps = 1500
    measured = 16_384
    limits: ClassVar = {"layers": (2, 256), "sub_keys": (2, 2**16), "memory_dim": (2, 8192),
                        "top_k": (1, "sub_keys"), "few": (1, "sub_keys")}  # fmt: skip
    known: ClassVar = {
        f"{label}, {reads}": {"norm": norm, "reads": reads} for reads in (WIDE, FEW) for norm, label in NORMS.items()
    }
    """Norm of the queries, and whether a token reads `heads` x `top_k` slots or one head x `few`."""
    by_size: ClassVar = {
        "quick": {"seeds": 2, "width": 32, "context": 32, "batch": 8, "steps": 40, "rates": (3e-3,), "sub_keys": 32,
                  "memory_dim": 32, "top_k": 4, "measured": 2048, "looks": 2},
        "paper": {"tokenizer": "gpt2", "width": 768, "layers": 12, "heads": 12, "context": 512, "batch": 128,
                  "parts": 8, "steps": 20_000, "rates": (3e-4, 1e-3), "sub_keys": 512, "memory_dim": 512, "top_k": 32,
                  "few": 8, "measured": 262_144, "looks": 20, "dtype": "bfloat16", "device": "auto"},
    }  # fmt: skip

    def fields(self, cell: Cell) -> dict[str, Any]:
        kind = self.known[cell["model"]]
        heads, top_k = (4, self.top_k) if kind["reads"] == WIDE else (1, self.few)
        memory = {"sub_keys": self.sub_keys, "key_dim": self.memory_dim, "value_dim": self.memory_dim, "heads": heads,
                  "top_k": top_k, "query_norm": kind["norm"]}  # fmt: skip
        return {"mixers": "softmax", "memories": f"PKM@{self.layers // 2}", "memory_options": {"pkm": memory}}

    def measure_model(self, model: Any) -> dict[str, Any]:
        batch = max(1, self.batch // self.parts)
        return {**super().measure_model(model), **slots_read(model, windows(self.test_tokens, self.context), batch)}

    def claims(self, results: Results) -> list[Claim]:
        runs = self.chosen(results).assign(use=lambda rows: rows["coverage"] / rows["even"])
        plain, batch, narrow = (select(runs, model=f"{NORMS[norm]}, {reads}")
                                for norm, reads in (("none", WIDE), ("batch", WIDE), ("batch", FEW)))  # fmt: skip
        share = "Share of slots that are read, over that of even use."
        return claims_of(PAPER, [
            (WHERE, "Batch norm of the queries raises the share of slots in use", paired(batch, plain, "use"), "above",
             0.0, f"{share} Less no norm; the paper has 97.9 % and 64.4 %."),
            (WHERE, "With batch norm nearly all slots are in use", batch["use"], "at least", 0.95, share),
            (WHERE, "Batch norm is less efficient where a token reads few slots", paired(narrow, batch, "use"), "below",
             0.0, f"{share} One head x {self.few} slots, less four heads x {self.top_k}."),
        ], effect=0.1, untestable=self.unlearned(results))  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        return {"Slots in use": pivot(self.chosen(results), ["model"], {
            "slots read": lambda rows: f"{mean_interval(100 * rows['coverage']).text(1)} %",
            "even use": stat("even", "mean", "{:.1f} %", 100), "KL to even use, nats": interval("kl"),
            "reads of a slot": "{reads:.1f}",
        }, note="Share of all slots that are read at least once in the test text, ± half the 95 % interval over seeds. "
                "Even use: what as many reads of random slots would reach."),
            "Losses": self.losses_table(results)}  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        runs = self.chosen(results).assign(reads_of=lambda rows: [self.known[name]["reads"] for name in rows["model"]])
        return {"slots": dots(runs, "coverage", "model", "reads_of", x_label="share of slots that are read"),
                "curves": self.curves(results)}  # fmt: skip


@torch.no_grad()
def slots_read(model: Any, tokens: Tensor, batch: int) -> dict[str, float]:
    """Return how evenly a model reads the slots of its product-key memory on windows [W, T]: coverage (share of slots
    that are read), even (that share for random reads), kl (nats from even use) and reads (of a slot, the mean)."""
    memory = next(module for module in model.modules() if isinstance(module, ProductKeyMemory))
    counts = torch.zeros(memory.values.shape[0], dtype=torch.long)

    def count(module: Any, inputs: Any, query: Tensor) -> None:
        heads = query.detach().float().reshape(1, -1, memory.heads, query.shape[-1] // memory.heads)
        read = product_key_search(heads, memory.keys.float(), memory.top_k, score=memory.score)
        counts.add_(read.slots.flatten().cpu().bincount(minlength=len(counts)))

    with memory.q_norm.register_forward_hook(count):
        for part in tokens.split(batch):
            model(input_ids=part.long().to(memory.keys.device), use_cache=False)
    total, slots = int(counts.sum()), len(counts)
    share = counts.double() / total
    return {"coverage": float((counts > 0).double().mean()), "even": -math.expm1(total * math.log1p(-1 / slots)),
            "kl": math.log(slots) + float(torch.xlogy(share, share).sum()), "reads": total / slots}  # fmt: skip
