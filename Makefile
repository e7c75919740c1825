# `make demo` and `make test` do everything on a machine with Python 3.11 or newer and a C compiler.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
NEWEST ?= .venv-newest
OLDEST ?= .venv-oldest
DOCS ?= .venv-docs

BIN := $(VENV)/bin
# worksteal gives each worker neighbouring tests, which share what module fixtures build (models and checkpoints).
PYTEST_OPTIONS := --numprocesses $(WORKERS) --dist worksteal
PYTEST := $(BIN)/python -m pytest $(PYTEST_OPTIONS)

# What the libraries of clients may break.
CLIENTS ?= tests/integrations tests/models/test_parity.py tests/serve tests/embedding tests/adapters tests/text \
	tests/train/test_preference_trl.py tests/train/test_grpo_loss.py tests/test_from_transformers.py tests/test_docs.py \
	tests/test_quantized_models.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
unexport PYTHONDONTWRITEBYTECODE  # or each process that a test starts compiles ligerzoo again
.PHONY: help demo test test-thorough test-newest test-oldest test-real lint docs clean

help:
	@echo 'make demo           install, then run both demos (no GPU needed)'
	@echo 'make test           install, then run the test suite (10 to 18 minutes on 2 cores)'
	@echo 'make test-thorough  the same with all combinations of parameters and the slow tests'
	@echo 'make test-newest    the tests of integrations and clients with the newest torch, transformers, TRL, ...'
	@echo 'make test-oldest    the same with the oldest versions that pyproject.toml allows'
	@echo 'make test-real      tests with real weights and tokenizers, which it downloads into ~/.cache/ligerzoo-real'
	@echo 'make lint           ruff, mypy, phrases that our prose avoids, and limits of the structure'
	@echo 'make docs           the documentation site with the reference, in build/site/html'
	@echo 'make clean          remove $(VENV) and all caches'
	@echo
	@echo 'Options: PYTHON=python3.12 (the Python to use), VENV=.venv (the environment), WORKERS=2 (test processes)'

demo: $(VENV)/installed
	$(BIN)/ligerzoo demo
	$(BIN)/ligerzoo demo --vision

# The first run executes the Triton kernels on the CPU, in Triton's interpreter. The second tests everything else. The
# thorough one also runs the tests of kernels in plain torch; those of fp64 run so within the interpreter, too.
test: $(VENV)/installed-dev
	TRITON_INTERPRET=1 $(PYTEST) -m interpreted tests/kernels
	$(PYTEST) -m 'not interpreted'

test-thorough: $(VENV)/installed-dev
	TRITON_INTERPRET=1 $(PYTEST) --run-slow tests/kernels
	$(PYTEST) --run-slow

# Upgrades at each run. TORCH=pinned keeps torch at the version of constraints.txt; CLIENTS are the tests.
test-newest:
	@PYTHON='$(PYTHON)' tools/install.sh '$(NEWEST)' test,integrations,serve newest
	$(NEWEST)/bin/python -m pytest $(PYTEST_OPTIONS) $(CLIENTS)

# An older Triton refuses code that a newer one compiles.
test-oldest: $(OLDEST)/installed-oldest
	$(OLDEST)/bin/python -m pytest $(PYTEST_OPTIONS) $(CLIENTS)
	$(OLDEST)/bin/python -m pytest $(PYTEST_OPTIONS) --run-slow tests/kernels/test_compiling.py

test-real: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile -rs --run-real tests/real

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tools.prose
	$(BIN)/python -m tools.structure

docs: $(DOCS)/installed-docs
	$(DOCS)/bin/python -m tools.site

clean:
	rm -rf $(foreach venv,$(VENV) $(NEWEST) $(OLDEST) $(DOCS),$(venv) $(venv).incomplete) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/installed: constraints.txt pyproject.toml
	@PYTHON='$(PYTHON)' tools/install.sh '$(VENV)' vision
	@touch $@

$(VENV)/installed-dev: constraints.txt pyproject.toml
	@PYTHON='$(PYTHON)' tools/install.sh '$(VENV)' test,dev,integrations,serve
	@touch $@

$(OLDEST)/installed-oldest: pyproject.toml
	@PYTHON='$(PYTHON)' tools/install.sh '$(OLDEST)' test,integrations,serve oldest
	@touch $@

$(DOCS)/installed-docs: constraints.txt pyproject.toml
	@PYTHON='$(PYTHON)' tools/install.sh '$(DOCS)' docs
	@touch $@
