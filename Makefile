# Everything works from a clean clone with Python 3.11 or newer and its venv module.
#
#   make serve ARGS="--port 9000"      SHUNTYARD_* variables are passed on
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make serve
#                                      the small CPU build of torch, where pip would take CUDA's

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Named by what is installed, so that a change of the lock installs anew, and nothing else does.
STAMP := $(VENV)/.installed-$(shell cat $(LOCK) pyproject.toml | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := help
.PHONY: help install serve test unit integration lint format lock clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install the locked packages

serve: $(STAMP) ## start the server; ARGS="..." are options of `shuntyard serve`
	@$(BIN)/shuntyard serve $(ARGS)

test: lint unit integration ## lint, then all tests

unit: $(STAMP) ## the tests that need no engine
	$(BIN)/python -m pytest --ignore=tests/integration $(ARGS)

integration: $(STAMP) ## the tests with the real engine
	$(BIN)/python -m pytest tests/integration $(ARGS)

lint: $(STAMP) ## ruff, mypy and the order of the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff format and repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(STAMP) ## resolve pyproject.toml anew into requirements/cpu.lock
	$(BIN)/python requirements/lock.py > $(LOCK).new
	mv $(LOCK).new $(LOCK)

clean: ## remove .venv and every cache in this folder (not the model cache)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed. Name one: make PYTHON=python3.12'; exit 1; }
	@echo '[1/4] Making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/4] Installing $$(grep -c == $(LOCK)) packages (minutes at the first time)"
	@$(PIP) install --no-deps -r $(LOCK)
	@echo '[3/4] Checking torch'
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
		{ echo 'This is a CUDA build of torch: installing the libraries that it needs.'; \
		  echo 'See the top of the Makefile for the small CPU build.'; \
		  $(PIP) install "$$(grep ^torch== $(LOCK))"; }
	@echo '[4/4] Installing shuntyard'
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-*
	@touch $@
