"""What the README and the docs show is what comes out."""

import contextlib
import doctest
import importlib
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from pages import commands, program
from programs import python

import regard
from regard.cli import main
from regard.cli.commands import EvalOptions
from regard.cli.options import parse
from regard.recipes import recipes
from regard.training import TrainConfig
from regard.training.validation import validate
from regard_recipes.lib.reproduce import options

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "results")
BESIDE = {"finetune-with-lora"}
"""Pages that other tests run: tests/peers/test_peft.py."""
MECHANISMS = [page for page in PAGES if page.parent.name == "mechanisms" and page.stem != "index"]
WITHOUT_CLAIMS = {"associative-memory", "interpolated"}
"""Mechanisms on which the papers make no claim that a recipe measures."""
SECTIONS = ["Problem", "Formula", "Cost", "When to use it", "When not to use it"]
SECTIONS += ["What the papers say and what we measured"]
OLD = r"\bsentences?\b|\bspoilt\b|\bkeys that count\b|\bdesk size\b|\bgranule\b|\bbandwidth rule\b"
SRC = ROOT / "src"
EXAMPLES = [path for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
WITH_EXAMPLES = [".".join(path.relative_to(SRC).with_suffix("").parts) for path in EXAMPLES]
"""Modules with examples in their docstrings."""
GENERATED = {"grammar", "results", "gpu"}
"""Pages with tables that the sources or the benchmarks write, in words of their own."""


def text(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_the_readme_shows_the_example_and_its_output() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = ROOT / "examples" / "first.py"
    assert program(ROOT / "README.md") == [(script.read_text(encoding="utf-8"), python(script))]
    assert len(readme.splitlines()) <= 90


def test_no_sentence_of_the_readme_is_longer_than_30_words() -> None:
    readme = re.sub(r"^(```.*?^```|    .*?$|\|.*?$)", "", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    prose = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", readme)  # a link is its text
    for paragraph in re.split(r"\n\n|\n- |\n#+ ", prose):
        for sentence in re.split(r"(?<=[.:;!?])\s", paragraph):
            assert len(sentence.split()) <= 30, sentence


@pytest.mark.parametrize("folder", sorted({page.parent for page in PAGES if program(page)}), ids=lambda path: path.name)
def test_every_page_shows_what_comes_out(folder: Path, tmp_path: Path) -> None:
    pages = [str(page) for page in PAGES if page.parent == folder and program(page) and page.stem not in BESIDE]
    found = json.loads(python(Path(__file__).with_name("pages.py"), *pages, cwd=tmp_path))
    wrong = {Path(page).name: said for page, said in found.items() if said is not None}
    assert not wrong, "\n".join(f"{page}: {said}" for page, said in wrong.items())


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_give_what_they_show(module: str) -> None:
    done = doctest.testmod(importlib.import_module(module))
    assert done.attempted > 1
    assert done.failed == 0


COMMANDS = sorted({shlex.join(words) for page in [ROOT / "README.md", *PAGES] for words in commands(page)})


@pytest.mark.parametrize("line", [x for x in COMMANDS if x.split()[0] in ("train", "eval", "reproduce", "list")])
def test_the_options_of_every_command_exist(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *words = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    if name == "list":
        assert main([name, *words]) == 0
    elif name == "reproduce" and words[0] in recipes:
        with contextlib.suppress(SystemExit):  # --help
            assert options(recipes.get(words[0]), [word for word in words[1:] if word != "--estimate"])
    elif name == "eval":
        parse(EvalOptions, words, command="eval")
    elif name == "train" and "--resume" not in words:
        validate(parse(TrainConfig, words, command="train"))


def test_every_protocol_page_has_an_example() -> None:
    pages = [page for page in PAGES if page.parent.name == "protocols"]
    assert len(pages) >= 7
    for page in pages:
        assert program(page), page.name


def test_the_design_page_names_every_folder() -> None:
    folders = [path.name for path in (ROOT / "src" / "regard").iterdir() if (path / "__init__.py").exists()]
    assert len(folders) > 10
    assert [name for name in folders if f"`{name}/`" not in text("design")] == []
    assert len(text("design").splitlines()) < 120


def says(expected: dict[str, tuple[str, ...]]) -> None:
    """Check that each page says these words."""
    for page, numbers in expected.items():
        for number in numbers:
            assert number in text(page), f"{page}.md should say: {number}"


def cells(table: str) -> list[list[str]]:
    """The rows of the tables in a text, cell by cell."""
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]


def linked(name: str) -> set[str]:
    """The pages that a page links to, relative to docs/."""
    page = DOCS / f"{name}.md"
    targets = re.findall(r"\]\((?!\.\.|http)([^)#]+\.md)\)", page.read_text(encoding="utf-8"))
    return {str((page.parent / target).relative_to(DOCS)) for target in targets}


def test_every_page_is_found_from_the_index() -> None:
    listed = linked("index")
    for section in [name for name in listed if name.endswith("/index.md")]:
        listed |= linked(section.removesuffix(".md"))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES} - {"index.md"}


def test_the_navigation_of_the_site_names_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    notebooks = [f"notebooks/{path.stem}.md" for path in DOCS.glob("notebooks/*.ipynb")]
    pages = [str(page.relative_to(DOCS)) for page in [*PAGES, *DOCS.glob("results/paper-*.md")]]
    named = re.findall(r"[\w/-]+\.md", json.dumps(config["nav"]))
    assert sorted(named) == sorted(["contributing.md", "writing-recipes.md", "changelog.md", *notebooks, *pages])


@pytest.mark.parametrize("page", MECHANISMS, ids=lambda page: page.stem)
def test_a_page_of_a_mechanism_has_every_part(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, flags=re.M) == SECTIONS
    assert "```math\n" in text
    assert program(page)
    measured = text.split(f"## {SECTIONS[-1]}")[1]
    assert re.search(r"\]\(\.\./(results/|test-time-regression)", measured)
    claims = runpy.run_path(str(DOCS / "site_claims.py"))["filled"](measured)
    assert "<!--" not in claims
    assert ("| claim | verdict |" in claims) == (page.stem not in WITHOUT_CLAIMS)


def test_the_errors_of_attention_on_residuals_are_the_stored_ones() -> None:
    def table(text: str) -> list[dict[str, str]]:
        head, _, *rows = cells(text)
        return [dict(zip(head, row, strict=True)) for row in rows]

    title = "## Squared error in units of the zero predictor's, strictly-past"
    stored = text("results/test-time-regression").split(title)[1].split("##")[0]
    rows = {(row["d"], row["S"]): row for row in table(stored) if row["query noise"] == "0"}
    shown = table(text("mechanisms/interpolated"))
    assert len(shown) == 2
    for row in shown:
        assert row.items() <= rows[row["d"], row["S"]].items()


def test_the_spec_reference_lists_what_is_registered() -> None:
    maker = runpy.run_path(str(DOCS / "make_grammar.py"))
    assert text("grammar") == maker["page"](), "run `python docs/make_grammar.py`"
    for name in regard.presets():
        assert f"`{name}`" in text("grammar")


def test_the_figures_show_what_the_specs_compute() -> None:
    maker = runpy.run_path(str(DOCS / "make_figures.py"))
    angle, softmax = maker["curve"]("softmax")
    expected = (8 * angle.deg2rad().cos()).softmax(0)
    assert (softmax - expected).abs().max() < 1e-12
    assert (maker["curve"]("biweight")[1] > 0).sum() < len(angle) / 4
    assert maker["curve"]("gaussian*linear(ridge=0.01)", 0.0)[1].min() < 0
    average, line = (maker["fit"](spec) for spec in maker["FITS"].values())
    truth = (3 * average[0]).exp() / 8
    assert (line[2] - truth)[-1].abs() < 0.25 * (average[2] - truth)[-1].abs()  # at the edge of the keys
    for name in ("weights", "local-linear"):
        assert (maker["FIGURES"] / f"{name}.png").stat().st_size > 10_000


def test_the_costs_that_pages_advise_by_are_the_stored_ones() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))

    def row(part: str, table: str = "times", **config: object) -> dict[str, dict[str, float]]:
        rows = (x for x in stored[part][table] if config.items() <= {**x["config"], "pass": x.get("pass")}.items())
        return next(rows)["contestants"]

    full, causal = (row("attention", length=2048, heads=8, causal=x, **{"pass": "both"}) for x in (False, True))
    forward = row("local_linear", length=2048, heads=8, dim=64, **{"pass": "forward"})
    lines = row("local_linear", length=2048, heads=8, dim=64, **{"pass": "both"})
    sums = row("linear", length=16384, **{"pass": "both"})
    decoding = row("linear", "decoding", length=65536)
    mosaic, transformer = (x["contestants"] for x in stored["models"]["times"][:2])
    tokens, few = row("local_linear", "decoding", length=8192), row("token", keys=64)
    sparse = tokens["regard local-linear[biweight]"]["median_ms"] / tokens["regard softmax"]["median_ms"]

    def faster(rows: dict[str, dict[str, float]]) -> str:
        return f"{rows['dense entmax15']['ratio'] / rows['regard biweight']['ratio']:.1f}"

    def reached(value: float, most: float) -> str:
        return "reached" if value <= most else "missed"

    def decoded(spec: str, most: float) -> str:
        row = few[spec]
        us = 1e3 * row["median_ms"]
        return f"| {most:.0f} µs | {reached(us, most)}: {us:.0f} µs (processor time {row['cpu_us']:.0f}) |"

    def both(name: str) -> str:
        return f"{forward[f'regard {name}']['ratio']:.3g} and {lines[f'regard {name}']['ratio']:.3g}"

    expected = {
        "results": (
            f"| 1.8 | {full['regard biweight']['ratio']:.2f}; ",
            f"| missed: {faster(full)}, causal {faster(causal)} |",
            f"With biweight reached: {both('local-linear[biweight]')}",
            f"with biweight {reached(sparse, 2.5)}: {sparse:.3g} |",
            f"| 4 | {reached(few['softmax']['ratio'], 4)}: {few['softmax']['ratio']:.2f} |",
            decoded("biweight", 600),
            decoded("local-linear[biweight]", 2000),
            f"| {lines['regard local-linear']['ratio']:.0f} times torch's attention; "
            f"{lines['regard local-linear[biweight]']['ratio']:.0f} times with sparse weights |",
            f"with a tolerance of 1e-3 {both('local-linear, tol 0.001')}",
            f"forward, 8 both | missed: {both('local-linear')}",
            f"missed: {tokens['regard local-linear']['median_ms'] / tokens['regard softmax']['median_ms']:.1f} ",
        ),
        "choose-a-spec": (
            f"| {full['regard biweight']['ratio']:.2f}, {full['regard sparsemax']['ratio']:.2f} (T 2048, H 8)",
            f"| {lines['regard local-linear']['ratio']:.0f} (T 2048, H 8), "
            f"{lines['regard local-linear, tol 0.001']['ratio']:.0f} at `tol=1e-3`",
            f"| {lines['regard local-linear[biweight]']['ratio']:.1f} (T 2048, H 8)",
            f"{sums['elu']['median_ms']:.0f} ms at 16,384",
            f"{decoding['sdpa, a cache']['median_ms']:.1f} ms with torch's attention over a cache",
        ),
        "local-linear-attention": (
            f"| 1 | {lines['regard local-linear']['ratio']:.0f}; "
            f"{lines['regard local-linear, tol 0.001']['ratio']:.0f} at `tol=1e-3`; "
            f"{lines['regard local-linear[biweight]']['ratio']:.0f} with `biweight` |",
        ),
        "global-linear": (f"{sums['linear']['median_ms']:.0f} ms with `linear`",),
        "memory-mosaics": (f"`biweight` 1.06 to {mosaic['memory-mosaic biweight']['ratio']:.2f} times softmax",),
        "iclm": (f"{transformer['iclm wv']['ratio']:.1f} to 1.5 times a Transformer's",),
        "product-key-memory": (f"{row('fast_weights', chunks=1)['regard']['median_ms']:.0f} ms on one CPU thread",),
        "../README": (
            f"| {lines['regard local-linear']['ratio']:.0f} x torch's attention, forward and backward [a]",
            f"| {decoding['regard elu, a state']['median_ms']:.2f} ms after 65,536 tokens, "
            f"torch {decoding['sdpa, a cache']['median_ms']:.1f} ms [a]",
        ),
    }
    says(expected)


