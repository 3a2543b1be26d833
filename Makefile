# Two commands do all the set-up on a fresh machine (Python 3.11, gcc, make; pip reaches PyPI):
#   make quickstart    trains a tiny student under two resident teachers and writes a report
#   make test          lint, types and every ordinary test
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: quickstart test lint types test-slow test-faults models format clean

quickstart: $(VENV)/.installed
	$(BIN)/understudy quickstart

# Two workers: most tests wait for processes of their own; a file's tests stay together.
test: lint types
	$(PYTEST) -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# Minutes each: long kill and resume trials, larger models.
test-slow: $(VENV)/.installed
	$(PYTEST) -m slow --timeout 1800

# Many seeded trials of every fault in the promises.
test-faults: $(VENV)/.installed
	$(PYTEST) -m faults --timeout 3600

# Trains the quickstart's models again, from nothing, into the package.
models: $(VENV)/.installed
	$(BIN)/python recipes/quickstart/make_models.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
