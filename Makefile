# Everything a contributor runs. `make` alone lists it.

PYTHON ?= python3
VENV ?= .venv
# What pip is given for torch. On Linux PyPI's torch is the CUDA build (several GB); the CPU build is enough here:
#   make venv TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
# Passed on to pytest or to the benchmarks, such as ARGS='-k report'.
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.made
BENCHMARKS = $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help venv demo test conformance lint format bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv with torch, wirespeed (editable) and the tools; quick when nothing changed

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); expected Python 3.11 or newer; hint: make venv PYTHON=python3.12" >&2; \
		exit 3; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; expected the modules venv and ensurepip; hint: apt-get install python3-venv" >&2; \
		exit 3; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,serve,repo,sign,faces,mogface,cluster,dev]'
	@touch $@

demo: venv ## Tune the example on a virtual cluster of 4 hosts at 1 Gbit/s; report in out/demo
	$(BIN)/wirespeed tune examples/char_gpt.py --lab 4x1gbit --fidelity compressed --out out/demo

test: venv ## Run every test that this machine can run; what was skipped is listed with its reason
	$(BIN)/python -m pytest $(ARGS)

conformance: venv ## Drive the server with the real tritonclient, in an environment of its own
	test -x .venv-conformance/bin/python || $(PYTHON) -m venv .venv-conformance
	.venv-conformance/bin/python -m pip install --quiet --disable-pip-version-check \
		'tritonclient[grpc,http]==2.73.0' grpcio-health-checking==1.81.1 protobuf==6.33.6 ml_dtypes pytest hypothesis
	WIRESPEED_SERVER_PYTHON=$(abspath $(BIN))/python .venv-conformance/bin/python -m pytest tests/conformance/test_triton_client.py $(ARGS)

lint: venv ## Style, format, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## Run every benchmark and write benchmarks/results (ARGS=--quick for under a minute each)
	@test -n "$(BENCHMARKS)" || { echo "benchmarks/ holds no benchmark" >&2; exit 1; }
	@set -e; for script in $(BENCHMARKS); do echo "== $$script" >&2; $(BIN)/python "$$script" $(ARGS); done

clean: ## Remove .venv, caches and results in out/
	rm -rf $(VENV) .venv-conformance out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
