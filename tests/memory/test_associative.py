"""Writing, reading and forgetting, against dense formulas in numpy and linear algebra written from the definitions."""

import copy

import numpy as np
import pytest
import torch
from dense_fast_weights import numbers as drawn
from mistakes import error_of, refuses
from oracles import entmax_rows, softmax
from torch import Tensor

import regard
from regard import AssociativeMemory


def near(found: Tensor, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    assert found.shape == expected.shape
    assert np.abs(found.detach().numpy() - expected.astype(float)).max() <= tolerance


def features(x: np.ndarray, spec: str) -> np.ndarray:
    """phi of the kernel-selection paper's Table 1, the constant of the kernel as a last feature."""
    if spec == "linear":
        return x
    if spec in ("cosine", "shift-cosine"):
        unit = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-3)
        return unit if spec == "cosine" else np.concatenate([unit, np.ones_like(unit[..., :1])], -1)
    if spec == "elu":
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + 1
    own = np.maximum(x, 0) ** (2 if spec == "relu2" else 1)
    return np.concatenate([own, np.full_like(own[..., :1], 1e-2)], -1)  # eps = 1e-4 between two of them


def linear_read(q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: str) -> np.ndarray:
    w = features(q, spec) @ features(k, spec).swapaxes(-1, -2)
    w = w if spec in ("linear", "cosine") else w / w.sum(-1, keepdims=True)
    return w @ v


LINEAR = ("linear", "cosine", "shift-cosine", "relu", "relu2", "elu")


@pytest.mark.parametrize(("spec", "alpha"), [("sparsemax", 2.0), ("biweight", 1.5), ("gaussian*nearest(k=3)", 1)])
@pytest.mark.parametrize("axes", [(), (3,), (2, 3)])
def test_a_read_weighs_every_pair_written(spec: str, alpha: float, axes: tuple[int, ...]) -> None:
    k, v, q = drawn(*axes, 7, 5), drawn(*axes, 7, 4, seed=1), drawn(*axes, 2, 5, seed=2)
    memory = AssociativeMemory(spec, scale=1.3)
    memory.write(k[..., :3, :], v[..., :3, :])
    memory.write(k[..., 3:, :], v[..., 3:, :])
    z = 1.3 * (q @ k.transpose(-1, -2)).numpy()
    best = np.where(z < np.sort(z, -1)[..., -3:-2], -np.inf, z)
    weights = softmax(best) if alpha == 1 else entmax_rows(z, alpha)
    near(memory.read(q), weights @ v.numpy())
    near(memory(q), weights @ v.numpy())


@pytest.mark.parametrize("spec", LINEAR)
@pytest.mark.parametrize("store", ["pairs", "sums"])
def test_stores_of_linear_kernels(spec: str, store: str) -> None:
    k, v, q = drawn(2, 3, 8, 5), drawn(2, 3, 8, 4, seed=1), drawn(2, 3, 6, 5, seed=2)
    memory = AssociativeMemory(spec, store=store, scale=1.0 if spec == "linear" else None)
    for part in (slice(0, 1), slice(1, 6), slice(6, 8)):
        memory.write(k[:, :, part], v[:, :, part])
    near(memory.read(q), linear_read(q.numpy(), k.numpy(), v.numpy(), spec), 1e-11)
    if store == "sums":
        assert memory.forget(pairs=(k[:, :, 2:5], v[:, :, 2:5])) == 3
    else:
        assert memory.forget([2, 3, -4]) == 3
    left = [0, 1, 5, 6, 7]
    assert len(memory) == 5
    near(memory.read(q), linear_read(q.numpy(), k[:, :, left].numpy(), v[:, :, left].numpy(), spec), 1e-10)
    gone = {"pairs": (k[:, :, left], v[:, :, left])} if store == "sums" else {"oldest": 5}
    assert memory.forget(**gone) == 5
    assert not memory.read(q).any()  # no quotient of rounding errors


def test_sums_do_not_grow_and_pairs_do() -> None:
    pairs, sums = AssociativeMemory("elu"), AssociativeMemory("elu", store="sums")
    sizes = []
    for _ in range(3):
        for memory in (pairs, sums):
            memory.write(drawn(10, 4), drawn(10, 6))
        sizes.append((len(pairs), pairs.bytes, len(sums), sums.bytes))
    assert [s[0] for s in sizes] == [s[2] for s in sizes] == [10, 20, 30]
    assert [s[1] for s in sizes] == [n * (4 + 6) * 8 for n in (10, 20, 30)]
    assert len({s[3] for s in sizes}) == 1
    own = AssociativeMemory()
    own.write(drawn(10, 4))
    assert own.bytes == 10 * 4 * 8  # values that are the keys are held once


