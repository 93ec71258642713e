# Two commands do everything on a fresh machine: `make train` and `make test`.

PYTHON ?= python3
# Two more than there are cores, because some tests wait; each takes a gigabyte of memory.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN || echo 2); echo $$((cores < 8 ? cores + 2 : 8)))
ARGS ?=
COVERAGE ?=

# Containers like to switch this off, but tests start hundreds of processes that read the same files.
unexport PYTHONDONTWRITEBYTECODE

python := .venv/bin/python
pip_install := $(python) -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
pytest := $(python) -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help train test quick full nightly siege cluster mutants lint types format docs bench wheel clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: .venv/installed  ## Install, train and test the default recipe (ARGS="train.epochs=3" changes it)
	@.venv/bin/isoscale train $(ARGS)
	@.venv/bin/isoscale test

test: .venv/installed-dev  ## Install the tools, and test every law, command and science, with faults at named moments
	@$(pytest) $(if $(COVERAGE),--cov --cov-report=) $(ARGS)

quick: .venv/installed-dev  ## Run the fast tests only: the inner loop
	@$(pytest) -m "not slow and not full and not nightly and not cluster" $(ARGS)

full: lint types  ## Check style and types, run all that `make test` leaves out, and the pages of the documentation
	@$(pytest) -m "full and not nightly and not cluster" $(if $(COVERAGE),--cov --cov-append --cov-report=term) $(ARGS)

nightly: .venv/installed-dev  ## Run what takes minutes: faults at random moments, a new seed each time
	@$(python) -m pytest -m nightly -s $(ARGS)

siege: .venv/installed-dev  ## Kill, fill disks and break input at random, and see that nothing is lost (hours, as root)
	@PYTHONPATH=. $(python) tests/nightly/kills.py --kills 1000
	@PYTHONPATH=. $(python) tests/nightly/full_disks.py --disks 200
	@PYTHONPATH=. $(python) tests/nightly/fuzz.py --minutes 60

cluster: .venv/installed-dev  ## Run the tests on a real Slurm and real MPI, where these are installed (as root)
	@$(pytest) -n 2 --dist loadfile -m "cluster and not nightly" $(ARGS)

mutants: .venv/installed-dev  ## Plant faults in copies of the source, and see which of them the tests find (hours)
	@$(python) tests/mutants/run.py --workers $(WORKERS) $(ARGS)

lint: .venv/installed-dev  ## Check style and formatting
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .

types: .venv/installed-dev  ## Check types
	@$(python) -m mypy

format: .venv/installed-dev  ## Repair style and formatting
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

docs: .venv/installed-dev  ## Build the documentation into site/, to be read in a browser
	@$(python) docs/make_reference.py
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict
	@echo "open site/index.html"

bench: .venv/installed-dev  ## Measure the cost of the training loop beside its peers
	@$(python) benchmarks/loop_overhead.py $(ARGS)

wheel: .venv/installed-dev  ## Build the wheel into dist/
	@rm -rf build
	@$(python) -m build --wheel --no-isolation
	@rm -rf build

clean:  ## Remove builds, caches and coverage data; keeps .venv and runs
	@rm -rf build dist site htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that a new environment gets: when it is there, the environment is whole.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || { \
	  echo "isoscale needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)."; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot create environments: its venv or ensurepip module is missing."; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; } >&2
	@echo "creating .venv"
	@$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/pip pyproject.toml constraints.txt
	@echo "installing isoscale (first time: a few minutes)"
	@$(pip_install) --editable .
	@touch $@

.venv/installed-dev: .venv/bin/pip pyproject.toml constraints.txt
	@echo "installing isoscale and the tools to test it (first time: a few minutes)"
	@$(pip_install) --editable '.[dev]'
	@touch .venv/installed $@
