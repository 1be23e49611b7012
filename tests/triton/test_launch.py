"""Launches call what Triton compiled directly: always what Triton itself would take, for tensors and numbers of every
kind, on a device that is not there."""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_compiled import pretended
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from regard.triton.runtime import launch as launching
from regard.triton.runtime.launch import launch
from regard.triton.runtime.operators import operator, plain
from regard.triton.runtime.support import MISSING, interpreted
from regard.triton.runtime.tiles import Tiles

if MISSING is not None:
    pytest.skip(MISSING, allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import JITFunction
from triton.runtime.driver import driver

pytestmark = pytest.mark.skipif(interpreted(), reason="nothing is compiled under TRITON_INTERPRET=1")

GRID, TILES = (3, 2), Tiles(warps=1)


@triton.jit(do_not_specialize=["free"])
def copy(pair, out, n, free, factor, other, WIDE: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, WIDE)
    x = tl.load(pair[0] + at) * factor + pair[1] + free
    if other is not None:
        x += tl.load(other + at)
    tl.store(out + at, x)


class Device:
    """A driver that records launches and starts nothing."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.number = 90

    def launcher(self, source: Any, metadata: Any) -> Any:
        return lambda *given: self.started.append(given)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found, numbers = Device(), count()
    monkeypatch.setattr(launching, "_MADE", {})
    with pretended(90):
        driver.active.launcher_cls = found.launcher
        driver.active.get_current_device = lambda: found.number
        driver.active.get_current_stream = lambda number: 1000 + number
        driver.active.utils = SimpleNamespace(
            get_device_properties=lambda number: {"max_shared_mem": 232448},
            load_binary=lambda *given: ("module", next(numbers), 32, 0, 1024),
        )
        yield found
    copy.device_caches.clear()


X, OUT = torch.zeros(256), torch.zeros(256)
PLAIN: dict[str, Any] = {
    "pair": (X, 32), "out": OUT, "n": 32, "free": 7, "factor": 0.5, "other": None, "WIDE": 16,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "all pointers and numbers are multiples of 16": {},
    "another tensor of the kind": {"pair": (torch.zeros(64), 32)},
    "a pointer that is none": {"out": OUT[1:]},
    "a pointer that is none, in a tuple": {"pair": (X[3:], 32)},
    "another dtype": {"out": OUT.bfloat16()},
    "another dtype in a tuple": {"pair": (X.bfloat16(), 32)},
    "a number that is none": {"n": 33},
    "a number that is none, in a tuple": {"pair": (X, 5)},
    "one": {"n": 1},
    "one in a tuple": {"pair": (X, 1)},
    "a wide number": {"n": 2**40},
    "a number without kinds": {"free": 1},
    "a wide number without kinds": {"free": 2**33},
    "another float": {"factor": 1.0},
    "a whole factor": {"factor": 16},
    "a tensor for None": {"other": X},
    "another constant": {"WIDE": 32},
}


def arguments(change: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    found = {**PLAIN, **change}
    return [found[name] for name in list(PLAIN)[:-1]], {"WIDE": found["WIDE"]}


def by_regard(device: Device, change: dict[str, Any], tiles: Tiles = TILES) -> tuple[Any, ...]:
    args, constants = arguments(change)
    launch(copy, GRID, *args, tiles=tiles, **constants)
    return device.started.pop()


def by_triton(device: Device, change: dict[str, Any], tiles: Tiles = TILES) -> tuple[Any, ...]:
    args, constants = arguments(change)
    copy[GRID](*args, **constants, num_warps=tiles.warps, num_stages=tiles.stages)
    return device.started.pop()


def same(one: Any, other: Any) -> bool:
    """Whether two launches are the same, but for what hooks would get."""
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (not isinstance(one, torch.Tensor) and one == other)


def as_triton(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """Grid, stream, function and its metadata are the first six, then come three for hooks, then the arguments."""
    return same(found[:6], expected[:6]) and same(found[9:], expected[9:])


def test_every_kind_of_argument_starts_what_triton_would(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in CHANGES.values():
        assert as_triton(by_regard(device, change), by_triton(device, change))
    expected = {name: by_triton(device, change) for name, change in CHANGES.items()}
    assert len({found[4] for found in expected.values()}) > 10
    monkeypatch.setattr(JITFunction, "run", None)  # from now on Triton launches nothing
    for name, change in [*CHANGES.items(), *reversed(CHANGES.items())]:
        assert as_triton(by_regard(device, change), expected[name]), name


def test_options_and_devices_have_kernels_of_their_own(device: Device) -> None:
    kernels = set()
    for number, tiles in ((90, TILES), (90, Tiles(warps=2)), (91, TILES)):
        device.number = number
        first, second, expected = (call(device, {}, tiles) for call in (by_regard, by_regard, by_triton))
        assert first[4] == second[4] == expected[4]
        assert first[3] == 1000 + number
        kernels.add(first[4])
    assert len(kernels) == 3


def test_grids_are_completed_and_empty_ones_start_nothing(device: Device) -> None:
    args, constants = arguments({})
    for _ in range(2):
        for grid, whole in (((5,), (5, 1, 1)), ((5, 4), (5, 4, 1)), ((5, 4, 3), (5, 4, 3))):
            launch(copy, grid, *args, tiles=TILES, **constants)
            assert device.started.pop()[:3] == whole
        launch(copy, (0, 4), *args, tiles=TILES, **constants)
        assert not device.started


def test_hooks_are_called_for_every_launch(device: Device) -> None:
    by_regard(device, {})
    entered: list[Any] = []
    knobs.runtime.launch_enter_hook.add(entered.append)
    try:
        found = by_regard(device, {})
    finally:
        knobs.runtime.launch_enter_hook.remove(entered.append)
    assert found[6].get()["name"] == "copy"  # what Triton tells the hooks, which its own launcher calls
    assert by_regard(device, {})[6] is None


def test_a_kernel_runs_on_the_device_of_its_tensors_wherever_they_stand() -> None:
    far = torch.empty(1, device="meta")
    for args in ((3, far), (((far, 1), 2), 3), ((1, 2), None, 0.5, (4, (far,)))):
        assert launching._device_of(args) == far.device
    assert launching._device_of((1, (None, 2.0))) is None


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_an_operator_is_left_out_where_nothing_records_the_call() -> None:
    got: list[tuple[Any, ...]] = []

    def run(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        got.append((*numbers, *map(type, numbers)))
        return x.clone()

    made = operator("tested", run, "(Tensor x, float a, SymInt b, bool c) -> Tensor", lambda x, *_: torch.empty_like(x))
    x, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    made(x, 2, 3, True)
    with Passing():  # the operator is called
        assert not plain((x,))
        made(x, 2, 3, True)
    assert got == [(2.0, 3, True, float, int, bool)] * 2
    assert plain((x, None, 1))
    assert not plain((x, leaf))
    assert not plain((torch.nn.Parameter(x),))
    with torch.no_grad():
        assert plain((x, leaf, torch.nn.Parameter(x)))
    with torch.autograd.forward_ad.dual_level():
        assert not plain((x,))
    assert torch.func.vmap(lambda y: y * plain((y,)))(x).tolist() == [0.0, 0.0, 0.0]
    assert torch.compile(lambda y: y * plain((y,)), backend="eager", fullgraph=True)(x).tolist() == [0.0, 0.0, 0.0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, by: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * by * (not plain((by,)))


def test_a_tensor_whose_memory_is_not_its_numbers_goes_through_the_operator() -> None:
    x = torch.ones(3, requires_grad=True)
    (batched,) = torch.autograd.grad(Doubled.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert batched.equal(2 * torch.eye(3))
    assert not plain((torch._neg_view(x.detach()),))
    assert not plain((torch.ones(3, dtype=torch.complex64).conj().imag,))
    traced = make_fx(lambda y: y * plain((y,)), pre_dispatch=True)(x.detach())
    assert traced(x.detach()).tolist() == [0.0, 0.0, 0.0]
