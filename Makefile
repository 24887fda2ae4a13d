# Two commands on a fresh machine: `make demo` shows it working, `make test` proves it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
# Workers of the unit tests, and of the integration tests: those mostly wait for other processes, and one of them for etcd alone.
JOBS ?= 2
SIDE_JOBS ?= 5
# Where this is set every process compiles all that it imports, again and again; caches are ignored by git, and `make clean` knows them.
unexport PYTHONDONTWRITEBYTECODE
# More options for pytest: make unit ARGS="-k world -x"
ARGS ?=

.PHONY: help demo test quick check lint types unit fast beside stories etcd integration side alone nightly bench bench-smoke chaos campaign format clean

help: ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(READY) ## train a real model through three kinds of death
	$(PY) examples/demo.py

test: ## everything CI runs: check, unit, stories, integration
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory -j3 --output-sync=line beside alone
	$(MAKE) --no-print-directory side

# What computes, beside the tests that must be alone: those wait for the clock on more than a core, and what gives way is not felt.
# mypy has one core for a minute: it begins with the tests, so that at the end the other core does not wait for it.
beside:
	nice -n 19 $(MAKE) --no-print-directory types fast JOBS=3

quick: $(READY) ## check, and unit tests near what changed: at most 90 s
	$(PY) -m tools.quick -n $(JOBS) --maxschedchunk 1 $(ARGS)

check: lint types ## lint, format, types, import rules

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

types: $(READY)
	$(VENV)/bin/mypy

unit: $(READY) ## fast tests, in parallel
	$(PY) -m pytest tests/unit -m "not nightly" -n $(JOBS) $(ARGS)

# Both at once: starting and collecting is paid once.
fast: $(READY)
	$(PY) -m pytest tests/unit tests/chaos -m "not nightly" -n $(JOBS) $(ARGS)

# Where ARGS chooses none of a half, pytest says so by 5.
integration: ## tests with real processes: side by side, then those that must be alone
	$(MAKE) --no-print-directory -j1 side alone

side: $(READY)
	$(PY) -m pytest tests/integration -m "not alone and not nightly" -n $(SIDE_JOBS) --dist loadgroup $(ARGS) || test $$? = 5

alone: $(READY)
	$(PY) -m pytest tests/integration -m "alone and not nightly" $(ARGS) || test $$? = 5

nightly: $(READY) ## what `make test` leaves out, all three suites, and other Pythons; says what it ran
	$(PY) -m pip install --quiet --no-compile --group night --constraint constraints.txt
	$(PY) -m tools.nightly $(ARGS)

etcd: $(READY) ## those with a real etcd
	$(PY) -m pytest tests/integration/test_*etcd*.py -n $(SIDE_JOBS) $(ARGS)

bench-smoke: $(READY) ## every benchmark at its smallest size: does it still work?
	$(PY) -m pytest tests/integration/test_benchmarks.py -n $(SIDE_JOBS) $(ARGS)

bench: $(READY) ## every number we promise, ours and the peer's in turn
	@shopt -s nullglob; for one in benchmarks/bench_*.py; do echo "== $$one"; $(PY) "$$one" || echo "== $$one: exit $$?"; done

stories: $(READY) ## stories of faults in virtual time, and fixed seeds
	$(PY) -m pytest tests/chaos -m "not nightly" -n $(JOBS) $(ARGS)

chaos: stories ## the same, then 1,000 seeds of 64 nodes
	$(PY) -m tools.campaign chaos

campaign: $(READY) ## a long hunt for faults: make campaign NAME=storms ARGS="--jobs 5"
	@test -n "$(NAME)" || { $(PY) -m tools.campaign --help; exit 2; }
	$(PY) -m tools.campaign "$(NAME)" $(ARGS)

format: $(READY) ## rewrite what `make check` would complain about, where a machine can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove the environment and all caches
	rm -rf $(VENV) .venv-pythons build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Made anew when what it is made from changes. pip >= 25.1 knows dependency groups; older interpreters bring older ones.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1" --constraint constraints.txt
	@# What is imported is compiled when it first is: of 20,000 files most never are.
	$(PY) -m pip install --quiet --no-compile --editable ".[http,torch,etcd,k8s,ray,archive,diagnosis,lightning,huggingface]" --group dev --constraint constraints.txt
	@touch $@
