"""Tests on every supported Python and with the oldest and newest dependencies; the wheel with each extra; the site.

nox --list                                 # what there is; Pythons that are not installed are skipped
nox --session "wheel-3.12(extra='lm')"     # install the wheel with an extra in a clean environment and use it
nox --session "versions-3.10(pins='oldest')"

TORCH=... gives the requirement of torch, such as a build for CPUs: TORCH="torch==2.13.0+cpu" nox ...
"""

from __future__ import annotations

import os

import nox
from packaging.requirements import Requirement

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = nox.project.python_versions({"project": PROJECT})
EXTRAS = ["", *(name for name in PROJECT["optional-dependencies"] if name not in ("dev", "peers"))]
"""Extras whose wheel is checked; the others are environments for tests."""
TESTED = ("lm", "recipes", "cpu", "gpt2", "dev")
nox.options.sessions = ["versions", "wheel", "docs"]
nox.options.error_on_missing_interpreters = False


def oldest(package: str, python: str) -> str:
    """Return the requirement of the oldest release of a package that pyproject.toml allows for a Python."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    known = [Requirement(line) for lines in groups for line in lines]
    fits = [r for r in known if r.name == package and (not r.marker or r.marker.evaluate({"python_version": python}))]
    (version,) = {bound.version for each in fits for bound in each.specifier if bound.operator == ">="}
    return f"{package}=={version}.*"


def install_torch(session: nox.Session, requirement: str = "torch") -> str:
    """Install torch before all others, so that none of them chooses its build; return the requirement."""
    requirement = os.environ.get("TORCH", requirement)
    session.install(requirement)
    return requirement


@nox.session(python=PYTHONS)
@nox.parametrize("pins", ["oldest", "newest"])
def versions(session: nox.Session, pins: str) -> None:
    """Run the tests with the oldest or newest torch and transformers; arguments go to pytest."""
    names = ("torch", "transformers")
    torch, transformers = (oldest(name, session.python) if pins == "oldest" else name for name in names)
    torch = install_torch(session, torch)
    older = ["numpy<2.4"] if pins == "oldest" else []  # the interpreter of Triton 3.6, which comes with torch 2.10
    session.install(f".[{','.join(TESTED)}]", torch, transformers, *older)
    arguments = session.posargs or ["-m", "not slow", "-n", "2", "--dist", "worksteal", "-q"]
    session.run("python", "-m", "pytest", *arguments, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=PYTHONS)
@nox.parametrize("extra", EXTRAS)
def wheel(session: nox.Session, extra: str) -> None:
    """Build the wheel, install it with one extra in a clean environment, and use what the extra brings."""
    folder = session.create_tmp()
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".")
    (built,) = (name for name in os.listdir(folder) if name.endswith(".whl"))
    install_torch(session)
    session.install(os.path.join(folder, built) + (f"[{extra}]" if extra else ""))
    script = os.path.abspath("tests/installed_wheel.py")
    session.chdir(folder)  # the sources are not importable from here
    session.run("python", "-I", script, extra)  # -I: tests/ has folders that are named like packages


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site, and run the notebooks."""
    install_torch(session)
    session.install(".[lm,docs]", "pytest", "pytest-timeout", "jaxtyping", "beartype")
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "-m", "pytest", "-q", "tests/test_notebooks.py", env={"OMP_NUM_THREADS": "1"})
