"""`regard reproduce`: recipes at a tiny size through the command line, and the numbers they leave behind."""

import inspect
import re
from dataclasses import fields
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from oracles import entmax_row, softmax
from programs import python
from tiny_runs import tiny

import regard as package
from regard.checks import ArgumentError
from regard.cli import main
from regard.recipes import recipes
from regard_recipes.kernels import recall_capacity as capacity
from regard_recipes.lib.recipe import Results, select

PANELS = {"pairs": 2, "noise": 2, "erased": 2, "zeroed": 3, "jitter": 2}


def reproduce(*words: object) -> int:
    return main(["reproduce", *map(str, words)])


def drawn() -> dict:
    """The stored rows of the kernel zoo: kernels by themselves and their products with rules."""
    found = tiny("kernel-zoo")[1].frame.to_dict("records")
    for row in found:
        row["names"] = row["kernel"].split(" = ")
        row["kernel"] = row["names"][0]
    own = [row for row in found if row["rule"] == "by itself"]
    return {"kernels": own, "products": [row for row in found if row["rule"] != "by itself"]}


def chosen(found: Results, name: str, store: str = "pairs") -> pd.DataFrame:
    """The rows of a kernel at its best scale."""
    rows = select(capacity.best(found), store=store)
    return rows[[name in kernel.split(" = ") for kernel in rows["kernel"]]]


def means(rows: pd.DataFrame, panel: str, what: str = "match") -> list[float]:
    return select(rows, panel=panel).groupby("level")[what].mean().tolist()


def test_more_damage_recalls_less() -> None:
    found = tiny("recall-capacity")[1]
    for name in ("softmax", "biweight", "sparsemax", "linear", "topk-softmax"):
        run = chosen(found, name)
        for panel in PANELS:
            match = means(run, panel)
            assert match == sorted(match, reverse=True), (name, panel)
        assert means(run, "zeroed")[0] > means(run, "zeroed")[2] + 0.3
    sums, pairs = chosen(found, "linear", "sums"), chosen(found, "linear")
    assert means(sums, "zeroed")[0] > means(sums, "zeroed")[2] + 0.3
    assert means(sums, "zeroed")[1] > means(pairs, "zeroed")[1]  # one matrix is spread out, pairs are hit twice
    (claim,) = capacity.RecallCapacity.configure(zeroed=(0.1, 0.5, 0.9)).claims(found)
    assert claim.estimates[""].mean == pytest.approx(means(sums, "zeroed")[1] - means(pairs, "zeroed")[1])


def test_errors_of_the_linear_kernel_are_those_of_a_matrix() -> None:
    """|A k_i - v_i|^2 with A = sum v k^T, in numpy, over the recipe's own memories."""
    import torch

    config = capacity.RecallCapacity(dim=16, cues=10, stored=20)
    case = capacity.trial(config, "pairs", 20, 0)
    k, v = case.keys[:, 0].numpy(), case.values[:, 0].numpy()
    assert np.abs((k * k).sum(-1) - 1).max() < 1e-5
    assert np.abs((v * v).sum(-1) - 1).max() < 1e-5
    read = np.einsum("sjd,sje,scd->sce", k, v, k[:, :10])
    error = ((read - v[:, :10]) ** 2).sum(-1).mean(-1)
    nearest = ((read[:, :, None] - v[:, None]) ** 2).sum(-1).argmin(-1)
    for store in ("pairs", "sums"):
        found = capacity.recall(package.Spec.parse("linear"), store, 1.0, case)
        assert abs(found["error"] - error[0]) < 1e-4
        assert found["match"] == pytest.approx((nearest == np.arange(10)).mean())
    assert torch.equal(case.keys, capacity.trial(config, "pairs", 20, 0).keys)  # a function of the seed
    assert ((capacity.trial(config, "erased", 0.75, 0).cues == 0).sum(-1) == 12).all()
    noisy = capacity.trial(config, "noise", 1.0, 0)
    assert abs((noisy.cues * noisy.keys[:, :, :10]).sum(-1).mean().item() - 0.5**0.5) < 0.1


