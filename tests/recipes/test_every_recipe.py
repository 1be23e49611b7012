"""What holds for every recipe: a tiny run stores and shows everything, a seed decides its numbers, mistakes are found
before anything is written."""

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mistakes import refuses
from tiny_runs import SHORTER, TINY, make, tiny, without_drawing

import regard
import regard_recipes
from regard.cli import main
from regard.recipes import recipes
from regard_recipes.lib.recipe import Recipe, check_shared
from regard_recipes.lib.results import plain, read_journal
from regard_recipes.lib.trained import TrainedRecipe

MACHINE = ("seconds", "step_seconds", "step_cpu_seconds", "microseconds", "fastest", "slowest", "peak_bytes",
           "before_bytes", "kept_bytes")  # fmt: skip
KINDS = {name: kind for name, kind in recipes.items() if isinstance(kind, type) and issubclass(kind, Recipe)}


@pytest.mark.parametrize("name", TINY)
def test_a_run_stores_every_cell_and_shows_it(name: str) -> None:
    made, results = tiny(name)
    folder = made.out
    assert set(results.frame["seed"]) >= set(range(made.seeds))
    page = (folder / f"{name}.md").read_text()
    files = re.findall(r"!\[(.*?)\]", page)
    assert files
    assert all((folder / file).read_bytes().startswith(b"\x89PNG") for file in files)
    tables = {title: table for title, table in made.tables(results).items() if table.rows}
    assert all(f"## {title}\n\n{table.markdown().strip()}" in page for title, table in tables.items())
    assert all(f"“{claim.wording}” ({claim.where}) | {claim.verdict} |" in page for claim in made.claims(results))
    assert results.record["command"].startswith(f"regard reproduce {name}")
    assert results.record["config"]["size"] == "quick"
    assert results.record["installation"]["versions"]["regard"] == regard.__version__
    assert re.search(r"\S+, \d+ cores, \d+ threads", results.record["installation"]["devices"]["cpu"])


@pytest.mark.parametrize("name", TINY)
def test_stored_rows_give_the_same_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = tiny(name)
    without_drawing(monkeypatch)
    page = f"{name}.md"
    shutil.copy(made.out / f"{name}.json", tmp_path)
    assert main(["reproduce", name, "--rebuild", str(tmp_path)]) == 0
    assert (tmp_path / page).read_text() == (made.out / page).read_text()
    records = [json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, made.out)]
    assert records[0] == records[1]


@pytest.mark.parametrize("name", TINY)
def test_a_seed_gives_the_same_numbers_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in SHORTER:
        monkeypatch.setattr(*SHORTER[name])
    _, lines, _ = read_journal(tiny(name)[0].out / f"{name}.jsonl")
    made = make(name)
    made.prepare()
    cell = made.cells()[-1]
    stored = pd.DataFrame([line["measured"] for line in lines if line["cell"] == plain(cell) and line["seed"] == 0])
    again, other = (pd.DataFrame(plain(list(made.measure(cell, seed)))) for seed in (0, 1))
    own = [column for column in stored if column not in MACHINE]
    pd.testing.assert_frame_equal(stored[own], again[own], rtol=1e-5)  # float32 sums may differ in their last bits
    if name != "kernel-zoo":
        assert not stored[own].equals(other.reindex(columns=own))  # another seed may lack columns


@pytest.mark.parametrize("name", KINDS)
def test_numbers_out_of_range_and_unknown_names_are_refused(name: str) -> None:
    kind = KINDS[name]
    wrong: list[tuple[str, Any]] = [("seed", -1), ("seed", 2**32), ("device", "abacus")]
    limits = {field: low for field, (low, _) in kind.ranges().items()}
    wrong += [(field, (getattr(kind(), low) if isinstance(low, str) else low) - 1) for field, low in limits.items()]
    wrong += [(field, "no-such-name") for field in kind.declared("choices")]
    for field, value in wrong:
        several = isinstance(getattr(kind(), field), tuple)
        refuses(field.replace("_", "-"), check_shared, kind.configure(**{field: (value,) if several else value}))
        if several:
            refuses("names no", check_shared, kind.configure(**{field: ()}))
    if issubclass(kind, TrainedRecipe):
        unknown = f"reproduce: {name}: --models.*'none of them'"
        refuses(unknown, check_shared, kind.configure(models=("none of them",)))


def test_recipes_train_with_the_trainers_of_regard() -> None:
    found = []
    for path in sorted(Path(regard_recipes.__path__[0]).rglob("*.py")):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports if node.module == "transformers" for alias in node.names}
        found += [(path.name, name) for name in names & {"Trainer", "TrainingArguments"}]
    assert found == []


