# make train   set up and train the shipped tiny model on the CPU
# make test    set up and run all tests        make check   lint, types, import arrows
# make bench   run the benchmarks              make bench B=name   run one
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
B ?= all
# Two OpenMP pools that spin on two cores make each other ten times slower.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: train test check bench clean

train: $(VENV)/.installed
	rm -rf runs/quickstart
	$(BIN)/rlcore train experiment=quickstart run.dir=runs/quickstart

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(B)

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@
