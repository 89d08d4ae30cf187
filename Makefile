# make demo | test | check | bench | clean. Each makes .venv first, once, with what it needs.
# torch is pinned: left open, pip takes a CUDA build of several GB.
PYTHON := $(shell command -v python3.11 || command -v python3)
VENV   := .venv
# Every framework, Horovod and BytePS; the slow builds are cached outside the checkout, once per machine.
BACKENDS := .venv-backends
# TensorFlow of today with Keras 3, for the tests of it.
KERAS3 := .venv-keras3
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0
# --no-compile: what is never imported need not be compiled; that is most of torch.
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-compile
# Tests side by side; what shares processes stays together (tests/conftest.py).
JOBS   ?= 2
BUILT  := setup.py pyproject.toml dpro_autoload.pth $(wildcard core/native/*)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean testbed backends

help:
	@echo "make demo   a real 2-process job on CPU, tuned by dpro (about 5 minutes)"
	@echo "make test   all tests, two at a time (JOBS=1: one by one); ARGS=... goes to pytest"
	@echo "make check  ruff, mypy, the floors of the design"
	@echo "make bench  replay speed, overhead, sweep of bucket sizes"
	@echo "make backends  .venv-backends: all frameworks, Horovod and BytePS (20 minutes once, then from a cache)"
	@echo "make clean  removes what was built, the environments included"

$(VENV)/.run: $(BUILT)
	@test -x $(BIN)/python || { echo "[venv] $(PYTHON) -m venv $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "[venv] $(TORCH), lightning, dpro with its native engine"
	@$(PIP) $(TORCH) lightning -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "[venv] pytorch-lightning, pytest, ruff, mypy, and what the benchmarks of placement compare with"
	@$(PIP) $(TORCH) pytorch-lightning -e '.[dev,bench]'
	@touch $@

$(BACKENDS)/.run: $(BUILT) tests/backends/build.py tests/backends/byteps_build.py $(shell find tests/backends/byteps -name '*.[chp]*' -type f)
	@$(PYTHON) tests/backends/build.py
	@touch $@

$(KERAS3)/.run:
	@echo "[keras3] $(KERAS3): TensorFlow with Keras 3"
	@$(PYTHON) -m venv $(KERAS3)
	@$(KERAS3)/bin/python -m pip --disable-pip-version-check -qq install --no-compile \
		tensorflow-cpu==2.21.0 numpy networkx cvxpy rich typer
	@touch $@

backends: $(BACKENDS)/.run

testbed: $(VENV)/.run
	@$(BIN)/python -m benchmarks.testbed check --install --brief

demo: $(VENV)/.run testbed
	@$(BIN)/python -m benchmarks.demo

test: $(VENV)/.dev $(BACKENDS)/.run $(KERAS3)/.run testbed
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_floors.py

bench: $(VENV)/.run testbed
	@$(BIN)/python -m benchmarks.replay_speed --ops 100000 --json
	@$(BIN)/python -m benchmarks.overhead --json
	@$(BIN)/python -m benchmarks.testbed run --pin -- $(BIN)/python -m benchmarks.sweep

clean:
	@rm -rf $(VENV) $(BACKENDS) $(KERAS3) build dist *.egg-info core/*.egg-info core/dpro/*.so
