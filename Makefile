# `make demo` and `make test` set up everything they need; the second time the set-up is a no-op.
PYTHON ?= python3
# torch goes first, so that no later dependency can pull another build. For a CUDA build:
#   make setup TORCH="torch --index-url https://download.pytorch.org/whl/cu130"
TORCH ?= torch==2.13.0
EXTRAS ?= lm,recipes,cpu,gpt2,dev
# Test processes side by side, one thread each.
WORKERS ?= 2
# Compiled files are kept whatever the shell says: without them each test process compiles all of the source again.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(shell printf '%s' '$(TORCH) $(EXTRAS)' | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-peers test-hf docs lint format typecheck loops clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## prepare .venv: torch first, then regard with its extras

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

demo: setup ## train small models on real text and on recall, and write tables, figures and report.html
	$(BIN)/regard demo $(ARGS)

test: setup ## lint, types and the tests (minutes)
	@$(MAKE) --no-print-directory -j 2 lint typecheck loops
	$(TEST) $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal -q $(ARGS)

test-all: setup ## every test (one to two hours)
	@$(MAKE) --no-print-directory -j 2 lint typecheck loops
	$(TEST) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q $(ARGS)

test-peers: ## check regard with TRL, PEFT, lm-eval and others, in an environment of their own
	$(MAKE) setup VENV=.venv-peers EXTRAS='$(EXTRAS),peers'
	$(TEST) .venv-peers/bin/python -m pytest tests/peers -q $(ARGS)

test-hf: ## run transformers' own tests of models over regard's; TRANSFORMERS_SOURCE=CHECKOUT adds those of generate
	$(MAKE) setup VENV=.venv-peers EXTRAS='$(EXTRAS),peers'
	$(TEST) HF_HUB_OFFLINE=1 .venv-peers/bin/python -m pytest -c tests/hf/pytest.ini tests/hf -q $(ARGS)

docs: ## build the documentation into site/, to be read from disk
	$(MAKE) setup EXTRAS='$(EXTRAS),docs'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup ## mypy
	$(BIN)/mypy

loops: setup # compile the numba loops once, for all test processes
	$(TEST) $(BIN)/python tests/compile_loops.py

format: setup ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-peers .pytest_cache .mypy_cache .ruff_cache .nox dist build site
