# The entrances to the project; `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin

# Options for pytest, as in: make test PYTEST_ARGS='-k pack -x'
PYTEST_ARGS ?=
# What to measure and how, as in: make bench BENCH_ARGS='warm --samples 15'
BENCH_ARGS ?=
# What to run of the wide corpora, as in: make corpus CORPUS_ARGS='sequences --seed 7'
CORPUS_ARGS ?=
# Options for the lock, as in: make lock LOCK_ARGS=--upgrade, or LOCK_ARGS='--upgrade-package rich'
LOCK_ARGS ?=
# The resolver that writes requirements/. It is fetched for `make lock` only.
UV := uv==0.13.9
LOCK := .lock/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --quiet \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links $(LOCK_ARGS)

.PHONY: help setup setup-demo setup-test demo test lint format bench corpus lock clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 14

setup: ## Install what DSec needs to run; its commands are then in .venv/bin
	scripts/setup base

setup-demo: ## Install what the demo needs too
	scripts/setup base demo

setup-test: ## Install what the tests need too
	scripts/setup

demo: setup-demo ## Show DSec at work on this machine
	$(BIN)/python scripts/demo.py

test: setup-test lint ## Check the code and run all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: ## Check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: ## Put the code in its form, and fix what can be fixed by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-demo ## Measure conversion, warm and cold reads beside their controls
	$(BIN)/python -m bench $(BENCH_ARGS)

corpus: setup-test ## Run the wide corpora: tars of other projects, real images, thousands of random layers
	$(BIN)/python -m corpus $(CORPUS_ARGS)

lock: ## Write requirements/ anew from pyproject.toml: released versions and their hashes, no addresses
	python3 -m venv .lock
	.lock/bin/python -m pip install --quiet $(UV)
	$(LOCK) pyproject.toml --extra dev --output-file requirements/dev.txt
	$(LOCK) pyproject.toml --constraint requirements/dev.txt --output-file requirements/runtime.txt
	echo pytest | $(LOCK) - --constraint requirements/dev.txt --output-file requirements/toolkit.txt
	! grep -nE '://|==[^ ]*\+' requirements/*.txt

clean: ## Remove what the targets above have made
	rm -rf .venv .lock .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