def test_signal_and_interference_are_those_of_equation_5() -> None:
    """Local Linear Attention, equation 5, written out: (k.k - 1) v_j and the sum over the others, for keys of length
    sqrt(2); for Mesa and softmax, the weights of the values by their formulas."""
    case = capacity.trial(capacity.RecallCapacity(dim=16, cues=10), "pairs", 20, 0)
    k, v = (x[:, 0].double().numpy() for x in (case.keys, case.values))
    linear = 2 * np.einsum("scd,sjd->scj", k[:, :10], k)
    gram = np.einsum("sjd,sje->sde", k, k) + np.eye(16)
    mesa = np.einsum("scd,sde,sje->scj", k[:, :10], np.linalg.inv(gram), k)
    weights = softmax(7.0 * np.einsum("scd,sjd->scj", k[:, :10], k).reshape(-1, 20)).reshape(1, 10, 20)
    made = (("linear", "pairs", 2.0, linear), ("linear", "mesa", None, mesa), ("softmax", "pairs", 7.0, weights))
    for name, store, scale, a in made:
        found = capacity.recall(package.Spec.parse(name), store, scale, case)
        own = np.einsum("scc->sc", a[:, :, :10])[..., None] * v[:, :10]
        others = a @ v - own
        assert abs(found["bias"] - ((own - v[:, :10]) ** 2).sum(-1).mean()) < 1e-4
        assert abs(found["interference"] - (others**2).sum(-1).mean()) < 1e-4
        ratio = (others**2).sum() / (own**2).sum()
        assert abs(found["inverse_snr"] - ratio) < 1e-4 * ratio
        assert abs(found["error"] - ((own + others - v[:, :10]) ** 2).sum(-1).mean()) < 1e-4


def test_the_zoo_holds_every_kernel_and_every_product() -> None:
    found = drawn()
    registries = package.registries()
    assert sorted(n for shape in found["kernels"] for n in shape["names"]) == sorted(registries["kernel"].names())
    pairs = [(p["kernel"], p["rule"]) for p in found["products"]]
    assert len(set(pairs)) == len(pairs) == len(found["kernels"]) * len(registries["bandwidth"].names())
    missing = {(p["kernel"], p["rule"]) for p in found["products"] if p["reason"]}
    signed = product(("linear", "geometric", "clipped-geometric"), ("adaptive", "anchored", "nearest"))
    assert missing == {("gaussian", "adaptive"), ("uniform", "adaptive"), *signed}


def test_kernels_are_densities() -> None:
    shapes = {name: shape for shape in drawn()["kernels"] for name in shape["names"]}
    x = np.array(shapes["biweight"]["x"])
    inside = np.maximum(1 - x * x, 0)
    for name, expected in {
        "epanechnikov": 3 / 4 * inside,
        "biweight": 15 / 16 * inside**2,
        "triweight": 35 / 32 * inside**3,
        "uniform": (np.abs(x) < 1) / 2,
        "gaussian": np.exp(-x * x / 2) / np.sqrt(2 * np.pi),
    }.items():
        assert np.abs(np.array(shapes[name]["value"]) - expected).max() < 1e-4, name
    assert np.abs(np.array(shapes["biweight"]["slope"]) + 15 / 4 * x * inside).max() < 1e-3
    geometric = shapes["geometric"]
    assert [v for z, v in zip(geometric["x"], geometric["value"], strict=True) if z >= 1] == [None] * 5
    assert geometric["value"][6] == 1.0


