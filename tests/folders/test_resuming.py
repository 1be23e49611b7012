"""Checkpoints whose seal fits and whose contents do not: nothing of the run is touched."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import change_json, reseal
from safetensors.torch import load_file, save_file
from torch import Tensor


def spoil(run: Path, name: str, change: dict | Callable) -> None:
    """Change what lies in a file of the newest checkpoint, as `change_json` does, and seal it."""
    path = run / "checkpoint-4" / name
    if path.suffix == ".json":
        change_json(path, change)
    else:
        state = torch.load(path, weights_only=False)
        torch.save(change(state) or state, path)
    reseal(run)


def refused(run: Path, resumed: Callable) -> str:
    """The error of a resume, which must leave the run as it was."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    error = resumed().error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert error.startswith(f"regard train: error: cannot continue from {run / 'checkpoint-4'}: ")
    return error


def moment(change: Callable[[Tensor], object], name: str = "exp_avg") -> Callable[[dict], None]:
    """A change of a moment of the first parameter with two dimensions."""

    def spoil_it(state: dict) -> None:
        held = next(held for held in state["state"].values() if held["exp_avg"].dim() == 2)
        held[name] = change(held[name])

    return spoil_it


def group(**settings: object) -> Callable[[dict], None]:
    """A change of the first group of parameters."""
    return lambda state: state["param_groups"][0].update(settings)


OPTIMIZER = {
    "smaller": (moment(lambda m: m[:1].clone()), "expected ["),
    "larger": (moment(lambda m: torch.cat([m, m])), "expected ["),
    "flat": (moment(lambda m: m.flatten()), "expected ["),
    "one number for all": (moment(lambda m: m[:1, :1].expand_as(m)), "strides [0, 0], expected ["),
    "transposed": (moment(lambda m: m.t().contiguous().t()), "expected ["),
    "float64": (moment(Tensor.double), "float64, expected ["),
    "integer": (moment(Tensor.long), "int64, expected ["),
    "sparse": (moment(Tensor.to_sparse), "exp_avg of parameter"),
    "a number": (moment(lambda m: 0.5), "exp_avg of parameter"),
    "nothing": (moment(lambda m: None, "exp_avg_sq"), "exp_avg_sq of parameter"),
    "nan": (moment(lambda m: m * torch.nan), "is not finite"),
    "negative": (moment(lambda m: m - 1, "exp_avg_sq"), "exp_avg_sq of parameter 0 is negative"),
    "step nan": (moment(lambda m: m * torch.nan, "step"), "is nan, expected 1 to 4"),
    "step too late": (moment(lambda m: m + 1, "step"), "is 5.0, expected 1 to 4"),
    "step of a vector": (moment(lambda m: m.expand(9), "step"), "step of parameter"),
    "no state at all": (lambda s: s["state"].clear(), "has no state of parameter 0"),
    "one without": (lambda s: s["state"].__delitem__(1), "has no state of parameter 1"),
    "one too many": (lambda s: s["state"].update({999: s["state"][0]}), "a parameter that the model does not have"),
    "no moments": (lambda s: s["state"][0].clear(), "the state of parameter 0 is incomplete"),
    "another key": (lambda s: s["state"][0].update(max_exp_avg_sq=torch.zeros(1)), "is incomplete"),
    "rate nan": (group(lr=float("nan")), "lr is nan, expected a number from 0 to"),
    "rate inf": (group(lr=float("inf")), "lr is inf, expected a number from 0 to"),
    "rate negative": (group(lr=-1e-3), "lr is -0.001, expected"),
    "rate a text": (group(lr="fast"), "lr is 'fast', expected"),
    "rate a tensor": (group(lr=torch.tensor(1e-3)), "lr is tensor("),
    "betas": (group(betas=(0.9, 2.0)), "betas is (0.9, 2.0), the run has (0.9, 0.95)"),
    "eps": (group(eps=float("nan")), "eps is nan, the run has 1e-08"),
    "decay": (group(weight_decay=-5), "weight_decay is -5, the run has 0.1"),
    "unknown setting": (group(wild=True), "'wild' is not a setting of the optimiser"),
    "parameters": (group(params=[0]), "params is [0], the run has"),
    "groups": (lambda s: s["param_groups"].__delitem__(1), "has 1 groups of parameters"),
    "a list": (lambda s: [1, 2], "expected state and param_groups"),
}


SCHEDULER = {
    "no rates": (lambda s: s.__delitem__("base_lrs"), "expected _"),
    "more keys": (lambda s: s.update(optimizer=1), "expected _"),
    "other rates": (lambda s: s.update(base_lrs=[1.0, 1.0]), "base_lrs is [1.0, 1.0], expected [0.001, 0.001]"),
    "rate nan": (lambda s: s.update(base_lrs=[float("nan")] * 2), "base_lrs is [nan, nan]"),
    "last rate": (lambda s: s.update(_last_lr=[1e30, 1e30]), "_last_lr is [1e+30, 1e+30]"),
    "later": (lambda s: s.update(last_epoch=10**12), "last_epoch is 1000000000000, expected 4"),
    "step": (lambda s: s.update(_step_count=True), "_step_count is True, expected 5"),
    "functions": (lambda s: s.update(lr_lambdas=[{}] * 9), "lr_lambdas is ["),
    "a list": (lambda s: [1], "expected _"),
}


