# One command each: `make setup`, `make demo`, `make test`, `make check`, `make bench`, `make fuzz`, `make clean`.
# Another interpreter: `make setup PYTHON=python3.12`.

PYTHON ?= python3
SEEDS ?= 0:300
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The editable install is redone when what it is made from changes: metadata, build script, C sources.
INSTALL_INPUTS := pyproject.toml $(wildcard setup.py) $(wildcard src/kvkeep/*.c src/kvkeep/*/*.c)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench fuzz clean

help:
	@echo "make setup   virtual environment in $(VENV) with kvkeep and its development tools"
	@echo "make demo    a server, two engine processes that share it, and its sudden end"
	@echo "make test    check, then all tests"
	@echo "make check   ruff and mypy --strict"
	@echo "make bench   lookup, transfer, index and engine benchmarks"
	@echo "make fuzz    random lives of the engine under faults: make fuzz SEEDS=0:1000"
	@echo "make clean   remove build outputs and caches (the virtual environment stays)"

setup: $(STAMP)
	@echo "setup: ready, activate with: . $(BIN)/activate"

$(STAMP): $(INSTALL_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: kvkeep needs Python 3.11 or later. hint: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "setup: making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing torch (large, the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@echo "setup: installing kvkeep and its development tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/kvkeep demo

test: check
	@echo "test: pytest"
	@$(BIN)/python -m pytest -q

check: $(STAMP)
	@echo "check: ruff check"
	@$(BIN)/ruff check .
	@echo "check: ruff format"
	@$(BIN)/ruff format --check .
	@echo "check: mypy --strict"
	@$(BIN)/mypy

bench: $(STAMP)
	@for what in lookup transfer index engine; do \
		echo "bench: $$what"; $(BIN)/kvkeep bench $$what || exit 1; \
	done

fuzz: $(STAMP)
	@for model in oracle gqa mla; do $(BIN)/kvkeep engine-fuzz --model $$model --seeds $(SEEDS) || exit 1; done

clean:
	@echo "clean: removing build outputs and caches"
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMP)
	@find src -name '*.so' -delete
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
