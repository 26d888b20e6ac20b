# The few commands of a working day. `make` alone lists them.

PYTHON ?= python3
VENV := .venv/bin

# What `make demo` starts from and writes to.
RUN ?= runs/math_duo
SEED ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench docs

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

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

test: lint ## lint, then every test: two at a time, those on the real server alone
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 2 --dist worksteal -m 'not vllm' --durations=10
	$(VENV)/pytest -m vllm --durations=10

bench: setup ## measure, print a table, write runs/bench/latest.json; BENCH=name runs one
	PYTHONPATH=tests $(VENV)/python -m benchmarks $(if $(BENCH),'$(BENCH)')

docs: setup ## the documentation as a site in build/site; nothing in it is loaded from another host
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict
