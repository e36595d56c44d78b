# `make demo` and `make test` need Python 3.11+ and make; everything else they set up in .venv, once.
PYTHON ?= python3
# `make test TORCH=oldest`, `newest` or a release: in an environment of its own, next to .venv.
TORCH  ?=
NEEDS  := tests/releases/requirements-
oldest := $(shell sed -n 's/^torch==//p' $(NEEDS)oldest.txt)
newest := $(shell sed -n 's/^torch==//p' $(NEEDS)newest.txt)
NAMED  := $(if $(filter oldest newest,$(TORCH)),$($(TORCH)),$(TORCH))
ifneq ($(NAMED),$(shell printf '%s\n' '$(NAMED)' | grep -Ex '[0-9]+[.][0-9]+[.][0-9]+'))
$(error TORCH=$(TORCH) must be oldest, newest or a release such as $(newest))
endif
VENV   := .venv$(NAMED:%=-%)
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check
SAY    := @printf '\033[1m== %s\033[0m\n'
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
export MYPYPATH = $(VENV)/src
# the tests start hundreds of processes, and each would compile its modules again
unexport PYTHONDONTWRITEBYTECODE

# A fresh .venv gets the newest torch on a machine with an NVIDIA GPU. On another it gets exactly one release, before
# the package asks for any: where pip knows a CPU build of it, no CUDA packages come.
FRESH := 2.13.0
CHOSEN = $(or $(NAMED),$(if $(shell command -v nvidia-smi),,$(FRESH)))
# the oldest and the newest come with what else they need
NAMED_FILE := $(patsubst %,-r $(NEEDS)%.txt,$(strip $(foreach each,oldest newest,$(if $(filter $($(each)),$(NAMED)),$(each)))))

# Each process takes half of the tests in order, so that a module's fixtures are made once; the first to finish takes half of what the other has left.
TWO_PROCESSES := -n 2 --dist worksteal

# Tests of servers wait for processes that start and end; what never waits, lint and the kernels in the interpreter, takes
# those moments at a low priority. What it said follows. Each part runs to its end; the last line names those that failed,
# and the whole fails with any of them. $(1), $(2): further options of the kernels' run and of the others'. Coverage of the
# kernels' run lies in a file of its own, as both runs remove what is left of theirs. An interrupt ends all parts.
define run_tests
@said=$$(mktemp -d) && trap 'kill $$lint $$kernels 2>/dev/null; rm -rf $$said' EXIT && trap 'exit 130' INT TERM; failed=; \
torch=$$($(PY) -c 'from importlib.metadata import version; print(version("torch").split("+")[0])'); \
printf '\033[1m== torch %s in %s; once more with it: make %s TORCH=%s\033[0m\n' $$torch $(VENV) $@ $$torch; \
nice $(MAKE) --no-print-directory lint >$$said/lint 2>&1 & lint=$$!; \
TRITON_INTERPRET=1 COVERAGE_FILE=.coverage-kernels nice -n 19 $(PY) -m pytest tests/ops -m interpret $(TWO_PROCESSES) $(1) \
>$$said/kernels 2>&1 & kernels=$$!; \
printf '\033[1m== %s\033[0m\n' 'tests 1/2: everything but kernels in Triton'\''s interpreter'; \
$(PY) -m pytest -m 'not interpret' $(TWO_PROCESSES) $(2) || failed='tests 1/2'; \
wait $$lint || failed="lint $$failed"; lint=; cat $$said/lint; \
printf '\033[1m== %s\033[0m\n' 'tests 2/2: kernels in Triton'\''s interpreter'; \
wait $$kernels || failed="$$failed tests 2/2"; kernels=; cat $$said/kernels; \
test -z "$$failed" || { printf '\033[1m== failed with torch %s: %s\033[0m\n' $$torch "$$failed"; exit 1; }
endef

.PHONY: help demo test test-all test-clients wheel lint format docs setup clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed  ## compile the embedded demo model and answer one batch with four adapters
	$(SAY) 'demo'
	@$(VENV)/bin/sidestream demo

test: $(VENV)/.installed-test  ## ruff, mypy, import contracts, then the tests, each kernel compiled in one configuration
	$(call run_tests,,)

test-all: $(VENV)/.installed-test  ## what runs before a release: every configuration and case, and a coverage report
	@rm -f .coverage .coverage.* .coverage-*
	$(call run_tests,--exhaustive --cov --cov-report=,--exhaustive --cov --cov-report=)
	@$(PY) -m coverage combine --quiet --append .coverage-kernels
	@$(PY) -m coverage report --skip-covered

test-clients: $(VENV)/.installed-test  ## other people's clients against a server, or some: CLIENTS='openai langchain'
	@PYTHONPATH=tests $(PY) tests/clients/run.py $(CLIENTS)

wheel: $(VENV)/.installed-test  ## build dist/*.whl from what git tracks
	$(SAY) 'wheel'
	@rm -rf build && mkdir -p build dist
	@git ls-files -z | xargs -0 cp --parents -t build
	@cd build && ../$(PY) -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation --quiet -w ../dist .
	@rm -rf build && ls dist

lint: $(VENV)/.installed-test  ## ruff, mypy and the contracts of imports
	$(SAY) 'ruff'
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .
	$(SAY) 'mypy'
	@$(PY) -m mypy
	$(SAY) 'imports'
	@PYTHONPATH=$(VENV)/src $(VENV)/bin/lint-imports --no-cache --no-logo

format: $(VENV)/.installed-test  ## let ruff format, and fix what it can
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

docs: $(VENV)/.installed-test  ## build the site of docs/ into site/, links checked
	$(SAY) 'docs'
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

setup: $(VENV)/.installed-test  ## only set .venv up

clean:  ## remove caches, builds and the demo's dump (.venv stays)
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* .coverage-* htmlcov sidestream_dump
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(PY):
	$(SAY) 'setting up $(VENV)'
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Sidestream needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77' wheel

# mypy and lint-imports find the package by its import name through .venv/src/sidestream, as the repository's root is the package.
$(VENV)/.installed: pyproject.toml | $(PY)
	$(SAY) 'installing torch'
	@$(PY) -m pip show --quiet torch 2>/dev/null || $(PIP) $(or $(NAMED_FILE),torch$(CHOSEN:%===%))
	$(SAY) 'installing Sidestream and its requirements'
	@$(PIP) 'setuptools>=77' wheel
	@$(PIP) --no-build-isolation -e .
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/sidestream
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(SAY) 'installing what the tests need'
	@$(PIP) --no-build-isolation -e '.[docs,test,lint]'
	@touch $@
