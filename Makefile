# Two commands: `make repro` regenerates every result, `make test` proves them right.
VENV   := .venv
PYTHON ?= python3
READY  := $(VENV)/.ready
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)# dvc -> papermill -> kernel all resolve here
export STAMP_DATA ?= $(CURDIR)/data/raw

.DEFAULT_GOAL := help
.PHONY: repro test paper estimate lab notebooks lint bench clean help

repro: $(READY) .dvc/config.local  ## set up, then regenerate what is out of date (JOBS=n at a time)
	$(VENV)/bin/python -m stamp_core.repro

test: $(READY) .dvc/config.local  ## set up, then lint, types, unit tests, the pipeline, the notebooks
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest tests --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
	$(VENV)/bin/pytest notebooks

paper: $(READY)  ## train one of the paper's settings: SETTING=cifar100_c2; says first what it takes
	$(VENV)/bin/python -m stamp_core.paper $(SETTING)

estimate: $(READY)  ## say what `make paper SETTING=...` takes on this machine
	$(VENV)/bin/python -m stamp_core.paper $(SETTING) --estimate

lab: $(READY)  ## explore in JupyterLab
	$(VENV)/bin/jupyter lab --LabApp.default_url=/lab/tree/notebooks

notebooks: $(READY)  ## run every notebook at its defaults and store its outputs
	STAMP_PROGRESS=lines $(VENV)/bin/python -m stamp_core.notebooks

lint: $(READY)  ## format the code and mend what ruff can mend
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/mypy

bench: $(READY)  ## measure speed and memory; writes benchmarks/results.md
	$(VENV)/bin/python -m benchmarks.run

clean:  ## remove everything computed; raw data and the environment stay
	rm -rf data/source data/splits data/runs data/sweeps data/budgets data/alphas data/tiny data/cache data/resume .dvc/cache .dvc/tmp
	find data/executed -name '*.ipynb' -delete

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*##/ { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

.dvc/config.local: $(READY)  # a folder without git (an unpacked archive) must still reproduce
	test -e .git || $(VENV)/bin/dvc config --local core.no_scm true
	touch $@
