# `make demo` and `make test` do everything on a machine with Python 3.11 or newer and a C compiler.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
# worksteal gives each worker neighbouring tests, which share what module fixtures build (models and checkpoints).
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
unexport PYTHONDONTWRITEBYTECODE  # or each process that a test starts compiles ligerzoo again
.PHONY: help demo test test-thorough lint clean

help:
	@echo 'make demo           install, then run both demos (no GPU needed)'
	@echo 'make test           install, then run the test suite (about 13 minutes on 2 cores)'
	@echo 'make test-thorough  the same with all combinations of parameters and the slow tests'
	@echo 'make lint           ruff, mypy and the phrases that our prose avoids'
	@echo 'make clean          remove $(VENV) and all caches'
	@echo
	@echo 'Options: PYTHON=python3.12 (the Python to use), VENV=.venv (the environment), WORKERS=2 (test processes)'

demo: $(VENV)/installed
	$(BIN)/ligerzoo demo
	$(BIN)/ligerzoo demo --vision

# The first run executes the Triton kernels on the CPU, in Triton's interpreter. The second tests everything else.
test: $(VENV)/installed-dev
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels
	$(PYTEST)

test-thorough: $(VENV)/installed-dev
	TRITON_INTERPRET=1 $(PYTEST) --run-slow tests/kernels
	$(PYTEST) --run-slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tools.prose

clean:
	rm -rf $(VENV) $(VENV).incomplete build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/installed: constraints.txt pyproject.toml
	@PYTHON='$(PYTHON)' tools/install.sh '$(VENV)' vision
	@touch $@

$(VENV)/installed-dev: constraints.txt pyproject.toml
	@PYTHON='$(PYTHON)' tools/install.sh '$(VENV)' test,dev,integrations,serve
	@touch $@
