# The newest tested Python that can make environments. A shim of pyenv may start none, so pyenv's own folder is searched too.
ifndef PYTHON
PYTHON := $(shell for python in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python3.12 python3.11 python3; \
	do "$$python" -c 'import ensurepip, venv' 2>/dev/null && echo "$$python" && break; done)
endif
VENV ?= .venv
BIN := $(VENV)/bin
# The versions tested together with the environment's Python: Python 3.11 has some of its own.
VERSION := $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import sys; print("%d%d" % sys.version_info[:2])')
CONSTRAINTS := $(firstword $(wildcard requirements/constraints-py$(VERSION).txt) requirements/constraints.txt)
DEV := $(patsubst %,requirements/%.txt,dev kubernetes shards tfds vision)
EVERYTHING := $(VENV)/dev-installed $(VENV)/moto/installed $(VENV)/h100/installed $(VENV)/tpu/installed $(VENV)/ray-installed \
	$(VENV)/optuna-installed $(VENV)/wandb-installed $(VENV)/hugging-face-installed

# Two workers compute, and for slow tests a third one waits; tests of a file share a worker (tests/support/suite.py).
# A worker that dies is not replaced: xdist would give the test that it died in to the next one, and that again.
WORKERS := 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations=20 -rfEs --max-worker-restart=0

# Each process of a test would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train gpu tpu test test-gpu test-jax test-pages test-slow test-all test-release slurm coverage lint format docs \
	constraints clean

train: $(VENV)/installed  ## trains the quickstart: a byte-level model on 8 virtual devices, 4 nodes of 2
	$(BIN)/python train.py --config=configs/quickstart.py --workdir=runs/quickstart

gpu: $(VENV)/gpu-installed  ## jax with CUDA, on a machine with NVIDIA GPUs (docs/gpu.md)

test: $(VENV)/dev-installed  ## the quick tests: no network, no other processes, at most 5 minutes on 2 cores
	$(PYTEST)

tpu: $(VENV)/tpu-installed  ## jax with libtpu, on a TPU VM (docs/tpu.md)

test-gpu: $(VENV)/dev-installed $(VENV)/gpu-installed  ## on a machine with an NVIDIA GPU: what it computes, beside a CPU (docs/gpu.md)
	JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(BIN)/python -m pytest -n 4 -m "" -W "ignore:The Pallas Triton backend is deprecated:DeprecationWarning" \
		tests/test_on_gpu.py tests/test_codecs.py::test_codecs_match_numpy tests/test_codecs.py::test_finite_values_stay_finite \
		tests/test_codecs.py::test_stochastic_rounding_is_unbiased \
		tests/test_models_flash.py::test_values_and_gradients_are_those_of_xla

test-jax: $(VENV)/dev-installed  ## with another jax: make test-jax PYTHON=python3.11 VENV=.venv-py311
	$(PYTEST) -m "jax and not slow and not release and not gpu"

test-all: test test-slow

test-slow: WORKERS := 3
test-slow: $(EVERYTHING) $(VENV)/gpu-checked  ## whole runs, emulated clusters, Ray, programs compiled for H100
	$(PYTEST) -m "slow and not release and not slurm and not gpu"

test-pages: $(VENV)/dev-installed  ## links and tables of pages, and records: those that take seconds
	$(PYTEST) -m "document and not slow"

test-release: $(EVERYTHING) $(VENV)/docs/installed  ## pages, records, and the combinations beyond those of test-all
	$(PYTEST) -m release

slurm: $(VENV)/dev-installed  ## with a real SLURM on emulated nodes: needs root, and installs Debian's if there is none
	@which slurmctld slurmd munged tc >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2; } || echo "SLURM cannot be installed"
	$(BIN)/python -m pytest -n 0 -m slurm -rs --durations=0 tests/test_slurm.py

coverage: $(EVERYTHING) $(VENV)/docs/installed  ## fails if a test does, or if less than 90 % of the lines are run
	$(BIN)/coverage erase
	status=0; $(BIN)/coverage run -m pytest -n 2 --max-worker-restart=0 --dist worksteal -m "not slurm and not gpu" || status=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report && exit $$status

lint: $(VENV)/dev-installed $(VENV)/ray-installed $(VENV)/optuna-installed $(VENV)/wandb-installed  ## types of these are checked too
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(VENV)/dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs/installed  ## the pages and an API reference as a site: site/index.html. Building needs no network
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

constraints: $(VENV)/dev-installed  ## writes the installed versions down as the tested ones
	(echo "# The versions that are tested together ($$($(BIN)/python -V | cut -d. -f1,2)). Regenerate: make constraints"; $(BIN)/pip freeze) > $(CONSTRAINTS)

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .coverage*

$(VENV)/installed: requirements.txt $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "there is no python3 that can make environments: install Python 3.12 with venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mics-jax needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)  # an environment keeps its Python
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -c $(CONSTRAINTS)
	touch $@

# The quick tests are never skipped, so they need the packages of every data set too.
$(VENV)/dev-installed: $(DEV) $(CONSTRAINTS) | $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check $(DEV:%=-r %) -c $(CONSTRAINTS)
	touch $@

$(VENV)/%-installed: requirements/%.txt $(CONSTRAINTS) | $(VENV)/installed  ## what only some users need
	$(BIN)/pip install --quiet --disable-pip-version-check -r $< -c $(CONSTRAINTS)
	touch $@

# jax is the one that ran on GPUs (requirements/gpu.txt), the other packages are those of the constraints.
GPU_PIP = $(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements/gpu.txt -c $(VENV)/gpu-constraints.txt
KNOWS_GPUS = $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'

$(VENV)/gpu-constraints.txt: $(CONSTRAINTS) | $(VENV)/installed
	grep -v -E '^jax(lib)?==' $< > $@

$(VENV)/gpu-installed: requirements.txt requirements/gpu.txt $(VENV)/gpu-constraints.txt
	@$(KNOWS_GPUS) || { echo "make gpu needs Python 3.12 or newer: make gpu PYTHON=python3.12 VENV=.venv-gpu"; exit 1; }
	$(GPU_PIP)
	touch $@

$(VENV)/gpu-checked: requirements.txt requirements/gpu.txt $(VENV)/gpu-constraints.txt  ## nothing is installed
	if $(KNOWS_GPUS); then $(GPU_PIP) --dry-run; else echo "make gpu is not checked: it needs Python 3.12"; fi
	touch $@

$(VENV)/docs/installed: requirements/docs.txt  ## a separate environment: the site's generator needs none of ours
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(VENV)/moto/installed: requirements/moto.txt | $(VENV)/installed  ## an S3 server, for tests of object storage
	$(BIN)/pip install --quiet --disable-pip-version-check --no-warn-conflicts --upgrade --target $(VENV)/moto -r $<
	touch $@

$(VENV)/h100/installed: requirements/h100.txt | $(VENV)/installed  ## XLA for GPUs, 0.5 GB: it compiles without one
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/h100 -r $<
	touch $@

$(VENV)/tpu/installed: requirements/libtpu.txt | $(VENV)/installed  ## XLA for TPUs, 0.5 GB: it compiles without one
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/tpu -r $<
	touch $@
