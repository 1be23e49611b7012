"""Version, changelog, citation, extras and workflows say the same."""

import importlib
import re
import runpy
import sys
import zipfile
from pathlib import Path

import installed_wheel
import pytest
import yaml
from programs import python

import regard
from regard.registry import Registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = ROOT / ".github" / "workflows"


def read(name: str) -> dict:
    return yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))


def test_the_version_is_the_one_of_the_changelog_and_the_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.findall(r"^## \[(\d\S*)\] - (\S+)$", changelog, flags=re.M)[0]
    assert latest == (regard.__version__, str(citation["date-released"]))
    assert str(citation["version"]) == regard.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_release_notes_are_the_section_of_a_version() -> None:
    maker = runpy.run_path(str(ROOT / ".github" / "release_notes.py"))
    found = maker["notes"](regard.__version__)
    assert found.startswith("The first release.") or "### " in found
    assert "## [" not in found
    with pytest.raises(SystemExit, match="write it before the release"):
        maker["notes"]("99.0.0")


def test_pythons_are_those_of_the_classifiers() -> None:
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert f">={named[0]}" == PROJECT["requires-python"]
    assert read("ci")["jobs"]["wheel"]["strategy"]["matrix"]["python"] == named
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named


def test_every_extra_is_checked_after_an_install() -> None:
    assert set(installed_wheel.CHECKS) == {"", *PROJECT["optional-dependencies"]} - {"dev", "peers"}
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [name for name in PROJECT["optional-dependencies"] if f"`{name}`" not in page] == []


def test_the_workflows_run_what_a_developer_runs() -> None:
    steps = [step for name in ("ci", "release") for job in read(name)["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert ".ci/run" in commands
    assert "make docs" in commands
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    for name in ("ci", "release"):
        assert read(name)["jobs"]["test"]["steps"][-1] == {"run": ".ci/run"}


@pytest.mark.slow
def test_a_wheel_holds_the_packages_alone(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built without a network; `pip install hatchling`")
    python("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT)
    (built,) = tmp_path.glob("regard-*.whl")
    names = zipfile.ZipFile(built).namelist()
    packages = {"regard", "regard_recipes", f"regard-{regard.__version__}.dist-info"}
    assert {name.split("/")[0] for name in names} == packages
    assert "regard/py.typed" in names
    templates = {f"regard/inspect/templates/{path.name}" for path in (ROOT / "src/regard/inspect/templates").iterdir()}
    assert templates <= {*names}
    assert not [name for name in names if name.endswith((".pyc", ".png"))]


@pytest.mark.slow
def test_the_site_is_built_and_needs_no_network(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package, reason="the extra `docs` brings it")
    python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path, cwd=ROOT)
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) > 100
    sources = r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(https?:[^\"]*)"
    styles = r"<link[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*href=\"(https?:[^\"]*)"
    for path, text in pages.items():
        assert re.findall(sources, text) + re.findall(styles, text) == [], path
    reference = "".join(text for path, text in pages.items() if path.parent.name == "api")
    for module in ("regard", "regard.nn", "regard.models", "regard.inspect", "regard.tasks", "regard.training"):
        for name in importlib.import_module(module).__all__:
            registry = isinstance(getattr(sys.modules[module], name), Registry)  # without a text of their own
            if not registry and name not in ("__version__", "checks"):
                found = re.search(rf'id="regard[\w.]*\.{name}"', reference)
                assert found, f"{module}.{name} is not in the API reference"
