# make demo   a virtual environment with pinned dependencies, then the main job
# make test   the same set-up, then every check and test that CI runs
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2

.PHONY: demo test lint fast clean

demo: $(VENV)/.runtime
	$(BIN)/scaling-lab run

test: lint
	$(BIN)/python -m pytest -m "not gpu and not slurm and not browser" -n $(JOBS) --dist loadgroup --durations=15 tests

fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "scaling_lab needs Python 3.11 or newer, found $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(INSTALL) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
