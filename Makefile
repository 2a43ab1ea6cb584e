# make run: set up and serve with the embedded voice.   make test: set up and test.   make bench: measure it, briefly.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/embedded.toml

.PHONY: run setup setup-test test bench check lint slow golden gpu clean

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

test: setup-test
	$(BIN)/python -m pytest -q -m "not slow and not bench"

bench: setup
	$(BIN)/rill bench --config $(CONFIG) --concurrency 1,2 --burst 4 --seconds 15

slow: setup-test
	$(BIN)/python -m pytest -q -m "slow and not bench"

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
