"""Checks of a checkpoint against the run that continues from it, before anything of the run changes.

The seal detects damage; the contents are checked here. A missing tensor would start at random values, and a fused
optimiser writes out of bounds if its moments have another shape than their parameter.
"""

import random
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import safe_globals

from ..errors import expect, one_error
from ..fields import read_mapping
from ..muon import MuonAdamW
from .checkpoints import step_of
from .saved_model import load_weights

_SCHEDULED = ("lr", "initial_lr")
"""Settings of a parameter group that the schedule changes."""


def check_checkpoint(folder: Path, trainer: Trainer, *, call: str) -> None:
    """Check that a trainer can continue from a checkpoint; the `ArgumentError` of what does not fit names the file."""
    where = f"{call}: cannot continue from {folder}"
    saved = load_weights(folder, call=call)
    with one_error(f"{where}: model.safetensors"):
        _check_weights(saved, trainer.model)
    trainer.create_optimizer_and_scheduler(trainer.args.max_steps)
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    assert optimizer is not None
    assert scheduler is not None
    named = trainer.model.named_parameters()
    unchanged = {id(ours) for name, ours in named if name in saved and torch.equal(saved[name], ours.detach().cpu())}
    with one_error(f"{where}: optimizer.pt"):
        _check_optimizer(_load(folder / "optimizer.pt"), optimizer, unchanged, step_of(folder))
    with one_error(f"{where}: scheduler.pt"):
        _check_scheduler(_load(folder / "scheduler.pt"), scheduler.state_dict(), step_of(folder))
    for path in sorted(folder.glob("rng_state*.pth")):
        with one_error(f"{where}: {path.name}"):
            _check_generators(_load(path))
    with one_error(f"{where}: trainer_state.json"):
        _check_state(read_mapping(folder / "trainer_state.json", call=call), trainer, step_of(folder))


def put_weights(model: nn.Module, folder: Path, *, call: str) -> None:
    """Copy the weights of a checkpoint into a model; raise `ArgumentError` if they cannot be read or do not fit."""
    saved = load_weights(folder, call=call)
    with one_error(f"{call}: cannot continue from {folder}: model.safetensors"):
        _check_weights(saved, model)
    model.load_state_dict(saved, strict=False)  # tied tensors are saved once


def _load(path: Path) -> Any:
    """Return the plain data and tensors that torch saved in a file."""
    try:
        with safe_globals():  # numpy arrays, in the states of generators
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's message is a page long
        raise ValueError(f"cannot be read ({type(error).__name__})") from None


def _check_weights(saved: dict[str, Tensor], model: nn.Module) -> None:
    """Check that these are all of the model's tensors, with their shapes and dtypes, and finite."""
    ours = model.state_dict()
    for name, tensor in saved.items():
        expect(name in ours, f"{name} is not a tensor of the model")
        same = (tensor.shape, tensor.dtype) == (ours[name].shape, ours[name].dtype)
        expect(same, f"{name} is {_kind(tensor)}, expected {_kind(ours[name])}")
        expect(not tensor.is_floating_point() or bool(tensor.isfinite().all()), f"{name} is not finite")
    saved_pointers = {ours[name].data_ptr() for name in saved}  # tied tensors are saved once
    missing = [name for name, tensor in ours.items() if name not in saved and tensor.data_ptr() not in saved_pointers]
    expect(not missing, f"{missing[:1]} is missing")


