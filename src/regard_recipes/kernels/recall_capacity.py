"""How well each kernel recalls what was stored: against the number of pairs, noisy cues, partial cues, damage.

Keys and values are random unit vectors; a cue is a stored key, changed by the condition. All kernels see the same keys,
values, cues and damage. With clean cues the error is split as in equation 5 of the local-linear-attention paper.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.checks import require, suggestion
from regard.grammar import Spec, as_spec, presets_registry
from regard.memory.associative import AssociativeMemory
from regard.memory.associative.contents import trend_of
from regard.recurrent.linear import finite_features
from regard.recurrent.trends import trends

from ..lib.claims import Claim, claims_of, paired
from ..lib.display import heat, only, pivot, spread, stat
from ..lib.recipe import Cell, Frame, Recipe, Results, select, significant

PAIRWISE = 2**24  # numbers that a read of a local linear model may build at once: one for every pair and channel
ENOUGH = 0.99  # share of exact matches that counts as recalled
PAIRS, SUMS, STATE = "pairs", "sums", "state"
PANELS = {
    "pairs": "stored pairs, clean cues", "noise": "length of cue noise", "erased": "coordinates of the cue erased",
    "zeroed": "damage: numbers zeroed", "jitter": "damage: noise",
}  # fmt: skip
WORDS = {"noise": "cue noise", "erased": "erased", "zeroed": "zeroed", "jitter": "state noise"}  # in the table


class RecallCapacity(Recipe, name="recall-capacity"):
    """Recall of every preset against stored pairs, noisy cues, partial cues and damage to what is stored."""

    specs: tuple[str, ...] = ()
    """Specs to measure, such as softmax 'triweight*anchored(margin=1)'. By default every preset."""
    models: tuple[str, ...] = ("mesa(ridge=0.01)", "mesa(ridge=1)", "delta")
    """Global linear models to measure beside them."""
    scales: tuple[float, ...] = (1.0, 5.0, 20.0, 75.0, 300.0)
    """Scales of the scores. The figure shows, for each kernel, the one with most exact matches in all conditions."""
    pairs: tuple[int, ...] = (16, 64, 256, 1024, 4096)  # Numbers of stored pairs, with clean cues.
    stored: int = 256  # Pairs stored in all other conditions.
    noise: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 4.0)
    """Cue noise: length of a random vector added to a unit key; the cue is then made a unit vector again."""
    erased: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875, 0.9375)
    """Fractions of a cue's coordinates that are set to zero."""
    zeroed: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9)
    """Damage: fractions of the stored numbers that are set to zero."""
    jitter: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Damage: standard deviation of noise on the stored numbers, in units of their root mean square."""
    cues: int = 64  # Cues per memory, of different pairs (all pairs where fewer are stored).
    dim: int = 64  # Channels of keys and values.
    seeds: int = 5  # Independent memories per condition.
    limits: ClassVar = {"scales": (1e-6, 1e6), "pairs": (1, 2**20), "noise": (0, 1e6), "jitter": (0, 1e6),
                        "erased": (0, 1), "zeroed": (0, 1)}  # fmt: skip
    by_size: ClassVar = {"quick": {"seeds": 2, "pairs": (16, 64, 256, 1024), "scales": (5.0, 75.0)}}
    no_paper_size = "The conditions are regard's own; no paper measures them."

    def check(self) -> None:
        call = self.call()
        for text in self.specs:
            as_spec(text, call, "--specs")
        for text in self.models:
            unknown = f"--models: unknown model {text!r}.{suggestion(text, trends.names())}"
            require(trend_of(text, call, "--models") is not None, call, unknown)

    def cells(self) -> list[Cell]:
        groups: dict[Spec, list[str]] = {}
        for name in self.specs or presets_registry.names():
            groups.setdefault(Spec.parse(name), []).append(name)
        kernel_cells = [{"kernel": " = ".join(names), "store": store, "spec": "*".join(spec.parts())}
               for spec, names in groups.items()
               for store in ((PAIRS, SUMS) if finite_features(spec) else (PAIRS,))]  # fmt: skip
        return [*kernel_cells, *({"kernel": name, "store": STATE, "spec": ""} for name in self.models)]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        panels = ("zeroed", "jitter") if cell["store"] == SUMS else PANELS  # whole sums read as whole pairs do
        cases = [trial(self, panel, level, seed) for panel in panels for level in getattr(self, panel)]
        store, scales = (cell["kernel"], (None,)) if cell["store"] == STATE else (cell["store"], self.scales)
        for scale, case in product(scales, cases):
            measured = recall(Spec.parse(cell["spec"] or "linear"), store, scale, case)
            yield {"scale": scale or 1.0, "panel": case.panel, "level": case.level,
                   **{name: significant(x) for name, x in measured.items()}}  # fmt: skip

    @property
    def middle(self) -> dict[str, float]:
        """Return the level of each panel that tables show."""
        return {panel: getattr(self, panel)[len(getattr(self, panel)) // 2] for panel in PANELS}

    def claims(self, results: Results) -> list[Claim]:
        level = self.middle["zeroed"]
        rows = select(best(results), kernel="linear", panel="zeroed", level=level)
        sums, pairs = (select(rows, store=store) for store in (SUMS, PAIRS))
        wording = "A distributed memory withstands the loss of its parts better than stored examples"
        note = f"Share of exact matches of the linear kernel with {level:.0%} of all numbers zeroed, sums less pairs."
        claim_row = ("distributed memory", wording, paired(sums, pairs, "match"), "above", 0, note)
        return claims_of("Cooper, 1973", [claim_row], effect=0.05)

    def tables(self, results: Results) -> dict[str, Any]:
        chosen, middle, n = best(results), self.middle, self.middle["pairs"]
        matches = lambda panel, level: only(spread("percent", 0), panel=panel, level=level)  # noqa: E731
        by_scale, index = select(results.frame, store=PAIRS), ["kernel", "scale", "store"]
        return {
            "Exact matches in percent": pivot(chosen, index, {
                f"pairs at ≥ {ENOUGH:.0%}": only(self.recalled, panel="pairs"),
                f"{max(self.pairs)} pairs": matches("pairs", max(self.pairs)),
                **{f"{name} {middle[panel]:g}": matches(panel, middle[panel]) for panel, name in WORDS.items()},
            }, note=f"Percent; mean ± standard deviation over {self.seeds} seeds."),
            "Exact matches in percent by scale, over all conditions": pivot(
                by_scale, ["kernel"], {"match": stat("match", "mean", "{:.1f}", 100)}, columns="scale"),
            "Signal and interference": pivot(select(chosen, panel="pairs"), index, {
                f"signal bias, {n} pairs": only("{bias:.2g}", level=n),
                f"interference, {n} pairs": only("{interference:.2g}", level=n),
                **{f"1/SNR, {count} pairs": only("{inverse_snr:.2g}", level=count) for count in self.pairs},
            }, note="Means of squares relative to the values'. Signal bias: the weight of the cue's own value, less "
                    "one; interference: all others; 1/SNR: interference relative to what is left of the signal."),
        }  # fmt: skip

    def recalled(self, rows: Frame) -> str:
        """Return the largest number of pairs of which nearly all are recalled."""
        means = rows.groupby("level")["match"].mean()
        enough = means.index[means >= ENOUGH]
        return f"{max(enough):g}" if len(enough) else f"< {min(self.pairs)}"

    def figures(self, results: Results) -> dict[str, bytes]:
        shown = best(results)
        shown = shown.assign(row=shown["kernel"] + shown["scale"].map(", {:g}".format)
                             + shown["store"].map({PAIRS: "", SUMS: ", sums", STATE: ", state"}))  # fmt: skip
        panels = {title: select(shown, panel=panel) for panel, title in PANELS.items()}
        percent = lambda mean: f"{100 * mean:.0f}"  # noqa: E731
        small = lambda mean: "<.001" if mean < 1e-3 else f"{mean:.2g}" if mean < 100 else f"{mean:.0e}"  # noqa: E731
        return {
            "match": heat(panels, "row", "level", "match", percent, label="exact matches, percent"),
            "error": heat(panels, "row", "level", "error", small, label="relative squared error", log=(1e-3, 1e2)),
        }

    def notes(self, results: Results) -> list[str]:
        return [
            f"Random unit keys and values, D = {self.dim}; {self.seeds} memories per condition, up to {self.cues} cues "
            "each, of the pairs stored first. Exact match: the stored value nearest to what is retrieved is the right "
            "one. The scale of a kernel is the one with the most exact matches over all conditions; kernels that take "
            "none have keys and cues of that squared length.",
            f"Except in the first panel, {self.stored} pairs are stored. 'sums': damage to the sums that the kernel's "
            "pairs fold into. 'state': a global linear model, whose state is damaged.",
        ]


def best(results: Results) -> Frame:
    """Return the rows of each kernel at its best scale, that with the most exact matches over all conditions, then the
    smallest error: the best kernels first, pairs before sums before models. "percent" has the exact matches."""
    kept = results.select(store=[PAIRS, STATE])
    means = kept.groupby(["kernel", "scale", "panel", "level"])[["match", "error"]].mean()
    merit = means.groupby(["kernel", "scale"]).mean().round({"match": 4}).reset_index("scale")
    scales = merit.sort_values(["match", "error"], ascending=[False, True]).groupby("kernel")["scale"].first()
    rows = results.frame[results.frame["scale"] == results.frame["kernel"].map(scales)]
    store_order = rows["store"].map([PAIRS, SUMS, STATE].index)
    mean = rows.groupby(["kernel", "store"])["match"].transform("mean")
    rows = rows.assign(percent=100 * rows["match"], store_order=store_order, mean=-mean)
    return rows.sort_values(["store_order", "mean"], kind="stable")


class Trial(NamedTuple):
    """Keys, values and cues, unit vectors [1, 1, n, D], in one condition: a panel, its level, a seed of damage."""

    keys: Tensor
    values: Tensor
    cues: Tensor
    panel: str
    level: float
    seed: int


def trial(config: Any, panel: str, level: float, seed: int) -> Trial:
    """Return keys, values and cues of the sizes of a recipe, a function of (seed, number of pairs, condition)."""
    count = int(level) if panel == "pairs" else config.stored
    draw = torch.Generator().manual_seed(seed * 1_000_003 + count)
    keys, values = (normalize(torch.randn(1, 1, count, config.dim, generator=draw), dim=-1) for _ in range(2))
    cues = keys[:, :, : config.cues]
    if panel == "noise":
        cues = normalize(cues + level * normalize(torch.randn(cues.shape, generator=draw), dim=-1), dim=-1)
    elif panel == "erased":
        rank = torch.rand(cues.shape, generator=draw).argsort(-1).argsort(-1)
        cues = cues * (rank >= round(level * config.dim))
    return Trial(keys, values, cues, panel, float(level), seed + 1)


def retrieve(spec: Spec, store: str, scale: float | None, case: Trial, values: Tensor) -> Tensor:
    """Return what the cues retrieve after the damage, [1, 1, C, Dv], float64, from a memory that keeps the pairs as
    `store` says (of AssociativeMemory). A spec without a scale has keys and cues of that squared length instead."""
    length = 1.0 if scale is None or spec.takes_scale else scale**0.5
    memory = AssociativeMemory(spec, scale=scale if spec.takes_scale else None, store=store, impl="reference")
    memory.write(case.keys * length, values)
    draw = torch.Generator().manual_seed(case.seed)
    if case.panel == "zeroed":
        memory.transform(lambda t: t * (torch.rand(t.shape, generator=draw) >= case.level))
    elif case.panel == "jitter":
        memory.transform(lambda t: t + case.level * t.square().mean().sqrt() * torch.randn(t.shape, generator=draw))
    parts = (case.cues * length).split(max(1, PAIRWISE // case.keys.numel()), dim=2)
    return torch.cat([memory.read(part) for part in parts], 2).double()


def recall(spec: Spec, store: str, scale: float | None, case: Trial) -> dict[str, Tensor]:
    """Return relative squared error and exact-match rate, to which an empty result does not count; with clean cues also
    signal bias and interference, means of squares, and the inverse signal-to-noise ratio."""
    read, values = partial(retrieve, spec, store, scale, case), case.values.double()
    retrieved = read(case.values)
    count = retrieved.shape[2]
    targets = values[:, :, :count]
    nearest = (retrieved @ values.mT).argmax(-1)  # of unit vectors the nearest
    right = (nearest == torch.arange(count)) & (retrieved != 0).any(-1)
    measured = {"match": right.double().mean(), "error": (retrieved - targets).square().sum(-1).mean()}
    if case.panel != "pairs":
        return measured
    marks = torch.eye(case.keys.shape[2], count, dtype=case.values.dtype)[None, None]
    signal = read(marks).diagonal(dim1=-2, dim2=-1)[..., None] * targets  # weight of the cue's own value
    interference, power = (retrieved - signal).square().sum(-1), signal.square().sum()
    return {
        **measured, "bias": (signal - targets).square().sum(-1).mean(), "interference": interference.mean(),
        "inverse_snr": interference.sum() / power.clamp(min=torch.finfo(power.dtype).tiny),
    }  # fmt: skip