@pytest.mark.parametrize("store", ["pairs", "sums"])
@pytest.mark.parametrize("combine", ["shared", "separate"])
def test_long_term_memory(combine: str, store: str) -> None:
    """Equation 4: one sum over both memories, or one each and the reads added."""
    sizes = {"slots": 3, "heads": 2, "dim": 5, "value_dim": 4}
    memory = AssociativeMemory("relu", store=store, combine=combine, generator=torch.Generator(), **sizes).double()
    own, given = memory.slot_keys, memory.slot_values
    assert own.shape == (2, 3, 5)
    assert given.shape == (2, 3, 4)
    k, v, q = drawn(2, 2, 6, 5), drawn(2, 2, 6, 4, seed=1), drawn(2, 2, 7, 5, seed=2)
    slots = [np.broadcast_to(x.detach().numpy(), (2, *x.shape)) for x in (own, given)]
    alone = linear_read(q.numpy(), *slots, "relu")
    near(memory.read(q), alone)  # nothing written yet
    memory.write(k, v)
    short = linear_read(q.numpy(), k.numpy(), v.numpy(), "relu")
    both = [np.concatenate([a, b.numpy()], 2) for a, b in zip(slots, (k, v), strict=True)]
    expected = linear_read(q.numpy(), *both, "relu") if combine == "shared" else alone + short
    out = memory.read(q)
    near(out, expected)
    out.sum().backward()
    assert own.grad.abs().sum() > 0
    assert given.grad.abs().sum() > 0
    assert memory.forget(everything=True) == 6
    near(memory.read(q), alone)
    assert set(memory.state_dict()) == {"slot_keys", "slot_values"}


def test_steps_go_on_from_what_was_retrieved() -> None:
    k, q = drawn(12, 6), drawn(3, 6, seed=1)
    memory = AssociativeMemory("softmax", scale=4.0)
    memory.write(k)
    path = [q.numpy()]
    for _ in range(4):
        path.append(softmax(4.0 * path[-1] @ k.numpy().T) @ k.numpy())
    found = memory.read(q, steps=4, return_trajectory=True, return_energy=True, return_diagnostics=True)
    near(memory.read(q, steps=4), path[-1])
    near(found.values, path[-1])
    near(found.trajectory, np.stack(path))
    assert found.energy.shape == (5, 3)
    assert found.diagnostics[0].support.shape == (1, 1, 3)
    plain = memory.read(q, return_diagnostics=True)
    assert plain.trajectory is None
    assert plain.energy is None


def test_capacity_drops_the_oldest_and_says_how_many() -> None:
    k = drawn(7, 3)
    memory = AssociativeMemory("softmax", capacity=4)
    assert memory.write(k[:3]) == 0
    assert memory.write(k[3:5]) == 1
    assert memory.write(k[5:]) == 2
    assert len(memory) == 4
    assert torch.equal(memory.pairs()[0][0, 0], k[3:])
    assert memory.write(drawn(9, 3)) == 9
    strict = AssociativeMemory("softmax", capacity=4, overflow="error")
    strict.write(k[:3])
    refuses(r"2 pairs for 1 free places of 4; forget some first", strict.write, k[3:5])
    assert torch.equal(strict.pairs()[0][0, 0], k[:3])  # nothing was written


def test_forgetting() -> None:
    k = drawn(6, 3)
    memory = AssociativeMemory()
    memory.write(k)
    assert memory.forget(oldest=2) == 2
    assert memory.forget(torch.tensor([-1, 0])) == 2
    assert torch.equal(memory.pairs()[0][0, 0], k[3:5])
    assert memory.forget([]) == 0
    assert memory.forget(oldest=10) == 2
    assert len(memory) == 0
    assert torch.equal(memory.read(k), torch.zeros(6, 3, dtype=torch.float64))


def test_an_empty_memory_reads_zero_without_gradient() -> None:
    q = drawn(2, 3, 4, 5).requires_grad_()
    for memory in (AssociativeMemory("biweight"), AssociativeMemory("elu", store="sums")):
        out = memory.read(q)
        assert torch.equal(out, torch.zeros_like(out))
        assert out.shape == q.shape
    sized = AssociativeMemory(dim=5, value_dim=2)
    assert sized.read(q).shape == (2, 3, 4, 2)
    assert memory.read(q[:, :, :0]).shape == (2, 3, 0, 5)
    (grad,) = torch.autograd.grad(sized.read(q).sum(), q, allow_unused=True)
    assert grad is None or not grad.any()


