"""The ten kernels of the kernel-selection paper's Table 1 as the attention of equal language models.

The paper (section 7) trains a small Transformer on characters and reports results without numbers. Here every kernel is
trained normalised and not; its default form also with q = k, and the steepest with q = k on earlier tokens only. The
baselines are a bigram model and attention with equal weights on the whole past.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from regard import Spec

from ..lib.claims import Claim, claims_of, exact, mean_interval, paired
from ..lib.display import dots, gap, lines, pivot, spread, stat
from ..lib.recipe import Cell, Frame, Results, check_names, select, stacked
from ..lib.text_recipe import TextRecipe
from .shared_query_key import CACHED, PAPER, PAPER_SIZE, memory_bytes, memory_columns, query_key_ratio

# The kernels of Table 1, in its order; "exponential" is the preset softmax, the others have their own names.
KERNELS = ("exponential", "linear", "geometric", "cosine", "shift-cosine", "rbf", "clipped-geometric", "relu",
           "relu2", "elu")  # fmt: skip
MEAN = "mean of the past"  # the baseline of equal weights
NORMALISED, PLAIN = "normalised", "not normalised"
APART, SHARED, EARLIER = "apart", "q = k", "q = k, earlier tokens only"
RISE = 0.05  # nats by which a training loss may rise between looks, whose windows differ, and count as falling
CLOSE = ("exponential", "rbf")  # kernels that one claim compares
FORM = ("model", "weights", "query_key")  # columns that name a model
MARGINAL = 0.02  # nats per character that "marginally better" is taken to mean


def spec_of(kernel: str, weights: str | None = None) -> Spec:
    """Return the spec of a kernel, normalised or not; by default as its preset is."""
    if kernel == MEAN:
        return Spec.parse("uniform*fixed(bias=1000000)")  # the bias lets every key in
    preset = Spec.parse("softmax" if kernel == "exponential" else kernel)
    return preset if weights is None else replace(preset, normalise=weights == NORMALISED)


class KernelSelection(TextRecipe, name="kernel-selection"):
    """The ten kernels of the kernel-selection paper in equal language models: losses, time, and what q = k costs."""

    models: tuple[str, ...] = KERNELS  # Kernels of Table 1.
    earlier: tuple[str, ...] = ("exponential", "geometric", "rbf", "clipped-geometric")
    """Of these, the ones that are trained with q = k on earlier tokens only too."""
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates, of which each form takes the one with the least mean loss on the validation text."""
    close_seeds: int = 8
    """Models of the exponential and of the RBF kernel with normalised weights, whose losses differ little; `seeds` if
    that is more."""
    batch = 8
    steps = 450
    looks = 6
    by_size: ClassVar = {
        "quick": {"seeds": 1, "close_seeds": 1, "steps": 150, "rates": (3e-3,), "measured": 4096, "looks": 5},
        "paper": {**PAPER_SIZE, "looks": 20},
    }  # fmt: skip
    known: ClassVar = {kernel: {} for kernel in KERNELS}
    per: ClassVar = FORM
    base = "exponential"

    def check(self) -> None:
        if self.earlier:
            check_names(self.call(), "--earlier", self.earlier, KERNELS)
        super().check()

    def prepare(self) -> Mapping[str, Any]:
        from ..demo.ngram import NGram

        facts = super().prepare()
        bigram = NGram(self.corpus.train_tokens.tolist(), self.vocabulary, 2)
        return {**facts, "bigram": bigram.loss(self.test_tokens.tolist())}

    def cells(self) -> list[Cell]:
        kinds = [(MEAN, NORMALISED, APART)]
        kinds += [(kernel, weights, APART) for weights in (NORMALISED, PLAIN) for kernel in self.trained]
        presets = {kernel: NORMALISED if spec_of(kernel).normalise else PLAIN for kernel in self.trained}
        kinds += [(kernel, weights, SHARED) for kernel, weights in presets.items()]
        kinds += [(kernel, weights, EARLIER) for kernel, weights in presets.items() if kernel in self.earlier]
        return [{**dict(zip(FORM, kind, strict=True)), "rate": rate} for kind in kinds for rate in self.rates]

    def seeds_of(self, cell: Cell) -> int:
        close = cell["model"] in CLOSE and cell["weights"] == NORMALISED and cell["query_key"] == APART
        return max(self.seeds, self.close_seeds) if close else self.seeds

    def measure_model(self, model: Any) -> dict[str, Any]:
        return super().measure_model(model) | memory_bytes(model, self.batch, self.context)

    def fields(self, cell: Cell) -> dict[str, Any]:
        """Return those of a GPT-2 with rotary positions that attends in this way."""
        return {
            "intermediate_size": 4 * self.width, "feed_forward": "gelu", "norm": "layer",
            "mixers": spec_of(cell["model"], cell["weights"]), "output_norm": cell["weights"] == PLAIN,
            "share_query_key": cell["query_key"] != APART, "exclude_self": cell["query_key"] == EARLIER,
        }  # fmt: skip

    def claims(self, results: Results) -> list[Claim]:
        runs, bigram = self.chosen(results), results.facts["bigram"]
        falls = falling(self.chosen(results, "look")).drop(MEAN, level="model")
        apart, shared = (falls.xs(query_key, level="query_key") for query_key in (APART, SHARED))
        steady = f"training loss lower at the end than at first, and never up by more than {RISE:g} nats between looks"
        cell = lambda kernel, weights=NORMALISED: select(runs, model=kernel, weights=weights, query_key=APART)  # noqa: E731
        linear, clipped = cell("linear", PLAIN), apart.get(("clipped-geometric", NORMALISED))
        less = {"equal weights": paired(linear, select(runs, model=MEAN), "test"),
                "bigram": mean_interval(linear["test"] - bigram)}  # fmt: skip
        ratio = query_key_ratio(select(runs, query_key=SHARED, model="exponential"), cell("exponential"))
        nats = "Nats per character of the test text"
        rows: list[Any] = [
            ("All tested kernels converge", exact(float(apart.mean())), "at least", 1,
             f"Share of {len(apart)} forms, normalised and not: {steady}."),
            ("The linear kernel suffices without normalisation", less, "below", 0,
             f"{nats}, less equal weights' and a bigram model's."),
            ("RBF is marginally better than the exponential kernel",
             paired(cell("rbf"), cell("exponential"), "test"), "below", 0,
             f"{nats}, RBF less exponential; marginal is taken as {MARGINAL:g}.", {"effect": MARGINAL}),
            ("The clipped geometric series converges with normalised weights",
             {} if clipped is None else exact(float(clipped)), "at least", 1, f"1 if {steady}."),
            ("Models converge with q = k", exact(float(shared.mean())), "at least", 1,
             f"Share of {len(shared)} kernels: {steady}."),
            ("q = k halves the memory of queries and keys", ratio, "at most", 0.5,
             "Bytes of queries and keys in a training step, q = k over apart. The cache never holds queries."),
        ]  # fmt: skip
        return claims_of(PAPER, [("section 7", *each) for each in rows])

    def tables(self, results: Results) -> dict[str, Any]:
        runs, falls = self.chosen(results), falling(self.chosen(results, "look"))
        base = select(runs, model="exponential", weights=NORMALISED, query_key=APART)
        costs = gap("test", select(runs, query_key=APART), 4, same=["model", "weights"])
        sharing = {"costs, nats/char": costs, **memory_columns("{:,.0f} KiB")}
        shared = select(runs, query_key=[SHARED, EARLIER])
        shared = shared.sort_values("model", kind="stable", key=lambda column: column.map(KERNELS.index))
        close = select(runs, model=list(CLOSE), weights=NORMALISED, query_key=APART)["seed"].nunique()
        more = f", {close} of normalised {' and '.join(CLOSE)}" if close > self.seeds else ""
        both = f"{self.seeds} seeds{more}: mean ± standard deviation; gaps paired by seed, ± half the 95 % interval."
        against = f"Costs: against q and k apart. Cache: after {CACHED} tokens of one sequence."
        both_keys = {"model": "kernel", "query_key": "query and key"}
        return {
            "Kernels": pivot(select(runs, query_key=APART), {"model": "kernel", "weights": "weights"}, {
                "rate": "{rate:g}", "test nats/char": spread("test", 4),
                "above exponential": gap("test", base, 4), "training": spread("train", 4),
                "falls steadily": lambda rows: "yes" if falls[tuple(rows[list(FORM)].iloc[0])] else "no",
                "CPU, a step": stat("step_cpu_seconds", "median", "{:.1f} ms", 1e3),
            }, note=both),
            "One vector for query and key": pivot(shared, both_keys, sharing, note=against),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        looks, runs = self.chosen(results, "look"), self.chosen(results)
        kernels, mean = looks[looks["model"] != MEAN], select(looks, model=MEAN)
        panels = {f"weights {weights}": select(kernels, weights=weights, query_key=APART)
                  for weights in (NORMALISED, PLAIN)} | {"q = k": select(kernels, query_key=SHARED)}  # fmt: skip
        panels = {title: stacked([rows, mean]) for title, rows in panels.items()}
        kind = runs["weights"].where(runs["query_key"] == APART, runs["query_key"])
        y = {"train": "training loss, nats/char", "held_out": "validation loss, nats/char"}
        return {
            "curves": lines(panels, "step", y, "model", x_label="optimiser step"),
            "final": dots(runs.assign(kind=kind), "test", "model", "kind", x_label="test nats per character"),
        }

    def notes(self, results: Results) -> list[str]:
        runs, bigram = self.chosen(results, query_key=APART), results.facts["bigram"]
        mean = select(runs, model=MEAN)["test"].mean()
        means = runs[runs["model"] != MEAN].groupby(["model", "weights"])["test"].mean()
        return [
            f"A bigram model has {bigram:.4f} nats per character, equal weights on the whole past {mean:.4f}. Of "
            f"{len(means)} forms {(means < bigram).sum()} are below the bigram model, {(means < mean).sum()} below "
            f"equal weights.",
            "An RMS norm of every head's output follows weights that are not normalised.",
            "With q = k a token is most similar to itself; 'earlier tokens only' hides it.",
        ]


def falling(looks: Frame) -> Any:
    """Return for each model, by its columns `FORM`, whether the training loss falls steadily in every seed."""

    def steady(train: Any) -> bool:
        return train.notna().all() and train.iloc[-1] <= train.iloc[0] and not (train.diff() > RISE).any()

    runs = looks.astype({"train": float}).sort_values("step").groupby([*FORM, "seed"], sort=False)["train"]
    return runs.agg(steady).groupby(level=list(FORM), sort=False).all()
