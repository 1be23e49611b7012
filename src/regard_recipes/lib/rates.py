"""Learning rates that are chosen for each model, from runs of full length."""

from __future__ import annotations

from collections.abc import Sequence

from .recipe import Frame


def at_best_rate(rows: Frame, runs: Frame, per: Sequence[str]) -> Frame:
    """Return the rows at each model's best learning rate: that with the largest mean of `validation` over seeds.

    Args:
        rows: with the columns `per` and `rate`.
        runs: one row for each model, rate and seed, with a column `validation` besides.
        per: columns that name a model.
    """
    mean = runs.groupby([*per, "rate"], sort=False, dropna=False)["validation"].mean().reset_index()
    best = mean.loc[mean.groupby(list(per), sort=False, dropna=False)["validation"].idxmax(), [*per, "rate"]]
    key = [*per, "rate"]
    return rows[rows.set_index(key).index.isin(best.set_index(key).index)]
