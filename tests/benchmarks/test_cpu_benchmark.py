"""benchmarks/cpu.py at tiny sizes: what it stores, what it writes, and that its measures see what they should. Its
numbers are worth nothing here. A run of everything takes a minute and a half: what looks at it is slow."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import python

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results.md"
STORED = ROOT / "benchmarks" / "results" / "cpu.json"
BEGIN, END = "<!-- benchmarks/cpu.py: begin -->\n", "<!-- benchmarks/cpu.py: end -->"

OURS = {f"regard {name}" for name in ("alpha=2", "alpha=1.5", "alpha=4/3", "relumax", "normrelu")}
PACKAGE = {f"entmax {name}" for name in ("sparsemax", "entmax15", "entmax_bisect 1.5", "entmax_bisect 4/3")}
ATTENTION = {f"regard {name}" for name in ("biweight", "sparsemax", "relumax", "biweight, impl=blocked")}
LINEAR = {"linear", "cosine", "shift-cosine", "relu", "relu2", "elu", "linear, normalised", "cosine, normalised"}
LOCAL_LINEAR = {"regard local-linear", "regard local-linear, tol 0.001", "regard local-linear[biweight]"}
PACKAGE_NAME = "fast-weight-product-key-memory"
CONTESTANTS = {
    "normalisers": {"softmax"} | OURS | PACKAGE,
    "attention": {"sdpa", "dense entmax15"} | ATTENTION,
    "linear": {"sdpa"} | LINEAR,
    "local_linear": {"sdpa", "dense local-linear"} | LOCAL_LINEAR,
}


def run(*arguments: object) -> str:
    return python(ROOT / "benchmarks" / "cpu.py", "--threads", "1", *arguments, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a quick run of everything leaves: cpu.json and page.md, and what it printed."""
    folder = tmp_path_factory.mktemp("cpu")
    (folder / "page.md").write_text(f"above\n{BEGIN}old\n{END}\nbelow\n", encoding="utf-8")
    printed = run("--quick", "--out", folder / "cpu.json", "--page", folder / "page.md", "--write")
    (folder / "printed").write_text(printed, encoding="utf-8")
    return folder