def test_weights_over_three_scores() -> None:
    found = {(p["kernel"], p["rule"]): p for p in drawn()["products"]}
    t = np.linspace(-3, 3, 13)
    rows = np.stack([t, 0 * t, -t], -1)
    for key, alpha in {"epanechnikov": 2.0, "biweight": 1.5, "triweight": 4 / 3}.items():  # r = 1/(alpha - 1)
        weights = np.array([entmax_row(row, alpha)[0].astype(float) for row in rows])
        assert np.abs(np.array(found[key, "adaptive"]["line"]) - weights).max() < 1e-4
    weights = softmax(rows).astype(float)
    assert np.abs(np.array(found["gaussian", "fixed"]["line"]) - weights).max() < 1e-4
    slopes = weights * (np.array([1, 0, -1]) - (weights * [1, 0, -1]).sum(-1, keepdims=True))
    assert np.abs(np.array(found["gaussian", "fixed"]["slopes"]) - slopes).max() < 1e-4
    anchored = np.maximum(rows - rows.max(-1, keepdims=True) + 1, 0)
    anchored /= anchored.sum(-1, keepdims=True)
    assert np.abs(np.array(found["epanechnikov", "anchored"]["line"]) - anchored).max() < 1e-4
    side = np.linspace(-3, 3, 7)
    plane = [[entmax_row([0, u1, u2], 2.0)[0].astype(float) for u1 in side] for u2 in side]
    sparse = found["epanechnikov", "adaptive"]
    assert np.abs(np.array(sparse["plane"]) - np.array(plane)[..., 0]).max() < 1e-4
    assert sparse["support"] == ["".join(str((p > 1e-12).sum()) for p in row) for row in plane]
    assert set("".join(found["uniform", "nearest"]["support"])) == {"2"}


def test_all_recipes_run_and_a_failure_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    ran = []

    def run(kind: type, argv: list[str]) -> int:
        ran.append((kind.name, argv))
        if kind.name == "kernel-zoo":
            raise ArgumentError("no paper")
        if kind.name == "needle":
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        return 0

    monkeypatch.setattr("regard_recipes.lib.reproduce._run", run)
    assert reproduce("--all", "--quick") == 1
    assert [name for name, _ in ran] == sorted(recipes.names())
    assert all(argv == ["--quick"] for _, argv in ran)
    assert "failed: kernel-zoo, needle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a recipe: associative-recall, boundary-bias, dispersion, errata, "),
        (("kernel-zo",), "unknown recipe 'kernel-zo'. Did you mean 'kernel-zoo'"),
        (("--out", "x"), "the name of a recipe comes first"),
        (("--all", "--out", "x"), "--all writes NAME-out for each recipe"),
        (("--all", "--seed", "-1"), "--seed is -1, expected 0 to"),
        (("kernel-zoo", "--point", "3"), "error: kernel-zoo: unknown option --point. Did you mean '--points'"),
        (("dispersion", "--quick", "--size", "paper"), "error: dispersion: --quick and --size paper were both given"),
        (("dispersion", "--rebuild"), "error: dispersion: expected --rebuild FOLDER, or --rebuild FOLDER --page"),
        (("recall-capacity", "--seed", "-1"), "--seed is -1, expected 0 to 4294967291."),
        (("kernel-selection", "--seed", "4294967290"), "--seed is 4294967290, expected 0 to 4294967288."),
    ],
)
def test_mistakes(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reproduce(*words) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert said in err[-1]
    assert err[-1].startswith("regard reproduce: error: ")
    assert not any(tmp_path.iterdir())


def test_help_and_list(capsys: pytest.CaptureFixture) -> None:
    assert reproduce("--help") == 0
    top = capsys.readouterr().out
    assert reproduce("--all", "--help") == 0
    assert capsys.readouterr().out == top
    assert main(["list", "recipes"]) == 0
    listed = capsys.readouterr().out
    for name, recipe in package.registries()["recipe"].items():
        assert name in top
        assert name in listed
        assert reproduce(name, "--help") == 0
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for field in fields(recipe):
            flag = field.name.replace("_", "-")
            assert f"--no-{flag} " in text if field.default is True else f"--{flag} " in text
        assert re.search(r"(INT|FLOAT|STR|PATH|]|}) \(default", text) is None  # every option is explained
        comments = re.findall(r"^    \w+: [^=\n]+ = .*?  # (.*)$", inspect.getsource(recipe), re.MULTILINE)
        assert [comment for comment in comments if comment not in text and "type: ignore" not in comment] == []


def test_recipes_are_listed_without_what_draws_them() -> None:
    code = "import sys, regard; regard.registries(); print([m for m in ('matplotlib', 'rich') if m in sys.modules])"
    assert python("-c", code).strip() == "[]"
