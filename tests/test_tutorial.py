"""The figures of the tutorial show what regard computes; the one that the reader moves is checked in node."""

import itertools
import json
import runpy
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

import regard

DOCS = Path(__file__).resolve().parents[1] / "docs"
KERNELS = DOCS / "javascripts" / "kernels.js"
PROGRAM = """
const kernels = require(process.argv[1]);
const { cases } = JSON.parse(require("fs").readFileSync(0));
const rows = kernels.CHOICES.map((choice) => cases.map(({ query, keys, values, bandwidth, ridge }) => {
  const p = kernels.weights(kernels.scores(query, keys, bandwidth), choice);
  const line = kernels.lineWeights(p, keys, query, ridge);
  const outputs = [kernels.average(p, values), kernels.average(line, values)];
  return { weights: p, line, outputs, effective: kernels.effectiveSampleSize(p) };
}));
console.log(JSON.stringify({ specs: kernels.CHOICES.map((choice) => choice.spec), rows }));
"""


def cases() -> list[dict]:
    """Random pairs, with ties and queries far from all keys, and bandwidths from narrow to wide."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for query, bandwidth in itertools.product((-4.0, 0.0, 0.37, 2.5), (0.1, 1.0)):
        keys = torch.rand(12, dtype=torch.float64, generator=draw) * 6 - 3
        keys[5] = keys[2]
        values = torch.randn(12, dtype=torch.float64, generator=draw)
        ridge = 0.05 * (1 + len(made))
        case = {"query": query, "keys": keys.tolist(), "values": values.tolist()}
        made.append({**case, "bandwidth": bandwidth, "ridge": ridge})
    return made


def rows(case: dict, spec: str) -> tuple[torch.Tensor, regard.Diagnostics]:
    """The output and the diagnostics that regard gives for a case."""
    tensors = (torch.tensor(case[name], dtype=torch.float64) for name in ("query", "keys", "values"))
    query, keys, values = (x.view(1, 1, -1, 1) for x in tensors)
    scale = case["bandwidth"] ** -2
    return regard.attention(query, keys, values, spec, scale=scale, impl="reference", return_diagnostics=True)


@pytest.mark.skipif(
    shutil.which("node") is None, reason="the script of the page is run by node, which is not installed"
)
def test_the_figure_that_moves_shows_what_regard_computes() -> None:
    command = ["node", "-e", PROGRAM, str(KERNELS)]
    done = subprocess.run(command, input=json.dumps({"cases": cases()}), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(set(found["specs"])) == len(found["specs"]) >= 9
    for spec, choice in zip(found["specs"], found["rows"], strict=True):
        for case, drawn in zip(cases(), choice, strict=True):
            out, seen = rows(case, spec)
            lines, fitted = rows(case, f"{spec}*linear(ridge={case['ridge']})")
            expected = torch.stack([out.view(()), lines.view(())])
            pairs = [("weights", seen.weights), ("line", fitted.effective_weights), ("outputs", expected)]
            for name, wanted in pairs:
                shown = torch.tensor(drawn[name], dtype=torch.float64)
                where = partial("{0}, {1}: {2}".format, spec, name)
                torch.testing.assert_close(shown, wanted.flatten(), msg=where, atol=1e-9, rtol=1e-9)
            assert drawn["effective"] == pytest.approx(float(seen.effective_sample_size), rel=1e-9)


def test_the_pictures_show_what_the_page_says() -> None:
    maker = runpy.run_path(str(DOCS / "make_tutorial_figures.py"))
    keys, values = maker["data"]()
    queries = torch.linspace(-1, 1, 7, dtype=torch.float64)
    weights = torch.exp(-((queries[:, None] - keys) ** 2) / (2 * 0.4**2))
    expected = weights @ values / weights.sum(1)
    torch.testing.assert_close(maker["predict"](maker["FITS"]["average"], 0.4, queries), expected)
    design = torch.stack([keys, torch.ones_like(keys)], -1)
    slope, intercept = torch.linalg.lstsq(design, values).solution
    torch.testing.assert_close(maker["everywhere"]("mesa", queries), slope * queries + intercept, atol=1e-5, rtol=0)
    for name in ("average", "lines", "everywhere", "grid", "maps"):
        assert (maker["FIGURES"] / f"tutorial-{name}.png").stat().st_size > 10_000


def test_every_kernel_is_drawn_under_every_rule_that_takes_it() -> None:
    grid = runpy.run_path(str(DOCS / "make_tutorial_figures.py"))["grid"]
    registries = regard.registries()
    drawn = {(k, r): grid(k, r, 0.4) for k in registries["kernel"].names() for r in registries["bandwidth"].names()}
    assert {kernel for (kernel, _), weights in drawn.items() if weights is not None} == {*registries["kernel"].names()}
    for (kernel, rule), weights in drawn.items():
        if weights is not None:
            torch.testing.assert_close(weights, weights.flip(0))  # the query is in the middle
            assert int(weights.argmax()) == 10 or kernel == "uniform"
            assert rule != "nearest" or int((weights > 0).sum()) == 5
