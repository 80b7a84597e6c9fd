# Every target works from a fresh clone and may be repeated; `make help` lists them.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
FRAMES ?= 1000000
MINUTES ?= 5
PROCESSES ?= 2

# The first Python that is new enough: macOS's own python3 may be older than what Homebrew brought.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench fuzz chaos pictures lint format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## a virtual environment in .venv with everything in it

$(STAMP): pyproject.toml deploy/hatch_build.py deploy/setup.sh
	@sh deploy/setup.sh "$(PYTHON)" "$(VENV)"
	@touch $@

demo: $(STAMP)  ## two programs that share one daemon and one model
	@$(BIN)/stateroom model add demo
	@$(BIN)/stateroom demo

test: $(STAMP)  ## all tests; ARGS="-k name" picks some
	@$(BIN)/python -m pytest -n $(PROCESSES) --no-loadscope-reorder $(ARGS)

bench: $(STAMP)  ## every figure that the README claims
	@$(BIN)/python -m benchmarks $(ARGS)

fuzz: $(STAMP)  ## fuzzes decode and validate; FRAMES=1000000
	@$(BIN)/python -m pip install -q "atheris>=2.3,<4" 2>/dev/null || true
	@$(BIN)/python -m tests.fuzz --frames $(FRAMES) $(ARGS)

chaos: $(STAMP)  ## real clients while everything is killed, filled and corrupted; MINUTES=5
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(ARGS)

pictures: $(STAMP)  ## what README.md and docs/ show, drawn again from the code and from real runs
	@$(BIN)/python -m docs.pictures.draw

lint: $(STAMP)  ## style, types and who imports whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_layering.py

format: $(STAMP)  ## rewrites the sources in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## removes what the targets above made, but for the model cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
