# Each target makes its virtual environment when it is missing or older than the settings. `make help` lists them.
VENV ?= .venv
LATEST ?= .venv-core-latest
CORE_LATEST = 0.19.2
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = $(VENV)/bin
READY = $(VENV)/.ready
PYTEST = $(BIN)/python -m pytest
# whole files, in their order: xdist's own begins with those of most tests, and ends with those of few and long ones
TWO = --numprocesses=2 --dist=loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1

HF_OTHERS = 4.57.6 5.0.0
HF_NEWEST = 5.24.0

.PHONY: help venv run test test-faults test-slurm test-full test-core-latest test-transformers smoke-gpu check bench clean

help:
	@echo "make run               train the quickstart model, show what it learned (minutes)"
	@echo "make test              checks and tests (minutes)"
	@echo "make test-faults       ranks stopped and killed, files damaged, full disks (minutes)"
	@echo "make test-slurm        jobs of a real Slurm on this host (needs root, installs slurm-wlm and munge; minutes)"
	@echo "make test-full         the full test matrices too (about an hour)"
	@echo "make check             format, lint, types, architecture (a minute)"
	@echo "make smoke-gpu         layouts in small on CUDA and NCCL, where there are GPUs (minutes)"
	@echo "make bench             speed and memory of the inner loop beside titans-pytorch"
	@echo "make test-core-latest  the Megatron tests on megatron-core $(CORE_LATEST) (downloads 0.7 GB)"
	@echo "make test-transformers exported models on transformers $(HF_OTHERS), and in lm-eval (downloads 2 GB)"
	@echo "make venv              only the virtual environment, $(VENV)"

venv: $(READY)

$(READY): pyproject.toml requirements-cpu.lock
	@test -n "$(PYTHON)" || { echo "no Python of 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) can't make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@echo "installing the packages of requirements-cpu.lock into $(VENV): some minutes"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --requirement requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)

run: $(READY)
	$(BIN)/python -m miras_megatron.training.quickstart

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_architecture.py

test: check
	$(PYTEST) $(TWO) --durations=20

test-faults: $(READY)
	$(PYTEST) -m "faults and not full" tests/faults --verbose --show-capture=stdout --durations=20

# A Slurm of its own for the tests: the packages' own services aren't used.
test-slurm: $(READY)
	@command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null || { \
	  test "$$(id -u)" = 0 || { echo "test-slurm needs root: it installs Slurm and starts its daemons" >&2; exit 2; }; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; }
	MIRAS_TEST_SLURM=1 $(PYTEST) tests/slurm --durations=0

test-full: check
	$(PYTEST) $(TWO) -m "not faults" --durations=40
	$(PYTEST) -m faults tests/faults --verbose --show-capture=stdout --durations=20

smoke-gpu: $(READY)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(PYTEST) -m "gpu or multi_gpu" tests/parallel/test_smoke_gpu.py; \
	else echo "smoke-gpu: skipped, no CUDA device on this machine (or a PyTorch without CUDA)"; fi

bench: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	$(BIN)/miras-bench memory

# megatron-core from 0.17 on asks for Python 3.12 but runs on 3.11; it imports triton without asking for it.
$(LATEST)/.core-ready: pyproject.toml requirements-cpu.lock
	$(MAKE) VENV=$(LATEST) venv
	$(LATEST)/bin/python -m pip install --quiet --no-deps --ignore-requires-python megatron-core==$(CORE_LATEST) triton==3.7.1
	@touch $@

test-core-latest: $(LATEST)/.core-ready
	$(LATEST)/bin/python -m pytest tests/compat tests/parallel tests/model tests/training

# Exported models need torch and transformers alone: each version has an environment without any of ours.
.venv-transformers-%/.ready:
	@$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==2.13.0 transformers==$* accelerate
	@touch $@

.venv-lm-eval/.ready:
	@$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==2.13.0 transformers==$(HF_NEWEST) accelerate lm-eval==0.4.13
	@touch $@

test-transformers: $(READY) .venv-lm-eval/.ready $(HF_OTHERS:%=.venv-transformers-%/.ready)
	for version in $(HF_OTHERS); do \
	  MIRAS_TRANSFORMERS_PYTHON=$(CURDIR)/.venv-transformers-$$version/bin/python $(PYTEST) tests/tools/test_hf_model.py || exit 1; done
	MIRAS_LM_EVAL_PYTHON=$(CURDIR)/.venv-lm-eval/bin/python $(PYTEST) tests/tools/test_lm_eval.py

clean:
	rm -rf $(VENV) $(LATEST) .venv-transformers-* .venv-lm-eval .pytest_cache .mypy_cache .ruff_cache
