"""Training local linear models: what is logged, what is shown once, and that the ridge is learned."""

import io
import warnings
from collections.abc import Callable

import pytest
from rich.console import Console
from steps import logged
from transformers import AutoModelForCausalLM

from regard.training import train
from regard.training.quiet import unconverged_once


def test_a_run_with_a_learned_ridge(tiny: Callable) -> None:
    log = io.StringIO()
    config = tiny(spec=("softmax", "local-linear[biweight]"), layers=2, ridge="learned(start=0.2)", qk_norm="rms")
    train(config, console=Console(file=log, width=200))
    lines = [line for line in logged(config.out) if "loss" in line]
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
    assert all(line["unconverged"] > 0 for line in logged(config.out) if "loss" in line)


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
