# Every target does its own set-up: `make demo` and `make test` need nothing but Python >= 3.10 and this directory.

PYTHON ?= python3
# The torch that the CPU tests run on. Set TORCH=torch to take the newest build that your platform offers.
TORCH ?= torch==2.13.0
# The oldest Triton the kernels claim to compile with; numpy is capped where its 3.6 interpreter stops working.
OLDEST_TRITON := triton==3.6.0 'numpy<2.4'
JOBS ?= 2
OUT ?= demo-output

SYSTEM := $(shell uname -s)
# An interpreter that already drives a GPU keeps its own torch: `make gpu` runs on it, and the virtual environment inherits from it.
HAS_CUDA := $(shell $(PYTHON) -c "import torch; print('yes' if torch.cuda.is_available() and \
	tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11) else 'no')" 2>/dev/null)

VENV := .venv
VPY := $(VENV)/bin/python
ifeq ($(HAS_CUDA),yes)
VENV_FLAGS := --system-site-packages
INSTALL_TORCH := true
GPU_PYTHON := $(PYTHON)
else
VENV_FLAGS :=
INSTALL_TORCH := $(VPY) -m pip install -q "$(TORCH)"
GPU_PYTHON := $(VPY)
endif

.PHONY: help demo test lint docs gpu compile-all wheel tables release-check clean

help:
	@echo "make demo         train a small model twice and draw memory against context length (under two minutes)"
	@echo "make test         lint, types and every test that needs no GPU"
	@echo "make lint         ruff and mypy alone"
	@echo "make gpu          GPU tests, then the benchmark, results under benchmarks/results"
	@echo "make compile-all  compile every kernel for every target without a GPU and rewrite the table"
	@echo "make tables       rewrite the generated parts of README.md and of the Hopper pages"
	@echo "make docs         build the documentation site under site/, every warning an error"
	@echo "make release-check  as make test, and every result that is shown must belong to these sources"
	@echo "make wheel        build the wheel under dist/"

# Stamps: a virtual environment is rebuilt when what it holds was declared anew. torch goes in first and alone, so that the
# other packages resolve against it.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(INSTALL_TORCH)
	$(VPY) -m pip install -q -e ".[demo]"
	@touch $@

# timm comes alone: of what it asks for only torchvision is missing here, whose packages belong to one build of torch each, so that the
# newest would replace the torch above. Its models need none of it (tests/test_other_libraries.py).
$(VENV)/.dev: $(VENV)/.demo Makefile
	$(VPY) -m pip install -q -e ".[dev]"
	$(VPY) -m pip install -q --no-deps "timm>=1.0"
	@touch $@

.venv36/.ready: Makefile
ifeq ($(SYSTEM),Linux)
	$(PYTHON) -m venv .venv36
	.venv36/bin/python -m pip install -q $(OLDEST_TRITON)
else
	mkdir -p .venv36
endif
	@touch $@

demo: $(VENV)/.demo
	$(VPY) -m tilewise demo --out $(OUT)

lint: $(VENV)/.dev
	$(VPY) -m ruff check .
	$(VPY) -m ruff format --check .
	$(VPY) -m mypy

test: lint .venv36/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VPY) -m pytest -n $(JOBS) --dist worksteal --durations 12 -m "not gpu"

docs: $(VENV)/.dev
	$(VPY) -m mkdocs build --strict

release-check: export TILEWISE_RELEASE_CHECK = 1
release-check: test

ifneq ($(HAS_CUDA),yes)
gpu compile-all: $(VENV)/.dev .venv36/.ready
endif

gpu:
	PYTHON="$(GPU_PYTHON)" PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" bash scripts/gpu.sh

compile-all:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) scripts/compile_all.py

tables: $(VENV)/.dev
	$(VPY) scripts/readme_tables.py
	$(VPY) scripts/hopper_tables.py

wheel: $(VENV)/.dev
	$(VPY) -m build --wheel

clean:
	rm -rf $(VENV) .venv36 build dist demo-output site src/*.egg-info