@pytest.mark.parametrize("store", ["pairs", "sums"])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_nan_reaches_the_reads_that_see_it_and_no_others(store: str, part: str) -> None:
    k, v, q = drawn(2, 2, 4, 3), drawn(2, 2, 4, 3, seed=1), drawn(2, 2, 5, 3, seed=2)
    clean = AssociativeMemory("elu", store=store)
    clean.write(k, v)
    (k if part == "key" else v)[1, 0, 2, 1] = torch.nan
    memory = AssociativeMemory("elu", store=store)
    memory.write(k, v)
    out, expected = memory.read(q), clean.read(q)
    assert out[1, 0].isnan().all()
    out[1, 0] = expected[1, 0]
    assert torch.equal(out, expected)
    if store == "pairs":
        memory.forget([2])
        assert not memory.read(q).isnan().any()


@pytest.mark.parametrize("store", ["pairs", "sums"])
def test_masked_places_hold_nothing(store: str) -> None:
    k, v, q = drawn(2, 1, 4, 3), drawn(2, 1, 4, 3, seed=1), drawn(2, 1, 5, 3, seed=2)
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    memory = AssociativeMemory("elu", store=store)
    memory.write(k.masked_fill(~mask[:, None, :, None], torch.nan), v, mask=mask)
    memory.write(k[:, :, :1], v[:, :, :1])  # without a mask: taken
    for b in range(2):
        places = [*np.flatnonzero(mask[b].numpy()), 0]
        expected = linear_read(q[b].numpy(), k[b][:, places].numpy(), v[b][:, places].numpy(), "elu")
        near(memory.read(q)[b], expected)
    nobody = AssociativeMemory("elu", store=store)
    nobody.write(k, v, mask=torch.zeros(2, 4, dtype=torch.bool))
    assert torch.equal(nobody.read(q), torch.zeros_like(q))


