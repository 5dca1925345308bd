# Two commands for a newcomer: `make lab` and `make test`. Each sets up .venv first if it is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The torch runtime and the engines of the torch methods: gigabytes that `make lab` does not need.
READY_ENGINES := $(VENV)/ready-engines
# llama.cpp without its multimodal part compiles in two thirds of the time. Set CMAKE_ARGS for CUDA: see README.
CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
export CMAKE_ARGS
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN)
# Canonical corpora beside the checkout are used where they are.
ifneq ($(wildcard ../shared/data/text),)
export QUANTLAB_DATA ?= $(abspath ../shared/data/text)
endif

.PHONY: help setup setup-engines lab test check lint type bench docs-check clean

help:
	@echo "make lab         set up, fetch the demo model, quantize, benchmark, measure perplexity, print the table"
	@echo "make test        set up, with torch and the engines, and run all tests"
	@echo "make check       lint, types, documentation and tests: what every commit must pass"
	@echo "make bench       the benchmarks of quantlab itself, as ratios"
	@echo "make setup setup-engines lint type docs-check clean"

setup: $(READY)

setup-engines: $(READY_ENGINES)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); ok or sys.exit("error: quantlab needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d\nhint: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@command -v cc >/dev/null || { echo "error: no C compiler (cc)" >&2; echo "hint: Debian: apt install build-essential; Mac: xcode-select --install" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing; llama.cpp is compiled, which takes some minutes the first time."
	$(BIN)/pip install --quiet --editable '.[gguf,data,dev]'
	@touch $@

$(READY_ENGINES): $(READY)
	@echo "Installing torch and the quantization engines, which takes some minutes the first time."
	$(BIN)/pip install --quiet --editable '.[gguf,data,torch,engines,dev]'
	@touch $@

lab: $(READY)
	$(BIN)/quantlab run recipes/cpu-lab.yaml

test: $(READY_ENGINES)
	$(BIN)/pytest

check: lint type docs-check test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

type: $(READY)
	$(BIN)/mypy

docs-check: $(READY)
	$(BIN)/python tests/docs_check.py

bench: $(READY)
	$(BIN)/python tests/benchmarks.py
	$(BIN)/python tests/engine_benchmarks.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
