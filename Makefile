# Three commands for a newcomer: make demo, make train, make test. Each sets up .venv by itself; nothing else is needed but
# Python 3.11 to 3.13 with its venv module, and a C compiler.
PYTHON ?= python3
RUN := .venv/bin/python
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# uv, where it is installed, does in seconds what pip does in minutes.
UV := $(shell command -v uv 2>/dev/null)
ifeq ($(UV),)
venv = $(PYTHON) -m venv $(1)
HAS_VENV = $(RUN) -m pip --version
# What pip says, in one line that changes, if somebody watches. Its warnings and errors, which are on stderr, come
# through the same pipe behind a !, and get lines of their own. (awk may wait for 4096 bytes.)
WATCHED := $(shell test -t 2 && echo yes)
MARK := while IFS= read -r line; do echo "!$$line"; done
SHOW := { while IFS= read -r line; do case "$$line" in !*) printf '\r\033[K%s\n' "$${line:1}" >&2 ;; \
                                                       *) printf '\r\033[K%.100s' "$$line" ;; esac; done; printf '\r\033[K'; }
LINE := $(if $(WATCHED),2> >($(MARK)) | $(SHOW),--quiet)
# --no-compile: to compile all of torch takes longer than to unpack it, and Python does it for what it imports.
install = $(1)/bin/python -m pip install --disable-pip-version-check --no-compile $(2) $(LINE)
QUICKLY := --timeout 5 --retries 0
else
venv = $(UV) venv --quiet --seed --python $(PYTHON) $(1)
HAS_VENV = $(RUN) --version
install = $(UV) pip install --python $(1)/bin/python $(2)
QUICKLY :=
endif
# Python must keep what it compiles, else each start compiles 1,000 modules of torch anew. Many containers set this
# variable, which forbids it.
unexport PYTHONDONTWRITEBYTECODE

# Where there is an NVIDIA GPU, what it needs is installed as well; without one, torch's build for a CPU, which is
# gigabytes smaller, if its index can be reached.
CUDA := $(if $(shell command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null),-r requirements/cuda.txt)
# make gpu takes the Python that is named, else that of .venv if it is there.
ifeq ($(origin PYTHON),file)
GPU_PYTHON := $(or $(wildcard $(RUN)),$(PYTHON))
else
GPU_PYTHON := $(PYTHON)
endif
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements/play.txt)
CPU_BUILD := --index-url https://download.pytorch.org/whl/cpu $(QUICKLY)

.PHONY: demo train test test-slow gpu bench lint docs clean

demo: .venv/ready-demo  ## a trained policy that ships, playing on a page; the page has a menu of all others
	@$(RUN) pufferl.py eval breakout --baseline --eval.web --eval.open

train: .venv/ready  ## train Breakout to a solved policy
	$(RUN) pufferl.py train breakout

# A process a core; the tests of a file share what they have built.
NO_GPU := CUDA_VISIBLE_DEVICES=
SPLIT := -n auto --maxprocesses 4 --dist loadfile
test: .venv/ready-test  ## every fast test
	$(RUN) -m ruff check .
	$(NO_GPU) $(RUN) -m pytest -m "not slow and not gpu and not cudasim" $(SPLIT) --timeout 600
	NUMBA_ENABLE_CUDASIM=1 NUMBA_DISABLE_JIT=1 $(RUN) -m pytest tests/test_cuda.py -m cudasim

gpu:  ## on a GPU: tests, speed and learning, step by step, into docs/gpu; installs nothing (STEPS="versions kernels" OUT=folder MINUTES=9)
	$(GPU_PYTHON) bench/bench_gpu.py --out "$(or $(OUT),docs/gpu)"$(if $(MINUTES), --minutes $(MINUTES)) $(STEPS)

test-slow: .venv/ready-test  ## learning curves, sanitizers, crash tests
	$(NO_GPU) $(RUN) -m pytest -m "slow and not gpu"

bench: .venv/ready-test .venv-bench/ready  ## steps a second beside the roofline and a peer, kernels beside a copy, ...
	$(RUN) bench/bench_env.py
	$(RUN) bench/bench_kernels.py
	$(RUN) bench/bench_products.py
	$(RUN) bench/bench_train.py
	$(RUN) bench/bench_train.py --precision bfloat16
	$(RUN) bench/bench_peers.py

lint: .venv/ready-test  ## style: fails for ruff and for refused words in pages, else warns
	$(RUN) -m ruff check .
	@$(RUN) bench/prose.py
	-@$(RUN) bench/size.py --summary

docs: .venv-docs/ready  ## the pages as a site, into site/; python -m http.server -d site shows it
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet

.venv/ready-demo: requirements/play.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.12"'
	@command -v $${CC:-cc} >/dev/null || { echo "a C compiler is needed (Debian/Ubuntu: apt-get install gcc libc6-dev)"; exit 1; }
	@$(HAS_VENV) >/dev/null 2>&1 || $(call venv,.venv)
	@echo "installing torch and what playing needs into .venv: half a minute to two minutes"
	@$(if $(CUDA),true,$(RUN) -c 'import torch' 2>/dev/null || $(call install,.venv,$(CPU_BUILD) $(TORCH)) 2>/dev/null || true)
	@$(call install,.venv,-r requirements/play.txt)
	@touch $@

.venv/ready: .venv/ready-demo requirements.txt requirements/cuda.txt
	@echo "installing what training needs besides: some seconds to a minute"
	@$(call install,.venv,-r requirements.txt $(CUDA))
	@# PufferLib's command, and `import pufferlib` from any folder (docs/from_pufferlib.md).
	@printf '#!/bin/sh\nexec "%s/$(RUN)" "%s/pufferl.py" "$$@"\n' '$(CURDIR)' '$(CURDIR)' > .venv/bin/puffer
	@chmod +x .venv/bin/puffer
	@echo '$(CURDIR)' > "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pufferl.pth"
	touch $@

.venv/ready-test: .venv/ready requirements/test.txt
	@$(call install,.venv,-r requirements/test.txt)
	touch $@

.venv-bench/ready: requirements.txt requirements/bench.txt
	$(call venv,.venv-bench)
	@$(call install,.venv-bench,-r requirements/bench.txt)
	touch $@

.venv-docs/ready: requirements/docs.txt
	$(call venv,.venv-docs)
	@$(call install,.venv-docs,-r requirements/docs.txt)
	touch $@

clean:
	rm -rf .venv .venv-bench .venv-docs ocean/.build site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