@pytest.mark.parametrize(
    ("spec", "store"), [("softmax", "pairs"), ("biweight", "pairs"), ("elu", "sums"), ("linear", "mesa(ridge=0.3)")]
)
def test_gradients_pass_through_writing_and_reading(spec: str, store: str) -> None:
    def whole(k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        memory = AssociativeMemory(spec, store=store, impl="reference")
        memory.write(k[:2], v[:2])
        memory.write(k[2:], v[2:])
        if store == "pairs":
            memory.forget([1])
        return memory.read(q, steps=2)

    inputs = [drawn(4, 3, seed=s).requires_grad_() for s in range(3)]
    assert torch.autograd.gradcheck(whole, inputs)
    grads = torch.autograd.grad(whole(*inputs).square().sum(), inputs)
    assert all(g.abs().sum() > 0 for g in grads)
    if store == "pairs":
        assert not grads[0][1].any()  # what was forgotten has no part
        assert not grads[1][1].any()


def test_detach_cuts_what_was_written() -> None:
    k, q = drawn(4, 3).requires_grad_(), drawn(2, 3).requires_grad_()
    memory = AssociativeMemory()
    memory.write(k)
    assert memory.read(q.detach()).requires_grad
    assert not memory.detach().read(q.detach()).requires_grad
    copy.deepcopy(memory)  # as a module can


def test_one_memory_serves_a_batch() -> None:
    k, v, q = drawn(3, 6, 5), drawn(3, 6, 4, seed=1), drawn(2, 3, 7, 5, seed=2)
    for store in ("pairs", "sums"):
        memory = AssociativeMemory("elu", store=store)
        memory.write(k, v)
        near(memory.read(q), linear_read(q.numpy(), k[None].numpy(), v[None].numpy(), "elu"))


@pytest.mark.parametrize("store", ["pairs", "sums"])
def test_it_moves_and_changes_dtype_as_a_module_does(store: str) -> None:
    k, q = drawn(5, 4), drawn(3, 4, seed=1)
    memory = AssociativeMemory("elu", store=store)
    memory.write(k)
    exact = memory.read(q)
    for dtype in (torch.float32, torch.bfloat16):
        memory.to(dtype)
        out = memory.read(q.to(dtype))
        assert out.dtype == dtype
        assert torch.allclose(out.double(), exact, atol=1e-6 if dtype == torch.float32 else 3e-2)
    assert f"pairs={len(memory)}" in repr(memory)


@pytest.mark.parametrize("store", ["pairs", "sums"])
def test_transform_fades_what_was_written(store: str) -> None:
    k, q = drawn(5, 4), drawn(3, 4, seed=1)
    memory = AssociativeMemory("linear", store=store, scale=1.0)
    memory.write(k)
    memory.transform(lambda t: t / 2)
    share = 1 / 4 if store == "pairs" else 1 / 2  # keys and values, or the one sum over their products
    near(memory.read(q), share * (q @ k.T @ k).numpy())


def test_numbers_in_place_of_its_own() -> None:
    k, q = drawn(5, 4), drawn(3, 4, seed=1)
    memory = AssociativeMemory("biweight", scale=1.0, params={"alpha": 1.7})
    memory.write(k)
    near(memory.read(q), entmax_rows((q @ k.T).numpy(), 1.7) @ k.numpy(), 1e-10)
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    out = memory.read(q, scale=scale, params={})
    near(out, entmax_rows(scale.detach().numpy()[:, None] * (q @ k.T).numpy(), 1.5) @ k.numpy(), 1e-10)
    assert torch.autograd.grad(out.sum(), scale)[0].any()


DOUBLE = torch.zeros(1, 3).double()
MISTAKES = {
    "do not pair up": lambda memory: memory.write(torch.zeros(4, 3), torch.zeros(5, 3)),
    "write: keys: D is 4, expected 3, that of the memory.": lambda memory: memory.write(torch.zeros(4, 4)),
    "write: values: Dv is 2, expected 3, that of": lambda memory: memory.write(torch.zeros(4, 3), torch.zeros(4, 2)),
    "expected torch.float32, that of the memory; convert one with .to()": lambda memory: memory.read(DOUBLE),
    "mask has shape [4], expected [2, 4]": lambda memory: memory.write(torch.zeros(2, 1, 4, 3), mask=torch.ones(4) > 0),
    "AssociativeMemory.forget: got nothing; give one of indices, oldest, everything.": lambda memory: memory.forget(),
    "got indices, oldest; give one of": lambda memory: memory.forget([0], oldest=1),
    "pairs does not apply: stored pairs are selected by index": lambda memory: memory.forget(pairs=(DOUBLE, DOUBLE)),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named(words: str) -> None:
    memory = AssociativeMemory()
    memory.write(torch.zeros(5, 3))
    assert words in error_of(MISTAKES[words], memory)
    assert len(memory) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"store": "sums"}, "softmax has no finite features"),
        ({"store": "sums", "spec": "relu", "capacity": 3}, "sums do not store which pair is the oldest"),
        ({"store": "mesa"}, "the store mesa, a global linear model, needs spec='linear'"),
        ({"store": "mesa(ridge=0)", "spec": "linear"}, "mesa: ridge is 0, expected ridge > 0"),
        ({"store": "delta", "spec": "linear", "capacity": 3}, "sums do not store which pair is the oldest"),
        ({"store": "messa", "spec": "linear"}, "unknown store='messa'"),
        ({"slots": 2}, "slots need dim"),
        ({"value_dim": 2}, "value_dim needs dim"),
        ({"slots": 2, "dim": 3, "value_dim": 2, "tied": True}, "tied=True is for slots with value_dim equal to dim"),
        ({"spec": "geometric", "scale": 2.0}, "geometric takes no scale"),
    ],
)
def test_what_cannot_be_made(arguments: dict, words: str) -> None:
    assert words in error_of(AssociativeMemory, **arguments)


@pytest.mark.parametrize("spec", ["elu", "relu", "shift-cosine", "linear*fixed*normalised"])
def test_sums_of_masked_pairs_alone_read_zero(spec: str) -> None:
    """What is left of pairs that were subtracted must not be divided by what is left of their weights."""
    memory = AssociativeMemory(spec, store="sums")
    k, v = drawn(2, 1, 7, 3), drawn(2, 1, 7, 2, seed=1)
    mask = torch.tensor([True] * 6 + [False]).expand(2, 7).clone()
    mask[1, 6] = True  # the second sequence keeps a pair
    memory.write(k, v, mask=mask)
    for i in (3, 0, 5, 1, 4, 2):
        memory.forget(pairs=(k[:, :, i : i + 1], v[:, :, i : i + 1]))
    found = memory.read(drawn(2, 1, 4, 3, seed=2))
    assert len(memory) == 1
    assert found[0].abs().max() == 0
    assert torch.allclose(found[1], v[1, :, 6:].expand(1, 4, 2), atol=1e-6)


