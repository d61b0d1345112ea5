# Everything runs from .venv, which `make env` builds on first use and leaves alone afterwards.
#
#   PYTHON=python3.12   interpreter to build .venv with (3.10 to 3.13)
#   TORCH_SPEC=...      torch requirement instead of the pinned one
#   DEMO_STEPS=20       a shorter `make demo`
#   WORKERS=4           processes the tests run in

PYTHON ?=
TORCH_SPEC ?=
DEMO_STEPS ?=
WORKERS ?= 2

BIN := .venv/bin
# One thread a process: the tests' tensors are tiny, and WORKERS processes share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q
# Triton's interpreter is chosen when triton is imported, so what interprets gets processes of
# its own.
INTERPRETED := tests/backends/triton tests/backends/fa4/interpreted
# numpy warns of the NaN and Inf that the cases mean to compute with.
INTERPRETER := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 \
	PYTHONWARNINGS=ignore::RuntimeWarning:triton.runtime.interpreter
OTHERS := $(addprefix --ignore ,$(INTERPRETED))

NEWER_TRITON := .venv/triton-3.9.0

.DEFAULT_GOAL := help
.PHONY: help env demo test lint typecheck unit interpreted newer-triton measured slow parity
.PHONY: parity-all parity-edge docs format clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## build .venv (idempotent)
	@PYTHON='$(PYTHON)' TORCH_SPEC='$(TORCH_SPEC)' bash scripts/bootstrap.sh

demo: env ## train a small V4 model on real text, then compare what runs here on its tensors
	$(BIN)/csa-dispatch demo $(if $(DEMO_STEPS),--steps $(DEMO_STEPS))

test: lint typecheck unit interpreted measured parity ## everything CI checks but docs and demo

lint: env ## ruff, formatting, file hygiene, fresh support table
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/hygiene.py
	$(BIN)/python -m csa_dispatch.support_table --check README.md

typecheck: env ## pyright
	$(BIN)/pyright

unit: env ## tests that need no special process
	$(PYTEST) -n $(WORKERS) --dist loadfile -m 'not slow and not serial' $(OTHERS)

interpreted: env ## tests of the Triton kernels in Triton's interpreter
	$(PYTEST) -n $(WORKERS) -m 'not slow and not serial' $(INTERPRETED)

# A later Triton beside the pinned one, for what compiles there; it is never installed.
newer-triton: env ## compile the kernels with Triton 3.9 too, and interpret a few
	[ -d $(NEWER_TRITON) ] || $(BIN)/pip install -q --no-deps --target $(NEWER_TRITON) triton==3.9.0
	PYTHONPATH=$(NEWER_TRITON) $(PYTEST) -n $(WORKERS) -m 'not slow' tests/backends/triton/test_compile.py
	PYTHONPATH=$(NEWER_TRITON) TRITON_INTERPRET=1 $(PYTEST) -m 'not slow' \
		tests/backends/triton/test_parity.py -k 'gather and bfloat16'

measured: env ## tests that measure time or memory, one at a time
	$(PYTEST) -m 'serial and not slow' $(OTHERS)

slow: env ## what `make test` runs a part of, in full: an hour or more
	$(PYTEST) -n $(WORKERS) -m slow $(OTHERS)
	$(PYTEST) -n $(WORKERS) -m slow $(INTERPRETED)

parity: env ## every backend against the float64 oracle, beside edge cells; writes out/parity.html
	$(MAKE) --no-print-directory -j $(WORKERS) parity-all parity-edge

parity-all: env
	$(INTERPRETER) $(BIN)/csa-dispatch parity --matrix ci.toml --require eager --require triton \
		--html out/parity.html --junit out/parity.xml

parity-edge: env
	$(INTERPRETER) $(BIN)/csa-dispatch parity --matrix edge.toml --backend triton --filter float32

docs: env ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: env ## format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what builds and runs leave behind, but .venv
	rm -rf build dist out site .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## also remove .venv
	rm -rf .venv
