# Every target creates the virtual environment if it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all test-numerics test-faults test-oracles test-smp lint format bench clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(STAMP)  ## train a small PolaFormer and its softmax twin on digits and compare them, about two minutes
	$(BIN)/polaformer demo

test: $(STAMP)  ## style, types and the whole default test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(STAMP)  ## everything but test-faults: the default suite, whole parametrised families and the numerical sweeps
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile full -m 'not faults'

test-numerics: $(STAMP)  ## the long numerical sweeps (about a minute on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m numerics
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile full -k test_law

test-faults: $(STAMP)  ## training runs killed at every step, every system call of a save and random instants (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m faults

test-oracles: $(STAMP)  ## regenerate the rivals' reference tensors with third-party libraries (installed on demand) and compare
	$(BIN)/python -m pip install --constraint constraints.txt --group oracles
	ORACLES=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/attention/test_libraries.py

test-smp: $(STAMP)  ## our backbones in segmentation_models_pytorch (installed on demand)
	$(BIN)/python -m pip install --constraint constraints.txt --group smp
	SMP=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m smp tests/tasks/segmentation/test_smp.py

lint: $(STAMP)  ## ruff and mypy alone
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(STAMP)  ## time the operator against the published form and softmax
	$(BIN)/polaformer bench op

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed but $(PYTHON) is %d.%d; run for instance: make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[train,data]" --group dev
	touch $@