def beyond(state: dict) -> None:
    """numpy would read past the end of its table."""
    name, table, _, *rest = state["numpy"]
    state["numpy"] = (name, table, 10**6, *rest)


GENERATORS = {
    "a position outside": (beyond, "numpy's position is 1000000"),
    "torch, too short": (lambda s: s.update(cpu=s["cpu"][:9]), "rng_state.pth: "),
    "torch, zeros": (lambda s: s.update(cpu=torch.full_like(s["cpu"], 255)), "rng_state.pth: "),
    "torch, a number": (lambda s: s.update(cpu=3), "rng_state.pth: "),
    "python": (lambda s: s.update(python=(3, (1, 2), None)), "rng_state.pth: "),
    "numpy": (lambda s: s.update(numpy=("MT19937", np.zeros(3, np.uint32), 0, 0, 0.0)), "rng_state.pth: "),
    "missing": (lambda s: s.__delitem__("numpy"), "expected python, numpy and cpu"),
}


RECORD: dict[str, tuple[dict, str]] = {
    "step 3": ({"global_step": 3}, "global_step is 3, expected 4"),
    "step a text": ({"global_step": "4"}, "global_step is '4'"),
    "step true": ({"global_step": True}, "global_step is True"),
    "unknown": ({"colour": 1}, "'colour' is not a field of it"),
    "history": ({"log_history": 7}, "log_history is 7"),
    "epoch": ({"epoch": float("nan")}, "epoch is nan"),
    "steps": ({"max_steps": [1]}, "max_steps is [1]"),
    "batch a table": ({"train_batch_size": {}}, "train_batch_size is {}"),
    "no batch": ({"train_batch_size": None}, "train_batch_size is None"),
    "no callback": ({"stateful_callbacks": {}}, "the state of SinceLog is missing"),
    "control": ({"stateful_callbacks": {"SinceLog": {}, "TrainerControl": 1}}, "the state of TrainerControl"),
    "best": ({"best_model_checkpoint": ["x"]}, "best_model_checkpoint is ['x']"),
}
STATES = {
    **{("optimizer.pt", which): case for which, case in OPTIMIZER.items()},
    **{("scheduler.pt", which): case for which, case in SCHEDULER.items()},
    **{("rng_state.pth", which): case for which, case in GENERATORS.items()},
    **{("trainer_state.json", which): case for which, case in RECORD.items()},
}
QUICK = {"smaller", "one number for all", "no state at all", "rate nan", "betas", "other rates", "later", "python"}
QUICK |= {"a position outside", *RECORD}


@pytest.mark.parametrize(
    ("file", "which"), [pytest.param(*key, marks=() if key[1] in QUICK else pytest.mark.slow) for key in STATES]
)
def test_states_that_do_not_fit(run_folder: Path, resumed: Callable, file: str, which: str) -> None:
    change, reason = STATES[file, which]
    spoil(run_folder, file, change)
    error = refused(run_folder, resumed)
    assert f"{file}: " in error
    assert reason in error


@pytest.mark.parametrize("kept", [{}, {"loss": -1.0, "step": 4}, {"loss": 1.0, "step": 5}, {"loss": "x", "step": 1}])
def test_the_loss_since_the_last_log(run_folder: Path, resumed: Callable, kept: dict) -> None:
    state = {"SinceLog": {"args": {}, "attributes": kept}}
    spoil(run_folder, "trainer_state.json", lambda table: table["stateful_callbacks"].update(state))
    assert "holds a damaged SinceLog" in resumed().error


def test_weights_that_do_not_fit(run_folder: Path, resumed: Callable) -> None:
    path = run_folder / "checkpoint-4" / "model.safetensors"
    sound = load_file(path)
    name = next(name for name in sound if sound[name].dim() == 2 and "layers" in name)
    for tensors, reason in (
        ({key: value for key, value in sound.items() if key != name}, f"['{name}'] is missing"),
        ({**sound, "stowaway": torch.zeros(1)}, "stowaway is not a tensor of the model"),
        ({**sound, name: sound[name][:-1].clone()}, f"{name} is ["),
        ({**sound, name: sound[name].double()}, "float64, expected ["),
        ({**sound, name: sound[name] * torch.nan}, f"{name} is not finite"),
    ):
        save_file(tensors, path, metadata={"format": "pt"})
        reseal(run_folder)
        error = refused(run_folder, resumed)
        assert "checkpoint-4: model.safetensors: " in error
        assert reason in error


def test_a_sound_checkpoint_sealed_again_goes_on(run_folder: Path, resumed: Callable) -> None:
    spoil(run_folder, "optimizer.pt", lambda state: None)
    assert resumed().code == 0
    assert json.loads((run_folder / "summary.json").read_text())["step"] == 6
