# Each target sets up what it needs in .venv; second runs only compare a fingerprint (scripts/setup.sh).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak coverage lint bench clean distclean
.NOTPARALLEL:

BIN := .venv/bin
# Arguments for pytest, e.g. make test ARGS="tests/search -x"; with them the coverage floor is not checked.
ARGS ?=
# Workers of make test: many tests wait for engines, so a little more than the cores.
WORKERS ?= 3
PURE := spaces search journal model
PURE_FLOOR := 95
PURE_FILES := $(shell echo $(PURE) | sed -E 's|([a-z]+)|*/llm_bisect/\1/*|g; s| |,|g')
# Each pure room by itself, so that a well covered one cannot hide another.
FLOORS = low=; for room in $(PURE); do printf 'lines covered, in %%, of %-9s' "$$room:"; \
	$(BIN)/coverage report --include="*/llm_bisect/$$room/*" --format=total --precision=2 \
	--fail-under=$(PURE_FLOOR) || low=1; done; \
	if [[ -n $$low ]]; then echo "at least one room is under $(PURE_FLOOR) %" >&2; exit 1; fi

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## Make .venv: bisect from this checkout, the demo's parts, the tools of developers
	@bash scripts/setup.sh dev

demo: ## The main job on a real llama-server and on the simulated rig (no Docker, no root, no GPU)
	@bash scripts/setup.sh demo
	@bash scripts/demo.sh

test: ## All tests, and the coverage floor of the pure rooms (as root: Docker tests too)
	@bash scripts/setup.sh dev
	@bash scripts/docker_for_tests.sh
ifeq ($(strip $(ARGS)),)
	@$(BIN)/coverage erase
	$(BIN)/python -m pytest -m serial --cov=llm_bisect --cov-report=
	$(BIN)/python -m pytest -m "not serial" -n $(WORKERS) --cov=llm_bisect --cov-report= --cov-append
	@$(FLOORS)
else
	$(BIN)/python -m pytest $(ARGS)
endif

soak: ## The long batteries with their full counts (hours)
	@bash scripts/setup.sh dev
	@bash scripts/docker_for_tests.sh
	BISECT_SOAK=1 $(BIN)/python -m pytest --timeout=14400 $(ARGS)

coverage: ## Only the pure rooms' own tests, with the lines that they miss
	@bash scripts/setup.sh dev
	@$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(wildcard $(addprefix tests/,$(PURE)))
	@$(BIN)/coverage report --include='$(PURE_FILES)' --show-missing --skip-covered
	@$(FLOORS)

lint: ## Format, lint, types (strict), the rooms' import rules
	@bash scripts/setup.sh dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@for script in .ci/run scripts/*.sh; do bash -n "$$script"; done

bench: ## The measurements that are quick (bench/README.md)
	@bash scripts/setup.sh dev
	$(BIN)/python bench/help_time.py

clean: ## Remove caches and build outputs (not .venv, not journals)
	rm -rf .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find bisect tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf .venv
