# make run: set up and serve with the embedded voice.   make test: set up and test.   make bench: measure it, briefly.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/embedded.toml

.PHONY: run setup setup-test test bench check lint slow soak fuzz agents golden gpu clean

run: setup
	$(BIN)/rill serve --config $(CONFIG)

setup: $(VENV)/.installed

setup-test: $(VENV)/.installed-test

# Each stamp holds until pyproject.toml changes, so a second call is a matter of seconds.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# Two at a time, each file in one process: servers of a module are started once.
test: setup-test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not bench"

bench: setup
	$(BIN)/rill bench --config $(CONFIG) --concurrency 1,2 --burst 4 --seconds 15

slow: setup-test
	$(BIN)/python -m pytest -q -m "slow and not bench"

# Six minutes by default: five on the scripted engine, a fifth of the load on the embedded voice.
SOAK_S ?= 300
soak: setup-test
	PYTHONPATH=. $(BIN)/python tests/soak/soak.py --seconds $(SOAK_S)

FUZZ_S ?= 3600
fuzz: setup-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz_wire.py -max_total_time=$(FUZZ_S)

# The real agents' frameworks, which are large: their own tests are skipped without them.
agents: setup-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[agents]'
	$(BIN)/python -m pytest -q tests/integrations

golden: setup-test
	$(BIN)/python -m pytest -q -m golden

gpu: setup-test
	$(BIN)/python -m pytest -q -m gpu

lint: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
