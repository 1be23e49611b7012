"""Training local linear models: what is logged, what is shown once, and that the ridge is learned."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from regard.grammar import SolveStatus
from regard.pairwise.diagnostics import Diagnostics
from regard.training import row_means, train
from regard.training.quiet import unconverged_once


class Reporter(nn.Module):
    """A layer that tells its observer what it was given."""

    def __init__(self, **rows: Any) -> None:
        super().__init__()
        self.observer: Any = None
        self.observe_weights = False
        none = torch.zeros(1, 1, 2)
        given = dict.fromkeys(("tau", "bandwidth", "effective_sample_size", "empty", "fallback", "status"), none)
        self.told = Diagnostics(**{**given, **rows})


class Model(nn.Module):
    def __init__(self, *layers: Reporter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, use_cache: bool) -> None:
        for at, layer in enumerate(self.layers):
            layer.observer(at, layer.told)


def rows(*numbers: float) -> Tensor:
    return torch.tensor(numbers)[None, None]


def test_row_means_by_hand() -> None:
    plain = Reporter(support=rows(1, 2), density=rows(1, 0.5), negative_mass=rows(0, 0))
    solver = {
        "status": rows(0, SolveStatus.UNCONVERGED),
        "iterations": rows(3, 8),
        "residual": rows(0.25, 1e-3),
        "jitter": rows(0, 0),
    }
    local = Reporter(support=rows(1, 4), density=rows(1, 1), negative_mass=rows(0.5, 0.25), solver=solver)
    ids = torch.zeros(1, 2, dtype=torch.long)
    assert row_means(Model(plain), ids) == {"support": 1.5, "density": 0.75}
    assert row_means(Model(plain, local), ids) == {
        "support": 2.0,
        "density": 0.875,
        "negative_mass": 0.375,
        "solver_iterations": 5.5,
        "solver_residual": 0.25,
        "unconverged": 0.5,
    }
    assert row_means(Model(), ids) == {}


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_a_learned_ridge(tiny: Callable) -> None:
    log = io.StringIO()
    config = tiny(spec=("softmax", "local-linear[biweight]"), layers=2, ridge="learned(start=0.2)", qk_norm="rms")
    train(config, console=Console(file=log, width=200))
    lines = [line for line in metrics(config.out) if "loss" in line]
    assert len(lines) == 6
    for line in lines:
        assert 0 < line["density"] <= 1
        assert line["negative_mass"] > 0
        assert 0 <= line["solver_residual"] < 1e-2
        assert line["unconverged"] == 0
        assert line["solver_iterations"] >= 0
    shown = [line for line in log.getvalue().splitlines() if "held out" not in line]
    assert all("negative 0." in line and "solver steps" in line for line in shown)
    model = AutoModelForCausalLM.from_pretrained(config.out / "model")
    assert model.config.ridges == ["fixed", "learned(start=0.2)"]
    assert model.config.qk_norm == "rms"
    projection = model.model.layers[1].self_attn.ridge_proj
    assert projection.weight.abs().max() > 1e-4  # it began at 0


def test_without_local_linear_layers_there_is_no_solver_to_log(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=2)
    train(config, console=silent)
    first = metrics(config.out)[0]
    assert 0 < first["density"] <= 1
    assert not {"negative_mass", "solver_iterations", "solver_residual", "unconverged"} & set(first)


def test_systems_that_do_not_converge_are_shown_once(tiny: Callable) -> None:
    log = io.StringIO()
    config = tiny(spec=("gaussian*linear(ridge=0.0001,solver=cg(max_iter=1))",), heads=1, steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        train(config, console=Console(file=log, width=400))
    said = [line for line in log.getvalue().splitlines() if "systems did not converge" in line]
    assert len(said) == 1
    assert "Shown once" in said[0]
    assert "solver=cholesky" in said[0]
    assert all(line["unconverged"] > 0 for line in metrics(config.out) if "loss" in line)


def test_other_warnings_go_where_they_went() -> None:
    said: list[str] = []

    def run() -> None:
        with unconverged_once(said.append):
            warnings.warn("another", UserWarning, stacklevel=1)
            for _ in range(3):
                warnings.warn("x: some systems did not converge (y)", RuntimeWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="another") as caught:
        run()
    assert len(said) == 1
    assert [str(w.message) for w in caught] == ["another"]
    with pytest.warns(RuntimeWarning, match="did not converge"):  # as before, outside
        warnings.warn("x: some systems did not converge (y)", RuntimeWarning, stacklevel=1)