def test_the_losses_that_pages_advise_by_are_the_stored_ones() -> None:
    def cell(recipe: str, column: str, *first: str) -> float:
        """Return the mean in the first row of a stored table that begins with these cells."""
        rows = cells(text(f"results/{recipe}"))
        row = next(i for i, cells in enumerate(rows) if [x.strip() for x in cells[: len(first)]] == list(first))
        head = next(rows[i - 1] for i in range(row, 0, -1) if rows[i][0].startswith("---"))
        return float(rows[row][head.index(column)].split(" ± ")[0])

    def elu(digits: int) -> str:
        return f"{cell('kernel-selection', 'test nats/char', 'elu', 'normalised'):.{digits}f} nats"

    softmax = cell("kernel-selection", "test nats/char", "exponential", "normalised")
    demo = json.loads((DOCS / "results" / "demo.json").read_text(encoding="utf-8"))["models"]
    bits = {model["spec"]: f"{model['bits_per_char']:.2f}" for model in demo}
    error = {ridge: cell("lla-variants", "strictly-past", "auto", ridge) for ridge in ("1", "0.1")}
    none = cell("lla-variants", "strictly-past", "softmax", "")
    far = {name: cell("recurring-names", "right, far", "window and FwPKM", name) for name in ("written", "frozen")}
    far["none"] = cell("recurring-names", "right, far", "window", "")
    gaps = (f"{cell('mosaic-kernels', 'above softmax', name):.3f}" for name in ("biweight", "sparsemax", "relumax"))
    expected = {
        "../README": (
            f"higher loss on text: {bits['biweight']} bits per character, softmax {bits['softmax']}, one seed",
            f"higher loss on text: {elu(1)}, softmax {softmax:.1f} [c]",
            f"the error is {error['1']:.2f} at ridge 1, {error['0.1']:.2f} at 0.1, softmax {none:.2f} [d]",
            f"beyond a window: {far['written']:.1%} right, {far['none']:.1%} without a memory".replace("%", " %"),
        ),
        "choose-a-spec": (
            *(f"({'gap ' * (i == 0)}{gap} ±" for i, gap in enumerate(gaps)),
            f"{elu(3)} per character with `elu` (three seeds), {softmax:.3f} with softmax",
            f"predicting zero: {error['1']:.3f} at ridge 1, {error['0.1']:.3f} at ridge 0.1, softmax {none:.3f}",
            f"{far['written']:.1%} right with a memory, {far['none']:.1%} without one, {far['frozen']:.1%} if".replace(
                "%", " %"
            ),
        ),
        "local-linear-attention": (f"| {none:.3f} | {error['1']:.3f} at ridge 1, {error['0.1']:.3f} at ridge 0.1 |",),
    }
    says(expected)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_a_page_or_a_heading(page: Path) -> None:
    for target, section in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if section:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.M)
            assert section in {anchor(heading) for heading in headings}, f"{target}#{section}"


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_pages_use_the_words_of_the_glossary() -> None:
    for page in PAGES:
        if page.stem not in {*GENERATED, "glossary"} and not page.stem.endswith("-results"):
            assert not re.findall(OLD, page.read_text(encoding="utf-8")), page.name


def test_pages_name_what_is_registered() -> None:
    from regard.grammar import SolveStatus
    from regard.models import language_models, token_mixers

    registries = regard.registries()
    mechanisms = "".join(page.read_text(encoding="utf-8") for page in MECHANISMS)
    kinds = ("preset", "memory", "trend")
    assert [name for kind in kinds for name in registries[kind].names() if f"`{name}`" not in mechanisms] == []
    expected = {
        "product-key-memory": [f"`{name}`" for kind in ("memory", "step-rule") for name in registries[kind].names()],
        "hybrid-models": [f"`{name}`" for name in token_mixers.names()],
        "language-models": [f"| `{name}` |" for name in language_models.names()],
        "local-linear-attention": [
            *(f"| `{status.name}` |" for status in SolveStatus),
            *(f"| `{name}" for name in registries["solver"].names()),
        ],
    }
    for page, words in expected.items():
        assert [word for word in words if word not in text(page)] == [], page