@pytest.mark.parametrize("name", KINDS)
def test_a_recipe_has_the_paper_s_size_or_says_why_not(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = KINDS[name]
    assert ("paper" in kind.by_size) == (not kind.no_paper_size)
    if kind.no_paper_size:
        assert main(["reproduce", name, "--size", "paper"]) == 2
        expected = f"--size is 'paper', expected small or quick. {kind.no_paper_size}"
        assert expected in " ".join(capsys.readouterr().err.split())
        assert main(["reproduce", name, "--help"]) == 0
        assert f"There is no size paper: {kind.no_paper_size}" in " ".join(capsys.readouterr().out.split())


MISTAKES = [
    ("boundary-bias", "--sizes 64", "expected two or more numbers"),
    ("fast-weight-recall", "--pairs 200", "pairs is 200, expected at most the 128 keys"),
    ("fast-weight-recall", "--top-k 40", "top_k"),
    ("fwpkm-ablation", "--quick --haystack 5", "needles have"),
    ("fwpkm-ablation", "--top-k 9", "top_k is 36, expected a whole number from 1 to 32"),
    ("fwpkm-case-studies", "--quick --layers 0", "--layers is 0, expected at least 2"),
    ("fwpkm-cost", "--quick --memories PKM", "--memories lacks none"),
    ("fwpkm-cost", "--quick --memory-dim 9", "--memory-dim is 9, expected an even"),
    ("fwpkm-cost", "--quick --chunk 33", "has less than two chunks of 33"),
    ("fwpkm-cost", "--quick --layers 2", "--layers is 2, expected at least 4"),
    ("iclm-mechanisms", "--prompt 17 --context 16", "--prompt is 17, expected 4 to 16 (--context)"),
    ("iclm-mechanisms", "--layers 3", "--width, --layers or --heads: ICLMConfig: num_hidden_layers is 3"),
    ("iclm-mechanisms", "--tokenizer word", "unknown tokenizer 'word'"),
    ("iclm-parity", "--layers 3", "--layers or --heads: ICLMConfig: num_hidden_layers is 3, expected an even number"),
    ("iclm-parity", "--models iclm-wv", "--models lacks transformer"),
    ("iclm-parity", "--models transformer iclm-wv-no-mlp", "--models lacks transformer-no-mlp"),
    ("iclm-parity", "--tokenizer chars", "Did you mean 'char'"),
    ("iclm-parity", "--dtype float16", "--dtype names 'float16', which is unknown"),
    ("iclm-parity", "--parts 3", "--parts 3 does not divide --batch 16"),
    ("kernel-selection", "--models exponential geometrik", "which is unknown here. Did you mean 'geometric'"),
    ("kernel-selection", "--models rbf", "lacks exponential"),
    ("slot-use", "--measured 10", "--measured is 10, expected at least 64 (--context)"),
    ("kernel-selection", "--earlier softmax", "--earlier names 'softmax', which is unknown"),
    ("kernel-selection", "--heads 3", "64"),
    ("lla-numerics", "--ridges 0.1 0.1", "--ridges names 0.1 twice; name it once."),
    ("lla-variants", "--dim 12", "--dim is 12, expected a power of two"),
    ("lla-variants", "--segment 100", "expected a power of two, at most 2^dim"),
    ("lla-variants", "--sequences 1000000000000", "--sequences is 1000000000000, expected 1 to 4096"),
    ("in-context-regression", "--dim 100000", "--dim is 100000, expected 1 to 1024"),
    ("lla-variants", "--tols 0.001 0.1", "give the smallest last"),
    ("mosaic-kernels", "--models biweight", "lacks softmax"),
    ("mosaic-kernels", "--released fast fast", "--released names 'fast' twice"),
    ("mosaic-kernels", "--heads 5", "64"),
    ("needle", "--digits 3", "--digits is 3, expected an even number"),
    ("needle", "--context 10", "less than two chunks of 8"),
    ("needle", "--examples 2 --kept 3", "--kept is 3, expected 0 to 2 (--examples)"),
    ("recall-capacity", "--specs softmax biweigth", "--specs: unknown spec 'biweigth'. Did you mean"),
    ("recall-capacity", "--models messa", "--models: unknown model 'messa'. Did you mean 'mesa'?"),
    ("recall-capacity", "--models mesa(ridge=0)", "--models: mesa: ridge is 0, expected ridge > 0."),
    ("recall-capacity", "--zeroed 1.5", "--zeroed is 1.5, expected 0 to 1."),
    ("shared-query-key", "--models sofmax", "Did you mean 'softmax'"),
    ("shared-query-key", "--models elu elu", "names 'elu' twice"),
    ("streaming-perplexity", "--heads 7", "head_dim is 9"),
    ("slot-use", "--top-k 200", "--top-k is 200, expected 1 to 128 (--sub-keys)"),
    ("out-of-distribution", "--tokenizer char", "--tokenizer names 'char', which is unknown"),
    ("out-of-distribution", "--other /no/such/file", "/no/such/file"),
    ("lla-pretraining", "--heads 5", "--width, --layers or --heads: HybridConfig"),
    ("test-time-regression", "--segments 24", "length 1024 and segment 24 make"),
    ("test-time-regression", "--specs biweight", "--specs lacks softmax"),
    ("test-time-regression", "--specs softmax softmax", "--specs or --residuals names 'softmax' twice"),
    ("test-time-regression", "--specs softmax softmx", "unknown spec 'softmx'. Did you mean"),
    ("test-time-regression", "--specs softmax local-linear", "is a local linear model already"),
    ("test-time-regression", "--residuals softmax+meza", "unknown state 'meza' of 'softmax+meza'. Did you mean"),
]


@pytest.mark.parametrize(("name", "words", "said"), MISTAKES)
def test_mistakes_are_found_before_anything_is_written(
    name: str, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", name, "--out", str(tmp_path / "out"), *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
