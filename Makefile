# Everything runs in .venv; each target first installs whatever is missing there.
PYTHON ?= python3
# Extra options for pip, for example: make setup PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Sums and functions as another processor computes them: other last bits, and soon another course of the same run.
OTHER_CPU := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
# A worker that crashed is not started again: with --dist loadfile xdist then waits for its tests for ever.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --quiet -c constraints.txt $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test portable lint format clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with everything for tests and the demo

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "surefoot needs Python 3.11 or newer; set one with: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch"
	@$(PIP) torch
	@echo "installing surefoot with its test, demo and integration dependencies (two minutes or so)"
	@$(PIP) -e ".[alarms,dev,hf,lightning,plots,tensorboard,train,wandb]"
	@touch $@

demo: $(STAMP) ## watch a training run survive three planted faults (about two minutes)
	@$(BIN)/python -m surefoot.demo

test: lint ## lint, then the whole test suite, a file a core
	@$(PYTEST)

portable: $(STAMP) ## the tests that train, again with another processor's arithmetic
	@$(OTHER_CPU) $(PYTEST) -m trains

lint: $(STAMP) ## style, types, import contracts
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/basedpyright --level error
	@$(BIN)/lint-imports --no-logo

format: $(STAMP) ## apply the code style
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

clean: ## remove .venv, caches and demo output
	@rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist runs out
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
