# The few commands of a working day. `make` alone lists them.

PYTHON ?= python3
VENV := .venv/bin

# What `make demo` starts from and writes to.
RUN ?= runs/math_duo
SEED ?=

# The files with tests on the real vLLM: to collect all others takes thirteen seconds.
VLLM_TESTS = $$(grep -rl --include='test_*.py' 'mark.vllm' tests)

# Compiled tests are kept: to compile them anew takes each test process ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint bench gpu-check pages pictures docs

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup: ## .venv with everything, from requirements/cpu.txt; does nothing when it is up to date
	@$(PYTHON) requirements/set_up.py

demo: setup ## record, train and compare the two-agent math graph on a local vLLM; SEED=7 RUN=runs/mine
	$(if $(SEED),MARFT_SEED='$(SEED)' )RUN='$(RUN)' PATH="$(CURDIR)/$(VENV):$$PATH" \
	  $(VENV)/marft-bridge serve --config examples/math_duo/bridge.toml --run '$(RUN)' \
	  -- sh examples/math_duo/demo.sh

lint: setup ## ruff and mypy
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

test: lint ## lint, the fast tests two at a time, and one run of everything on the real vLLM; under 15 minutes
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 2 --dist worksteal -m 'not slow and not vllm'
	$(VENV)/pytest -m 'vllm and not slow' $(VLLM_TESTS)

test-all: test ## and the slow tests: many seeds, crashes, soaks, whole trainings, all else on the real vLLM
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 2 --dist worksteal -m 'slow and not vllm' --durations=10
	$(VENV)/pytest -m 'vllm and slow' --durations=10 $(VLLM_TESTS)

bench: setup ## measure, print a table, write runs/bench/latest.json; BENCH=name runs one
	PYTHONPATH=tests $(VENV)/python -m benchmarks $(if $(BENCH),'$(BENCH)')

gpu-check: ## try the trainer on this machine's card, with no network, and write runs/gpu-check; PYTHON has torch and peft
	PYTHONPATH=tests:. $(PYTHON) -m benchmarks.gpu_check $(GPU_CHECK)

pages: setup ## write the generated pages of docs/ anew
	PYTHONPATH=tests:. $(VENV)/python -m support.pages

pictures: setup ## take the pictures of the viewer in docs/pictures anew; a minute, with chromium
	PYTHONPATH=tests:. $(VENV)/python -m support.viewer_pictures
	PYTHONPATH=tests:. $(VENV)/python -m support.desk_pictures

docs: setup ## the documentation as a site in build/site; nothing in it is loaded from another host
	PYTHONPATH=tests:. $(VENV)/python -m support.docs_site