def table(folder: Path, heading: str = "") -> list[list[str]]:
    """The cells of the tables of the page, from a heading on."""
    page = (folder / "page.md").read_text(encoding="utf-8").split(heading or BEGIN, 1)[1]
    return [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")]


def row(rows: list[list[str]], name: str) -> list[str]:
    return next(cells for cells in rows if cells[0] == name)


def shown(cell: str) -> Any:
    """The two numbers of a cell such as `3.1 (1.5x)`, for comparison up to the digits that are shown."""
    return pytest.approx([float(number) for number in cell.removesuffix("x)").split(" (")], rel=6e-3)


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cpu.json").read_text(encoding="utf-8"))


def cells(found: dict[str, Any], part: str) -> list[tuple[str, dict[str, Any]]]:
    """(baseline, contestants) of every configuration."""
    own = found[part]
    groups = [*own["times"], *own.get("clustered", []), *own.get("steps", [])]
    pairs = [(g["baseline"] if "baseline" in g else own["baseline"], g["contestants"]) for g in groups]
    return pairs + [(d.get("baseline", "sdpa, a cache"), d["contestants"]) for d in own.get("decoding", [])]


@pytest.mark.slow
@pytest.mark.parametrize("part", [*CONTESTANTS, "models", "fast_weights", "token"])
def test_a_part_says_where_it_comes_from_and_its_medians_are_those_of_its_samples(
    found: dict[str, Any], part: str
) -> None:
    origin = found[part]["provenance"]
    assert origin["quick"] is True
    assert origin["threads"] == 1
    assert "--quick" in origin["command"]
    assert origin["versions"]["torch"] == torch.__version__
    assert set(origin["versions"]) == {"python", "regard", "torch", "numba", "entmax", "transformers"}
    assert origin["memory_environment"]["MALLOC_MMAP_THRESHOLD_"] == "131072"
    assert all(origin[name] for name in ("date", "cpu", "cores", "load"))
    assert origin["seconds"] >= 0  # rounded: a quick part may take less than 0.05
    assert isinstance(origin["commit"], str)
    for baseline, contestants in cells(found, part):
        base = contestants[baseline]["raw_ms"]
        for name, cell in contestants.items():
            raw = cell["raw_ms"]
            assert min(raw) > 0, name
            middle, low, high = statistics.median(raw), *np.percentile(raw, [25, 75])
            ratios = {"ratio": middle / statistics.median(base), "ratio_min": min(raw) / min(base)}
            for key, value in {"median_ms": middle, "min_ms": min(raw), **ratios}.items():
                assert cell[key] == pytest.approx(value, rel=2e-3), (name, key)
            assert cell["spread"] == pytest.approx((high - low) / middle, rel=0.06, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("part", CONTESTANTS)
def test_every_contestant_ran_in_every_configuration(found: dict[str, Any], part: str) -> None:
    times = found[part]["times"]
    assert all(set(t["contestants"]) == CONTESTANTS[part] for t in times)
    sizes = ((32, 2), (64, 2), (128, 1), (32, 1), (64, 1))
    *names, wanted = {
        "normalisers": ("length", "spread", {(n, s) for n in (64, 128, 256) for s in (0.05, 1.0, 4.0)}),
        "attention": ("length", "heads", "causal", {(*size, causal) for size in sizes for causal in (False, True)}),
        "linear": ("length", "heads", "causal", {(n, 4, True) for n in (64, 128, 256)}),
        "local_linear": ("length", "heads", "dim", {(32, 2, 16), (64, 2, 16), (128, 1, 16), (64, 2, 8)}),
    }[part]
    ran = {(*(t["config"][name] for name in names), t["pass"]) for t in times}
    assert ran == {(*config, which) for config in wanted for which in ("forward", "both")}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attention", "linear", "local_linear"])
def test_exponents_are_the_slopes_of_the_stored_medians(found: dict[str, Any], part: str) -> None:
    """Those of local linear attention are of a head."""
    for fit in found[part]["growth"]:
        assert set(fit["contestants"]) == CONTESTANTS[part]
        order = {"causal": fit.get("causal")}
        wanted = {"attention": {**order, "heads": 1}, "linear": order, "local_linear": {"dim": 16}}[part].items()
        times = [t for t in found[part]["times"] if t["pass"] == fit["pass"] and wanted <= t["config"].items()]
        assert len(times) == 3
        for name, exponents in fit["contestants"].items():
            heads = [t["config"]["heads"] if part == "local_linear" else 1 for t in times]
            medians = [t["contestants"][name]["median_ms"] / n for t, n in zip(times, heads, strict=True)]
            x, y = np.log(sorted(zip([t["config"]["length"] for t in times], medians, strict=True))).T
            assert exponents["fitted"] == pytest.approx(np.polyfit(x, y, 1)[0], rel=1e-2, abs=1e-3)
            if part != "local_linear":
                assert exponents["last"] == pytest.approx((y[2] - y[1]) / (x[2] - x[1]), rel=1e-2, abs=1e-3)


@pytest.mark.slow
def test_the_solver_of_local_linear_attention_is_reported(found: dict[str, Any]) -> None:
    part = found["local_linear"]
    assert [s["config"] for s in part["solver"]] == [t["config"] for t in part["times"] if t["pass"] == "both"]
    for own in part["solver"]:
        assert set(own["contestants"]) == LOCAL_LINEAR
        tol = own["contestants"]["regard local-linear, tol 0.001"]
        assert 1 < tol["mean"] <= tol["max"]
        assert 1e-5 < tol["residual"] <= 1.001e-3
        assert own["contestants"]["regard local-linear"]["residual"] < 1e-4
    (memory,) = part["memory"]
    assert memory["queries_mib"] == 256 * 2 * 16 * 4 / 2**20
    assert memory["bar_mib"] == pytest.approx(12 * memory["queries_mib"] + 64e6 / 2**20, rel=1e-3)


@pytest.mark.slow
def test_errors_are_those_of_a_float32_and_of_a_bfloat16(found: dict[str, Any]) -> None:
    errors = {a["name"]: a for a in found["normalisers"]["accuracy"]}
    assert set(errors) == CONTESTANTS["normalisers"]
    for name in {"softmax"} | OURS:
        assert 0 < errors[name]["float32"]["sum"] <= 2e-6, name
        assert 0 < errors[name]["float32"]["weight"] <= 5e-7, name
        assert 1e-5 < errors[name]["bfloat16"]["weight"] <= 4e-3, name
        assert 0 < errors[name]["bfloat16"]["sum"] <= 4e-3, name


@pytest.mark.slow
def test_memory_holds_what_a_pass_returns(found: dict[str, Any]) -> None:
    mine = found["normalisers"]["memory"][0]
    assert mine["name"] in OURS
    assert mine["tensors"]["forward"] >= 0.9  # the weights
    assert mine["tensors"]["both"] >= 1.5  # and the gradient, less what a page hides at this size
    assert mine["tensors"]["both"] == pytest.approx(2**18 * mine["mib"]["both"] / mine["config"]["elements"], rel=0.05)
    for part in ("attention", "linear", "local_linear"):
        assert {m["name"] for m in found[part]["memory"]} <= CONTESTANTS[part]
        assert all(m["mib"]["both"] >= 0 for m in found[part]["memory"])


@pytest.mark.slow
def test_progress_is_printed_and_the_page_shows_the_stored_numbers(found: dict[str, Any], folder: Path) -> None:
    printed = (folder / "printed").read_text(encoding="utf-8")
    places = ("normalisers: length 64, spread 0.05, forward", "attention: T 32, H 2, causal, both")
    for line in (*places, "decoding after", "local linear: T 64, H 2, D 8, both"):
        assert line in printed
    page = (folder / "page.md").read_text(encoding="utf-8")
    assert page.startswith(f"above\n{BEGIN}")
    assert page.endswith(f"{END}\nbelow\n")
    assert "old" not in page.split("\n")
    assert page.count("Tiny sizes") == 7
    rows, times = table(folder), found["normalisers"]["times"]
    for which in ("forward", "both"):
        for name in OURS | PACKAGE:
            ratios = pytest.approx([t["contestants"][name]["ratio"] for t in times if t["pass"] == which], rel=6e-3)
            own = [cells for cells in rows if cells[0] == name and len(cells) == 10]
            assert any([float(c) for c in cells[1:]] == ratios for cells in own), (name, which)
    decoded = [d["contestants"]["regard elu, a state"]["median_ms"] * 1e3 for d in found["linear"]["decoding"]]
    assert [float(c) for c in row(rows, "regard elu, a state")[1:3]] == pytest.approx(decoded, rel=6e-3)


MOSAIC = ["memory-mosaic softmax", "memory-mosaic biweight", "memory-mosaic biweight*fixed"]
EQUAL = ["transformer softmax", "iclm full", "iclm wv"]


@pytest.mark.slow
def test_the_models_that_are_compared(found: dict[str, Any]) -> None:
    part = found["models"]
    assert [(t["baseline"], list(t["contestants"])) for t in part["times"]] == [(MOSAIC[0], MOSAIC), (EQUAL[0], EQUAL)]
    assert [list(p["parameters"]) for p in part["parameters"]] == [MOSAIC, EQUAL]
    counts = part["parameters"][1]["parameters"]
    for name in EQUAL:  # one more inner channel is 2 * 16 + 1 numbers
        assert abs(counts[name] - counts[EQUAL[0]]) <= 17
    # embeddings, and of two layers: attention, GPT-2's feed-forward part, two norms; and the last norm
    assert counts[EQUAL[0]] == 96 * 16 + 2 * (4 * 16**2 + 2 * 16 * 64 + 64 + 16 + 4 * 16) + 2 * 16
    assert [m["name"] for m in part["memory"]] == [MOSAIC[0], EQUAL[0]]
    for memory in part["memory"]:
        count = next(p["parameters"][memory["name"]] for p in part["parameters"] if memory["name"] in p["parameters"])
        assert memory["parameters_mib"] == pytest.approx(count / 2**18, rel=1e-3)
        assert memory["mib"]["both"] >= 0
    assert part["bars"] == {"memory-mosaic biweight": 2.0, "decoding": 5.0}


@pytest.mark.slow
def test_every_registered_model_decodes_with_and_without_a_cache(module: Any, found: dict[str, Any]) -> None:
    from regard.models import language_models

    decoding = found["models"]["decoding"]
    names = language_models.names()
    assert [list(d["contestants"]) for d in decoding] == [[f"{n}, a cache", f"{n}, no cache"] for n in names]
    models = module("cpu_models")
    prompt = torch.tensor([[1, 2, 3]])
    calls: list[int] = []
    for name in names:
        entry = language_models.get(name)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8}
        model = entry.model(entry.config(vocab_size=96, **sizes)).eval()
        model.register_forward_pre_hook(lambda m, a, kw: calls.append(kw["input_ids"].shape[1]), with_kwargs=True)
        said = [models.decode(model, prompt, 4, cached) for cached in (True, False)]
        assert torch.equal(*said)
        assert said[0].shape == (1, 7)
        assert calls == [3, 1, 1, 1, 3, 4, 5, 6]
        calls.clear()


@pytest.mark.slow
def test_the_tables_of_the_models(found: dict[str, Any], folder: Path) -> None:
    rows, part = table(folder, "### Language models"), found["models"]
    for entry in part["times"]:
        for name, cell in entry["contestants"].items():
            assert [cell["median_ms"], cell["ratio"]] == shown(row(rows, name)[1])
    for entry in part["decoding"]:
        name = entry["baseline"].removesuffix(", a cache")
        own = row(rows, f"{name}, after {entry['config']['prompt']}")
        both = [entry["contestants"][f"{name}, {how}"] for how in ("a cache", "no cache")]
        assert [float(c) for c in own[1:3]] == pytest.approx([c["median_ms"] / 1e3 for c in both], rel=6e-3)
        assert float(own[3].removesuffix("x")) == pytest.approx(both[1]["ratio"], rel=6e-3)


def test_the_contestants_of_fast_weights_compute_the_same(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part = module("cpu_fast_weights")
    config = {"sub_keys": 16, "chunk": 32, "width": 16, "top_k": 8, "chunks": 3}
    tables = tuple(x.double() for x in part.tables(16, 16))
    monkeypatch.setattr(part, "tables", lambda *sizes: tables)
    given = [x.double() for x in part.inputs(config)[0]]
    for grad in (False, True):
        leaves = [x.clone().requires_grad_(grad) for x in given]
        with torch.set_grad_enabled(grad):
            ours, dense = (part.functions(config)[name](*leaves) for name in ("regard", "dense autograd"))
        torch.testing.assert_close(ours, dense, atol=1e-9, rtol=0)
    wanted = torch.autograd.grad(dense.square().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), leaves), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_the_numbers_of_fast_weights(found: dict[str, Any], folder: Path) -> None:
    part = found["fast_weights"]
    names = {"regard", "dense autograd"} | ({PACKAGE_NAME} if part["package"] != "not installed" else set())
    assert [set(t["contestants"]) for t in part["times"]] == [names] * 2
    assert [(t["config"]["chunks"], t["pass"]) for t in part["times"]] == [(1, "forward"), (2, "both")]
    assert {(m["name"], m["config"]["chunks"]) for m in part["memory"]} == {(n, 2) for n in names} | {("regard", 8)}
    for memory in part["memory"]:
        if memory["name"] == "regard":  # at most all 256 rows of 16 numbers a chunk
            assert 0.02 <= memory["written_mib"] / memory["config"]["chunks"] * 2**20 / (256 * 16 * 4) <= 1
    assert part["bars"] == {"ms": 40.0, "dense": 50.0, "step": 1.35}
    (steps,) = part["steps"]
    assert list(steps["contestants"]) == list(steps["parameters"]) == ["GDN", "GDN + FwPKM@1,2,3"]
    rows = table(folder, "### Memories of fast weights")
    for name in names:
        for cell, entry in zip(row(rows, name)[1:3], part["times"], strict=True):
            own = entry["contestants"][name]
            assert [own["median_ms"], 1 / own["ratio"]] == shown(cell)
    with_memories = next(cells for cells in rows if cells[0].endswith("FwPKM@1,2,3"))
    ratio = steps["contestants"]["GDN + FwPKM@1,2,3"]["ratio"]
    assert float(with_memories[1].split(" (")[1].removesuffix("x)")) == pytest.approx(ratio, rel=6e-3)


@pytest.mark.slow
def test_what_does_not_fit_is_said_in_the_table(module: Any, found: dict[str, Any]) -> None:
    """Memory of all heads by proportion from one: 8 x 3328 MiB = 26 GiB."""
    config = {"length": 8192, "heads": 1, "causal": False}
    dense = {"name": "dense entmax15", "config": config, "mib": {"forward": 3300.0, "both": 3328.0}}
    part = {**found["attention"], "memory": [dense]}
    rows = [line for line in module("cpu_table").tables({"attention": part}).splitlines() if "does not fit" in line]
    assert len(rows) == 1
    assert rows[0].startswith("| dense entmax15, T 8192, H 8 | does not fit: about 26 GiB, not run |")


def test_a_page_without_markers_is_refused(tables: Any) -> None:
    begin, end = tables.BEGIN, tables.END
    for page in ("no markers", f"{end}{begin}", f"{begin}{end}{begin}{end}"):
        with pytest.raises(ValueError, match="must hold"):
            tables.placed(page, "table")


def test_the_results_page_shows_what_is_stored(module: Any) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    tables = module("cpu_table").tables(stored)
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(BEGIN)[1].split(END)[0] == tables, "run `python benchmarks/cpu.py --part --write`"
    assert tables.count("### ") == len(stored) >= 3


@pytest.mark.slow
def test_writing_again_changes_nothing(folder: Path) -> None:
    before = (folder / "page.md").read_text(encoding="utf-8")
    run("--part", "--out", folder / "cpu.json", "--page", folder / "page.md", "--write")
    assert (folder / "page.md").read_text(encoding="utf-8") == before


def test_calls_take_turns_and_slow_ones_get_fewer(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = module("cpu_measure")
    seconds = {"fast": 0.1, "slow": 0.5, "slowest": 4.0}
    order: list[str] = []

    def timed(call: Any) -> float:
        order.append(call())
        return seconds[order[-1]]

    monkeypatch.setattr(measure, "timed", timed)
    calls = {name: (lambda name=name: name) for name in seconds}
    samples = measure.interleaved(calls, most=12, budget=2.0)
    assert {name: len(of) for name, of in samples.items()} == {"fast": 12, "slow": 4, "slowest": 2}
    turns = order[5:]  # after the warm-up: twice each, once the slowest
    assert [i for i, name in enumerate(n for n in turns if n != "slowest") if name == "slow"] == [3, 7, 11, 15]
    assert turns[-1] == "slowest"


def test_the_contestants_of_attention_compute_the_same(module: Any) -> None:
    attention = module("cpu_attention")
    for causal in (False, True):
        config = {"length": 40, "heads": 2, "causal": causal}
        functions, (given, _) = attention.functions(config), attention.inputs(config)
        for name in ("regard biweight", "regard biweight, impl=blocked"):
            dense = functions["dense entmax15"](*given)
            torch.testing.assert_close(functions[name](*given), dense, atol=1e-5, rtol=1e-5)


def test_the_contestants_of_local_linear_attention_compute_the_same(module: Any) -> None:
    part = module("cpu_local_linear")
    config = {"length": 40, "heads": 2, "dim": 8, "causal": True}
    given, _ = part.inputs(config)
    functions = part.functions(config)
    assert set(functions) == CONTESTANTS["local_linear"]
    dense = functions["dense local-linear"](*given)
    torch.testing.assert_close(functions["regard local-linear"](*given), dense, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(functions["regard local-linear, tol 0.001"](*given), dense, atol=2e-2, rtol=2e-2)
    assert "dense local-linear" not in part.functions({**config, "length": 4096})
    one, k, v = given[0][:, :, -1:], given[1], given[2]
    steps = part.decoders(one, k, v)
    torch.testing.assert_close(steps["sdpa"](), steps["regard softmax"](), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(steps["regard local-linear"](), dense[:, :, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_table_of_local_linear_attention(found: dict[str, Any], folder: Path) -> None:
    """Ratios and targets are shown, and a dash where the dense form did not run."""
    heading = "### Local linear attention"
    first = next(t for t in found["local_linear"]["times"] if t["pass"] == "forward")["contestants"]
    own, dense = first["regard local-linear"], first["dense local-linear"]["median_ms"]
    ratio, faster = row(table(folder, heading), "regard local-linear")[1].removesuffix("x)").split(" (")
    assert float(ratio) == pytest.approx(own["ratio"], rel=6e-3)
    assert float(faster) == pytest.approx(dense / own["median_ms"], rel=1e-2)
    page = (folder / "page.md").read_text(encoding="utf-8").split(heading)[1]
    assert all(text in page for text in ("12 forward, 8", "61.4 MiB", "Target at 8192 keys: 2.5"))


def test_the_contestants_of_the_normalisers_compute_the_same(module: Any) -> None:
    normalisers = module("cpu_normalisers")
    z = torch.randn(5, 40, generator=torch.Generator().manual_seed(3)).double()
    for ours, theirs in normalisers.PAIRS:
        weights = normalisers.FUNCTIONS[ours](z)
        torch.testing.assert_close(weights, normalisers.FUNCTIONS[theirs](z), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(normalisers.exact(ours, z), weights, atol=1e-9, rtol=1e-9)


MEMORY = """
import torch
from cpu_measure import peaks
make = lambda config: ([torch.ones(config["mib"] << 18)], torch.ones(config["mib"] << 18))
print(peaks(lambda x: (x * 2).exp(), make, {"mib": 32})["forward"])
"""


def test_the_peak_sees_what_is_freed_again() -> None:
    """Twice 32 MiB live together, one of which is not returned."""
    environment = {"PYTHONPATH": str(ROOT / "benchmarks"), "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert 62 <= float(python("-c", MEMORY, **environment)) <= 72


def test_a_decoded_token_is_measured_in_turns_and_shown(module: Any) -> None:
    part = module("cpu_token").run(quick=True, threads=torch.get_num_threads())
    (times,) = part["times"]
    assert times["config"] == {"keys": 64, "heads": 8, "dim": 64}
    assert list(times["contestants"]) == ["sdpa", "softmax", "biweight", "local-linear[biweight]"]
    least = times["contestants"]["sdpa"]["cpu_us"]
    for cell in times["contestants"].values():
        assert cell["cpu_us"] > 0
        assert cell["cpu_ratio"] == pytest.approx(cell["cpu_us"] / least, rel=2e-3)
    part["provenance"] = {**module("cpu_measure").provenance(True), "seconds": 1.0}
    *_, table = module("cpu_table").token(part)
    row = next(line for line in table.splitlines() if line.startswith("| biweight | 64 |"))
    assert float(row.split("|")[3]) == pytest.approx(1e3 * times["contestants"]["biweight"]["median_ms"], rel=6e-3)
