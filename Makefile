# Every command that a person runs. `make` alone lists them. Needs Python >= 3.11 with venv, and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEEDS_IN_CHECK := 100
WORKERS ?= 2

# A changed lock changes the stamp's name, and so installs again.
RUN_STAMP := $(VENV)/.run-$(shell cat requirements.txt pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)
DEV_STAMP := $(VENV)/.dev-$(shell cat requirements.txt requirements-dev.txt pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input

SHELL := /bin/sh
.DEFAULT_GOAL := list
.PHONY: list demo test check docs bench sim nightly lock format changelog clean

list: ## list these commands
	@echo "Fleetward: hand work to machines you own, and get proof that it was done."
	@echo
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'
	@echo
	@echo "Each sets up $(VENV) first if that is needed. Start with: make demo"

demo: $(RUN_STAMP) ## set up, then run one job on three nodes, one of which lies
	@$(BIN)/python -m fleetward demo

test: check ## set up, then everything of `make check`: what CI runs

check: $(DEV_STAMP) ## format, lint, types, imports, docs, tests, 100 simulated worlds
	@$(BIN)/python -m tools.check --workers $(WORKERS) --seeds $(SEEDS_IN_CHECK)

docs: $(DEV_STAMP) ## write docs/reference/ anew from the code
	@$(BIN)/python -m tools.docs

bench: $(RUN_STAMP) ## measure verified jobs a second, and submit-to-running
	@$(BIN)/python -m bench

sim: $(DEV_STAMP) ## run simulated worlds: SEED=7 for one, SEEDS=500 for many
	@$(BIN)/python -m fleetward.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),$(SEEDS_IN_CHECK)))

nightly: $(DEV_STAMP) ## the long suites: 500 worlds, planted bugs, guard killer over every statement
	@$(BIN)/python -m fleetward.sim --seeds $(or $(SEEDS),500)
	@$(BIN)/python -m fleetward.sim --bugs
	@$(BIN)/python -m tools.guard_killer

format: $(DEV_STAMP) ## let ruff write the code as `make check` wants it
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

changelog: $(DEV_STAMP) ## turn changelog.d/ into the next section of CHANGELOG.md: VERSION=0.1.0
	@$(BIN)/towncrier build --yes --version $(VERSION)

lock: $(DEV_STAMP) ## resolve the dependencies again and write both locks (needs uv)
	@uv pip compile pyproject.toml --group build --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-annotate --custom-compile-command "make lock" --quiet -o requirements.txt
	@uv pip compile pyproject.toml --group dev -c requirements.txt --universal --python-version 3.11 \
	    --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock" --quiet \
	    -o requirements-dev.txt

clean: ## remove the virtual environment and every cache
	@rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here: install Python 3.11 or newer, or name one: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is older than 3.11: name a newer one, as in: make PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(CURDIR)/$(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)" >&2; exit 1; }

$(RUN_STAMP): $(VENV)/pyvenv.cfg
	@echo "installing what Fleetward needs into $(VENV)"
	@$(INSTALL) --require-hashes -r requirements.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.run-* && touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "installing what its tests need into $(VENV)"
	@$(INSTALL) --require-hashes -r requirements-dev.txt
	@rm -f $(VENV)/.dev-* && touch $@
