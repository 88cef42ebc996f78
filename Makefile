# Needs git, make and Python 3.11 or newer (and a C compiler with Python's headers: one metric is built from source).
VENV ?= .venv
# Where to get torch from: empty chooses (see infra/setup.sh), or an index such as
# https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
SETUP := TORCH_INDEX="$(TORCH_INDEX)" sh infra/setup.sh "$(VENV)"

export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
# Idle OpenMP threads that spin are 20 times slower on a shared machine.
export OMP_WAIT_POLICY := PASSIVE
# Where this is set, as in many containers, every process would compile torch and the rest again: 12 s each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup run test check lock clean reset

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: ## the virtual environment, without running anything
	@$(SETUP) run

run: ## set everything up, take the sample corpus through the whole pipeline, say where the results are
	@$(SETUP) run
	@$(BIN)/soundstage run

test: ## the test suite (PYTEST_ARGS="-k name" narrows it)
	@$(SETUP) dev
	@$(BIN)/python -m pytest -n 2 --dist loadscope $(PYTEST_ARGS)

check: ## format, lint, strict types, import contracts
	@$(SETUP) dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

lock: ## write the versions installed now to requirements.lock
	@$(SETUP) dev
	@sh infra/lock.sh "$(VENV)"

clean: ## remove the virtual environment and tool caches; results stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

reset: ## remove every result too: data/store with its reports, videos and registry, and the DVC cache
	rm -rf data/store .dvc/cache .dvc/tmp