def test_what_sums_cannot_do() -> None:
    memory, model = AssociativeMemory("relu", store="sums"), AssociativeMemory("linear", store="delta")
    memory.write(torch.ones(2, 3))
    model.write(torch.ones(2, 3))
    for call, words in (
        (lambda: memory.forget([0]), "sums cannot tell one pair from another; use everything or pairs"),
        (lambda: memory.forget(pairs=(torch.ones(3, 3), torch.ones(3, 3))), "3 pairs were given and 2 are held"),
        (memory.pairs, "sums do not hold the pairs"),
        (lambda: memory.read(torch.ones(1, 3), return_diagnostics=True), "sums hold no weights"),
        (lambda: model.read(torch.ones(1, 3), scale=2.0), "takes no scale"),
        (lambda: model.forget(pairs=(torch.ones(2, 3), torch.ones(2, 3))), "pairs does not apply"),
    ):
        refuses(words, call)
    hetero = AssociativeMemory()
    hetero.write(torch.ones(2, 3), torch.ones(2, 4))
    refuses("keys have 3 channels and values 4", hetero.read, torch.ones(1, 3), steps=2)


def test_every_preset_is_a_memory() -> None:
    """Written in parts and read in one step: what `regard.attention` says of all pairs."""
    k, v, q = (drawn(1, 1, 9, 4, seed=s) for s in range(3))
    for name in regard.presets():
        memory = AssociativeMemory(name)
        memory.write(k[:, :, :4], v[:, :, :4])
        memory.write(k[:, :, 4:], v[:, :, 4:])
        assert torch.equal(memory.read(q), regard.attention(q, k, v, name)), name


def best(keys: Tensor, values: Tensor, ridge: float = 0.3) -> Tensor:
    """Ridge regression of the values on the keys, [..., D, Dv]."""
    eye = torch.eye(keys.shape[-1], dtype=keys.dtype)
    return torch.linalg.inv(keys.mT @ keys + ridge * eye) @ keys.mT @ values


def corrected(keys: Tensor, values: Tensor) -> Tensor:
    """The delta rule with full steps."""
    w = torch.zeros(*keys.shape[:2], keys.shape[3], values.shape[3], dtype=keys.dtype)
    for t in range(keys.shape[2]):
        key = keys[:, :, t, None]
        w = w + key.mT @ (values[:, :, t, None] - key @ w) / (key @ key.mT)
    return w


@pytest.mark.parametrize("store", ["mesa(ridge=0.3)", "delta"])
def test_it_reads_the_model(store: str) -> None:
    """Masked places hold nothing. Slots alone are read by the model too."""
    keys, values, queries = drawn(2, 3, 6, 5), drawn(2, 3, 6, 4, seed=1), drawn(2, 3, 7, 5, seed=2)
    kept, model = [0, 1, 3, 4, 5], corrected if store == "delta" else best
    w = model(keys[:, :, kept], values[:, :, kept])
    memory = AssociativeMemory("linear", store=store)
    corrupted, mask = keys.clone(), (torch.arange(6) != 2).expand(2, 6)
    corrupted[:, :, 2] = torch.nan
    corrupted.requires_grad_()
    memory.write(corrupted[:, :, :4], values[:, :, :4], mask=mask[:, :4])
    size = memory.bytes
    memory.write(keys[:, :, 4:], values[:, :, 4:])
    torch.testing.assert_close(memory.read(queries), queries @ w, rtol=1e-10, atol=1e-10)
    assert (len(memory), memory.bytes) == (6, size)
    memory.read(queries).sum().backward()
    assert corrupted.grad.isfinite().all()
    assert not corrupted.grad[:, :, 2].any()
    memory.transform(lambda t: 0 * t)
    assert not memory.read(queries).any()
    memory.write(keys, values)
    assert memory.forget(everything=True) == 12
    assert not memory.read(queries).any()
    memory = AssociativeMemory("linear", store=store, slots=4, heads=3, dim=5, value_dim=4).double()
    expected = queries @ model(memory.slot_keys[None], memory.slot_values[None])
    torch.testing.assert_close(memory.read(queries), expected, rtol=1e-10, atol=1e-10)
