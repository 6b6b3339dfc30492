# make test   set up everything and run lint, types, architecture and tests
# make demo   the best thing the product can do so far, in a minute
# make bench  side by side with SQLite, LMDB, RocksDB and a plain file; writes out/bench.json
# make soak   what takes longer: more fuzz and more state-machine steps

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c .ci/constraints.txt
ROOMS := storage actors scenarios pipeline lab
TYPED := $(foreach room,$(ROOMS),-p brokerlab.$(room)) -p benchmarks

.PHONY: test lint types architecture check demo bench soak clean
.DELETE_ON_ERROR:

test: check
	$(BIN)/pytest -n 2

check: lint types architecture

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy $(TYPED)
	$(BIN)/mypy -p tests

architecture: $(VENV)/dev.stamp
	$(BIN)/lint-imports

demo: $(VENV)/dev.stamp
	$(BIN)/python -m brokerlab.lab.demo

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks

soak: $(VENV)/dev.stamp
	BROKERLAB_SOAK=1 $(BIN)/pytest -n 2 -m "soak or not soak"

$(VENV)/dev.stamp: pyproject.toml .ci/constraints.txt
	@test -n "$(PYTHON)" || { echo "brokerlab needs Python 3.11 or newer with venv and pip (Debian: apt-get install python3-venv)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/bench.stamp: $(VENV)/dev.stamp
	$(PIP) -e ".[dev,bench]"
	@touch $@

clean:
	rm -rf $(VENV) build out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
