# Everything runs in .venv, which `make setup` makes from nothing. Python 3.11 or later is all that is needed.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
EXTRAS ?= train,math,envs,models,trackers,dev
HOUSE ?= ../shared/checks/house.py
NAME ?= $(shell date +quickstart-%m%d-%H%M%S)
ARGS ?=
export OMP_NUM_THREADS ?= 1

.PHONY: setup quickstart check test test-full evidence gpu-check docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints/cpu.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[$(EXTRAS)]'
	touch $@

quickstart: setup
	$(VENV)/bin/astraflow run recipes/quickstart.yaml experiment.name=$(NAME) $(ARGS)

check: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	test ! -e $(HOUSE) || $(PY) $(HOUSE) .

test: setup
	$(PY) -m pytest -m 'not full and not gpu' $(ARGS)

test-full: setup
	$(PY) -m pytest -m 'not gpu' $(ARGS)

evidence: setup
	$(PY) -m astraflow.tools.report_evidence $(ARGS)

gpu-check: setup
	$(PY) -m pytest -m gpu $(ARGS); status=$$?; test $$status -eq 0 -o $$status -eq 5

docs: setup
	$(PY) -m astraflow.tools.docs

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
