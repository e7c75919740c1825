# `make demo` and `make test` do everything on a machine that has Python 3.11 or newer and a C compiler.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.DELETE_ON_ERROR:
.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(BIN)/ligerzoo demo
	$(BIN)/ligerzoo demo --vision

# The first run puts the Triton kernels themselves on the CPU, through Triton's interpreter; the second tests everything else.
test: $(VENV)/installed-dev
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) tests/kernels
	$(BIN)/python -m pytest --numprocesses $(WORKERS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

# torch comes first, so that its pin is what everything after it finds in place.
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "ligerzoo needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	$(PIP) --editable '.[vision]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/torch pyproject.toml
	$(PIP) --editable '.[test,dev]'
	@touch $@