def _check_optimizer(saved: Any, optimizer: torch.optim.Optimizer, unchanged: set[int], step: int) -> None:
    """Check the state of AdamW, or Muon with AdamW, after `step` steps; `unchanged` parameters (ids) may have none."""
    fresh = optimizer.state_dict()
    expect(isinstance(saved, dict) and saved.keys() == fresh.keys(), f"expected {' and '.join(fresh)}")
    if isinstance(optimizer, MuonAdamW):
        parts, count = saved["parts"], len(optimizer.parts)
        expect(isinstance(parts, list) and len(parts) == count, f"expected the states of {count} optimisers")
        for part, state in zip(optimizer.parts, parts, strict=True):
            _check_optimizer(state, part, unchanged, step)
        return
    groups, states = saved["param_groups"], saved["state"]
    expect(isinstance(groups, list) and isinstance(states, dict), "param_groups or state has the wrong type")
    expect(len(groups) == len(fresh["param_groups"]), f"has {len(groups)} groups of parameters")
    for group, expected in zip(groups, fresh["param_groups"], strict=True):
        _check_group(group, expected)
    numbers = [number for group in fresh["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    expect(not set(states) - set(numbers), "has the state of a parameter that the model does not have")
    muon = isinstance(optimizer, torch.optim.Muon)
    names = ("momentum_buffer",) if muon else ("step", "exp_avg", "exp_avg_sq")
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in states:
            _check_moments(states[number], names, parameter, f"of parameter {number}", step)
        else:
            expect(id(parameter) in unchanged, f"has no state of parameter {number}")


def _check_group(group: Any, expected: dict[str, Any]) -> None:
    """Check that a group has the settings of the run and a learning rate within its schedule."""
    expect(isinstance(group, dict) and group.keys() >= {"params", "lr"}, "a group of parameters is incomplete")
    for name, value in group.items():
        expect(name in expected, f"{name!r} is not a setting of the optimiser")
        if name not in _SCHEDULED:
            same = _plain(value) == _plain(expected[name])
            expect(same, f"{name} is {value!r}, the run has {expected[name]!r}")
    most = max(expected["lr"], expected.get("initial_lr", 0.0))
    for name in _SCHEDULED:
        rate = group.get(name, 0.0)
        fits = isinstance(rate, float) and 0 <= rate <= most
        expect(fits, f"{name} is {rate!r}, expected a number from 0 to {most}")


def _check_moments(state: Any, names: tuple[str, ...], parameter: Tensor, where: str, step: int) -> None:
    """Check that a state has these tensors alone: moments like the parameter, finite, and a number of steps."""
    expect(isinstance(state, dict) and state.keys() == set(names), f"the state {where} is incomplete")
    for name, moment in state.items():
        expect(type(moment) is Tensor and moment.layout == torch.strided, f"{name} {where} is not a tensor")
        like = torch.empty((), dtype=torch.float32) if name == "step" else parameter
        same = (moment.shape, moment.dtype, moment.stride()) == (like.shape, like.dtype, like.stride())
        expect(same, f"{name} {where} is {_kind(moment)}, expected {_kind(like)}")
        if name == "step":
            expect(moment.item() in range(1, step + 1), f"step {where} is {moment.item()}, expected 1 to {step}")
        expect(bool(moment.isfinite().all()), f"{name} {where} is not finite")
        expect(name != "exp_avg_sq" or not moment.lt(0).any(), f"{name} {where} is negative")


def _check_scheduler(saved: Any, fresh: dict[str, Any], step: int) -> None:
    """Check the state of this schedule after `step` steps."""
    expect(isinstance(saved, dict) and saved.keys() == fresh.keys(), f"expected {', '.join(sorted(fresh))}")
    for name, expected in {**fresh, "last_epoch": step, "_step_count": step + 1}.items():
        if name == "_last_lr":
            rates, most = saved[name], max(fresh["base_lrs"], default=0.0)
            fits = isinstance(rates, list) and len(rates) == len(fresh["base_lrs"])
            fits = fits and all(isinstance(rate, float) and 0 <= rate <= most for rate in rates)
            expect(fits, f"{name} is {rates!r}, expected learning rates from 0 to {most}")
        else:
            same = _plain(saved[name]) == _plain(expected)
            expect(same, f"{name} is {saved[name]!r}, expected {expected!r}")


def _check_generators(saved: Any) -> None:
    """Check the states of the random generators by loading them into unused generators."""
    expect(isinstance(saved, dict) and saved.keys() >= {"python", "numpy", "cpu"}, "expected python, numpy and cpu")
    random.Random().setstate(saved["python"])
    np.random.RandomState().set_state(saved["numpy"])
    position = saved["numpy"][2]  # which numpy does not check
    expect(isinstance(position, int) and 0 <= position <= 624, f"numpy's position is {position!r}")
    torch.Generator().set_state(saved["cpu"])


def _check_state(saved: dict[str, Any], trainer: Trainer, step: int) -> None:
    """Check the fields of Trainer's state, its step, and that it has the states of the callbacks."""
    plain = TrainerState()
    known = {field.name for field in fields(TrainerState)}
    for name, value in saved.items():
        expect(name in known, f"{name!r} is not a field of it")
        usual = 0 if name == "train_batch_size" else getattr(plain, name)
        kinds = (int, float) if isinstance(usual, int) else type(usual)
        expect(isinstance(value, kinds), f"{name} is {value!r}")
        expect(not isinstance(value, float) or isfinite(value), f"{name} is {value!r}")
    expect("train_batch_size" in saved, "train_batch_size is missing")
    states = saved.get("stateful_callbacks", {})
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        name = type(callback).__name__
        if isinstance(callback, ExportableState):
            expect(isinstance(states.get(name), dict), f"the state of {name} is missing")
    reached = saved.get("global_step")
    expect(_plain(reached) == _plain(step), f"global_step is {reached!r}, expected {step}")


def _plain(value: Any) -> Any:
    """Return the value with its type, so that 1, 1.0 and True differ (but lists and tuples do not)."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return type(value).__name__, value


def _kind(tensor: Tensor) -> str:
    """Return the shape, the dtype and any unusual strides as text."""
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{strides}"
