# make demo | test | check | bench | clean: each makes .venv first, once.
# torch is pinned: unpinned, pip takes a CUDA build of several GB.
PYTHON := $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH  ?= torch==2.13.0
EXTRA  ?= lightning pytorch-lightning
NATIVE := $(wildcard core/native/*)

.DEFAULT_GOAL := help
.PHONY: help venv demo test check bench clean

help:
	@echo "make demo   a real 2-process job on CPU, tuned by dpro (about 5 minutes)"
	@echo "make test   all tests"
	@echo "make check  ruff, mypy, the floors of the design"
	@echo "make bench  replay speed, overhead, sweep of bucket sizes"
	@echo "make clean  what was built, .venv included"

venv: $(STAMP)

$(STAMP): setup.py pyproject.toml dpro_autoload.pth $(NATIVE)
	@test -x $(BIN)/python || { echo "[venv] $(PYTHON) -m venv $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "[venv] $(TORCH) $(EXTRA)"
	@$(PIP) install $(TORCH) $(EXTRA)
	@echo "[venv] dpro, with its native engine"
	@$(PIP) install -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m benchmarks.testbed check --install --brief
	@$(BIN)/python -m benchmarks.demo

test: $(STAMP)
	@$(BIN)/python -m benchmarks.testbed check --install --brief
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_floors.py

bench: $(STAMP)
	@$(BIN)/python -m benchmarks.replay_speed --ops 100000 --json
	@$(BIN)/python -m benchmarks.overhead --json
	@$(BIN)/python -m benchmarks.testbed run --pin -- $(BIN)/python -m benchmarks.sweep

clean:
	@rm -rf $(VENV) build dist *.egg-info core/dpro/*.so
