# One command from a fresh clone: `make test`. It needs Python 3.11 or newer with its venv module, nothing else.
#
#   make serve       install what serving needs, fetch a small assistant (93 MB), and serve it on http://127.0.0.1:8000
#   make test        install into .venv if needed, then run the tests        make check      all of these
#   make test-all    the tests with all cases and drawn runs of their grids, of which make test tries a sample
#   make lint        ruff: rules and format                                  make clean      remove caches, keep .venv
#   make types       mypy --strict                                           make distclean  remove .venv too
#   make contracts   imports run downward only                               make constraints  pin what .venv holds
#   make native      build the kernels again after a change in csrc          make test-sanitize  their C++ tests, sanitized
#   make docs        the documentation as a site in build/site/html
#   make test-isa    the kernels on emulated processors without AVX512 (needs qemu-user)
#   make test-arm    the kernels for ARM on emulated processors (needs qemu-user and g++-aarch64-linux-gnu)
#   make wheel       what users install, into dist/: the source distribution, a wheel with kernels for this processor
#                    family (or MACHINE=aarch64), a wheel without; make try-wheel installs it in an empty folder and serves
#
# Variables: MODEL and ARGS (make serve MODEL=/path/to/model ARGS="--port 9000"), PYTHON (interpreter for .venv),
# JOBS (test processes), PYTEST (extra arguments: make test PYTEST="-k plan"), PIP (extra arguments of pip install, for example an index of your own).

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCUMENTING := $(VENV)/.installed-for-docs
SERVING := $(VENV)/.installed-for-serving
MODEL ?=
ARGS ?=
PYTHON ?=
JOBS ?= 2
PYTEST ?=
PIP ?=

# Two test processes share the cores: a BLAS or torch that starts a thread per core in each only makes both slower.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
# Oracles must never go looking for models on the network.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests start a hundred interpreters. Where no bytecode may be written, each of them compiles all of Penstock again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test test-all lint types contracts docs check clean distclean constraints install native test-isa test-arm test-sanitize wheel try-wheel

help:
	@sed -n 's/^#   //p' Makefile

serve: $(SERVING)
	@set -e; model="$(MODEL)"; named=; \
	if [ -z "$$model" ] && model=$$($(BIN)/python tools/models.py smollm2-135m); then \
		named="--served-model-name smollm2-135m"; \
	fi; \
	exec $(BIN)/penstock serve $$model $$named $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

test-all: $(STAMP)
	PENSTOCK_TESTS=all $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-logo

docs: $(DOCUMENTING)
	$(BIN)/python tools/site.py

native: | $(BIN)/python
	$(BIN)/python setup.py -q build_ext --inplace

test-isa: native
	$(BIN)/python tools/native_checks.py isa

test-arm: | $(BIN)/python
	$(BIN)/python tools/native_checks.py arm

test-sanitize: native
	$(BIN)/python tools/native_checks.py asan
	$(BIN)/python tools/native_checks.py tsan

wheel: | $(BIN)/python
	$(BIN)/python tools/dist.py build $(if $(MACHINE),--machine $(MACHINE))

try-wheel: | $(BIN)/python
	$(BIN)/python tools/dist.py try dist/penstock-*-manylinux_*_$$(uname -m).whl

check: test lint types contracts docs

install: $(STAMP)

# Serving needs a dozen small packages and no torch; who has installed the tests has them too.
$(SERVING): pyproject.toml constraints.txt setup.py $(wildcard csrc/src/* csrc/include/*) | $(BIN)/python
	@if [ -f $(STAMP) ] && [ $(STAMP) -nt pyproject.toml ] && [ $(STAMP) -nt constraints.txt ]; then :; else \
		echo "==> installing into $(VENV)"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP) -c constraints.txt -e .; \
	fi
	@touch $@

# The stamp is newer than these files exactly if what they ask for has been installed, and the kernels are theirs.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard csrc/src/* csrc/include/*) | $(BIN)/python
	@echo "==> installing into $(VENV) (a few minutes the first time: the tests compare with torch)"
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP) -c constraints.txt -e '.[test]'
	@touch $@

# The site is made of text: nothing of Penstock has to be installed for it.
$(DOCUMENTING): pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP) -c constraints.txt zensical
	@touch $@

$(BIN)/python:
	@set -e; \
	fits='import sys; sys.exit(sys.version_info < (3, 11))'; \
	found=; \
	for name in $(PYTHON) python3 python python3.14 python3.13 python3.12 python3.11; do \
		if command -v "$$name" >/dev/null 2>&1 && "$$name" -c "$$fits" 2>/dev/null; then found="$$name"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Penstock needs Python 3.11 or newer; none was found. Install one, or name it: make test PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	if ! "$$found" -c 'import venv, ensurepip' 2>/dev/null; then \
		version=$$("$$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		echo "$$found cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
		echo "On Debian and Ubuntu: sudo apt install python$$version-venv. Elsewhere: install a complete Python." >&2; \
		exit 1; \
	fi; \
	echo "==> creating $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV)

constraints: $(STAMP)
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed -e '/^#/d' -e '/ @ /d' -e 's/+cpu$$//' | sort -f; \
	 } > constraints.new && mv constraints.new constraints.txt && touch $(STAMP)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) src/*.egg-info
