"""Text in which names come back beyond the window of attention: what a memory that is written while reading adds.

Fast-weight Product Key Memory, sections 4.2 and 5.2: written memories lower the loss on long documents, and their gates
spike on names. docs/memory-results.md describes the documents. A frozen memory is the same model, without writes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from regard.inspect.gates import gate_trace
from regard.tasks import TokenTask
from regard.tasks.recurring_names import RecurringNames

from ..lib.claims import Claim, claims_of, paired
from ..lib.display import interval, pivot
from ..lib.recipe import Results
from ..lib.task_recipe import TaskRecipe

PAPER, TASK = "Fast-weight Product Key Memory", "names"
ALL, WINDOW, FWPKM = "all tokens", "window", "window and FwPKM"
WRITTEN, FROZEN = "written", "frozen"
FILLER = "other tokens"
PLACES = ("new", "near", "far", FILLER)
HELPS = 0.1  # nats, and difference of gates, that count as an effect


class RecurringNamesRecipe(TaskRecipe, name="recurring-names"):
    """Loss on names that recur beyond the window of attention, with a written and a frozen memory, and its gates."""

    sentences: int = 24  # Sentences of a document.
    people: int = 6  # People of a document.
    window: int = 8  # Tokens that attention sees, and beyond which a mention is far.
    width: int = 64  # Channels, of one head.
    sub_keys: int = 16  # Of the memory; it has as many slots as their square.
    chunk: int = 8  # Tokens between two writes of the memory.
    rates: tuple[float, ...] = (3e-3, 6e-3)
    """Learning rates, of which each model takes the one with the best mean accuracy on far mentions of the validation
    split."""
    steps = 300
    batch = 32
    examples: int = 128  # Documents of the test split that each score is taken from.
    limits: ClassVar = {
        "sentences": (2, 2**31), "people": (1, 2**31), "window": (1, 2**31), "width": (8, 8192),
        "sub_keys": (2, 2**15), "chunk": (1, 2**31),
    }  # fmt: skip
    known: ClassVar = {
        ALL: {"mixers": "softmax", "window": None}, WINDOW: {"mixers": "softmax"},
        FWPKM: {"mixers": "softmax", "memories": "FwPKM@1"},
    }  # fmt: skip
    metric = "accuracy on far"
    by_size: ClassVar = {
        "quick": {"seeds": 2, "steps": 40, "batch": 16, "rates": (3e-3,), "examples": 16, "sentences": 16, "people": 3},
        "paper": {"seeds": 3, "sentences": 1024, "people": 24, "window": 512, "width": 768, "sub_keys": 512,
                  "chunk": 512, "steps": 20_000, "batch": 32, "device": "auto"},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, TokenTask]:
        return {TASK: RecurringNames(self.sentences, self.people, share=0.8, verbs=0, window=self.window)}

    def shared(self) -> Mapping[str, Any]:
        memory = {"sub_keys": self.sub_keys, "chunk_size": self.chunk}
        return {"num_hidden_layers": 2, "num_attention_heads": 1, "feed_forward": "none", "window": self.window,
                "max_position_embeddings": 16 * self.sentences, "memory_options": {"fwpkm": memory}}  # fmt: skip

    def scored(self, model: Any, name: str, test: TokenTask) -> Iterator[dict[str, Any]]:
        from regard.models.hybrid.memories import frozen_memory, memory_modules

        written = bool(memory_modules(model))
        yield from ({**row, "memory": WRITTEN if written else ""} for row in super().scored(model, name, test))
        if written:
            yield from gate_rows(model, test, min(32, self.examples))
            with frozen_memory(model):
                yield from ({**row, "memory": FROZEN} for row in super().scored(model, name, test))

    def claims(self, results: Results) -> list[Claim]:
        if not {WINDOW, FWPKM} <= set(self.trained):
            return []
        far = lambda model, memory: self.scores(results, "loss on far", model=model, memory=memory)  # noqa: E731
        written = far(FWPKM, WRITTEN)
        lower = {f"less {name}": paired(written, other, "score")
                 for name, other in (("frozen", far(FWPKM, FROZEN)), ("window alone", far(WINDOW, "")))}  # fmt: skip
        gate = lambda part: self.chosen(results, "gate", place=part)  # noqa: E731
        return claims_of(PAPER, [
            ("section 4.2", "A written memory lowers the loss on what recurs beyond the window", lower, "below", 0.0,
             "Loss (nats) on the item of a name beyond the window: written memory minus frozen memory, and minus the "
             "model without a memory."),
            ("section 5.2", "Gates spike on names", paired(gate("far"), gate(FILLER), "gate"), "above", 0.0,
             "Gate on far names, which only the memory can complete, less the gate on tokens that are no names."),
        ], effect=HELPS, untestable=self.unlearned(results, TASK, [FWPKM]))  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        floor = results.facts["floors"][TASK]
        names = {"accuracy on near": "right, near", "accuracy on far": "right, far", "loss on near": "nats, near",
                 "loss on far": "nats, far"}  # fmt: skip
        scores = self.chosen(results, metric=list(names)).assign(metric=lambda rows: rows["metric"].map(names))
        return {
            "What recurs": pivot(scores, ["model", "memory"], {"": interval("score")}, "metric", note=(
                f"Things of names that were mentioned before, within {self.window} tokens (near) or not (far); "
                f"± half the 95 % interval over seeds. The thing of the last statement is right for "
                f"{floor.get('accuracy on near', 0):.2f} of near and {floor.get('accuracy on far', 0):.2f} of far "
                f"names.")),
            "Training": self.training_table(results),
            "Gates": pivot(self.chosen(results, "gate"), ["model"], {"": interval("gate")}, "place", note=(
                "Mean gate on the name, from whose place its thing is predicted; 1 reads the memory alone.")),
        }  # fmt: skip


def gate_rows(model: Any, task: TokenTask, count: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each of `PLACES`: the mean gate at the tokens from which it is predicted, over some documents."""
    sums: dict[str, list[Any]] = {part: [] for part in PLACES}
    for example in task.examples(0, range(count), "test"):
        gates = gate_trace(model, example.tokens, [""] * len(example.tokens)).gates.mean(0)[:-1]
        at = {part: where[1:] for part, where in example.parts.items()}
        at[FILLER] = ~torch.stack(list(at.values())).any(0)
        for part, where in at.items():
            sums[part].append(gates[where])
    for part, gates_of_part in sums.items():
        yield {"kind": "gate", "place": part, "gate": float(torch.cat(gates_of_part).mean())}
