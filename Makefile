# `make up` and `make test` are all that a new checkout needs; the tasks behind them are in tasks.py.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
UP ?= --workers 2
BENCH ?=
IMAGES := tf-cluster/train:cpu tf-cluster/tensorboard:latest
# What .venv is for: `make setup ACCELERATOR=gpu` creates one whose TensorFlow uses GPUs, and it stays so.
MADE_FOR := $(shell cat $(VENV)/.accelerator 2>/dev/null || { [ ! -e $(VENV)/.host ] || echo cpu; })
ACCELERATOR ?= $(or $(MADE_FOR),cpu)
$(if $(filter cpu gpu,$(ACCELERATOR)),,$(error ACCELERATOR=$(ACCELERATOR): expected cpu or gpu))
$(if $(filter-out $(ACCELERATOR),$(MADE_FOR)),$(error $(VENV) is for ACCELERATOR=$(MADE_FOR); run `make clean` first))
LOCKS := $(addprefix requirements/,host.lock train-$(ACCELERATOR).lock tensorboard.lock)
# Every tool runs as a module or a program: the shell, which reads the first line of many scripts in .venv/bin, would
# run a part of the checkout's path as a command.
INVOKE := $(VENV)/bin/python -m invoke
# What the locks hold and nothing else: no dependency is looked up, and nothing unlocked builds what has no wheel. What
# pip prints is read where it fails.
PIP_LOG := .build/pip.log
PIP = mkdir -p .build && $(VENV)/bin/python -m pip --disable-pip-version-check --no-input install \
  --require-hashes --no-deps --use-pep517 --no-build-isolation $(1) >$(PIP_LOG) 2>&1 \
  || { tail -n 40 $(PIP_LOG); if grep -qE 'ProxyError|NewConnectionError|ConnectTimeoutError|NameResolutionError' $(PIP_LOG); \
  then echo "error: the package index cannot be reached; behind a proxy set HTTPS_PROXY, with a mirror PIP_INDEX_URL, and run make again (all that pip printed is in $(PIP_LOG))"; \
  else echo "error: pip failed; all that it printed is in $(PIP_LOG)"; fi; exit 1; }
# venv and pip write the checkout's path into shell scripts as it is.
DISARM = case "$$PWD" in *[\"\$$\`\\]*) \
  rm -f $(VENV)/bin/activate* $$(grep -sl "^'''exec'" $(VENV)/bin/*); \
  echo "a shell would run a part of this folder's path: call .venv/bin/python -m invoke, there is no activate";; esac
GITHUB_SCHEMA := $(VENV)/bin/python -m check_jsonschema --quiet --builtin-schema
.DEFAULT_GOAL := help

.PHONY: help setup install up test test-fast test-all lint check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.host ## create .venv from the hash-locked requirements; for GPUs: make setup ACCELERATOR=gpu

BIN ?= $(HOME)/.local/bin
install: setup ## make `tf-cluster` a command for any folder: a link in ~/.local/bin
	@mkdir -p "$(BIN)" && ln -sfn "$$PWD/cluster/launcher.py" "$(BIN)/tf-cluster" && echo "$(BIN)/tf-cluster"
	@case ":$$PATH:" in *":$(BIN):"*) ;; *) echo "add $(BIN) to PATH";; esac

PROCESSES = $(strip $(foreach runtime,local slurm,$(findstring --runtime $(runtime),$(subst =, ,$(UP)))))
# Data and images that are not there yet are got before `invoke up`, whose clock counts the seconds to the first step.
up: setup ## train Fashion-MNIST on a chief and two workers; `make up UP="--workers 1"` for other options
	@ls "$${DATA_DIR:-data}"/arrays/fashion_mnist-*/arrays.json >/dev/null 2>&1 || $(INVOKE) data.prepare
	@if [ -z "$(PROCESSES)" ] && docker info >/dev/null 2>&1 && ! docker image inspect $(IMAGES) >/dev/null 2>&1; \
	then $(INVOKE) image.build; fi
	@$(INVOKE) up $(UP)

test: check ## run the whole suite on CPU (with the linters first)
	@$(INVOKE) test

test-fast: lint ## run the tests that need neither TensorFlow nor containers, in about two minutes
	@$(INVOKE) test --fast

test-all: check ## the same with the long matrices
	@$(INVOKE) test --all

lint: $(VENV)/.dev ## ruff, types and import directions
	@$(VENV)/bin/ruff check --quiet . && $(VENV)/bin/ruff format --check --quiet . && echo "ruff: ok"
	@$(VENV)/bin/python -m mypy
	@$(VENV)/bin/python -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo | tail -n 3

check: lint ## the same, and the locked versions, the Dockerfile, the Compose files and the GitHub workflows
	@$(VENV)/bin/python .ci/audit.py
	@$(VENV)/bin/hadolint docker/Dockerfile && echo "hadolint: ok"
	@$(GITHUB_SCHEMA) vendor.github-workflows .github/workflows/*.yml && \
	  $(GITHUB_SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml && \
	  $(GITHUB_SCHEMA) vendor.dependabot .github/dependabot.yml && \
	  $(GITHUB_SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml && \
	  $(GITHUB_SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml)) && \
	  echo "GitHub workflows and forms: ok"
	@if docker compose version >/dev/null 2>&1; then \
	  docker compose --project-name tf-cluster -f compose/compose.yaml --profile tensorboard config --quiet && \
	  docker compose -f compose/metrics.yaml --profile metrics config --quiet && \
	  MODEL_DIR=models docker compose -f compose/serve.yaml --profile serve config --quiet && \
	  docker compose --project-name tf-cluster -f compose/example.json -f compose/compose.yaml config --quiet && \
	  docker compose --project-name tf-cluster -f compose/example-gpu.json -f compose/compose.yaml config --quiet && \
	  echo "docker compose config: ok"; \
	elif [ "$$CI" = true ]; then echo "error: CI=true and there is no docker compose"; exit 3; \
	else echo "docker compose config: skipped, there is no docker compose"; fi

bench: $(VENV)/.dev ## measure how fast it is; `make bench BENCH="--only start"` for other options
	@$(INVOKE) bench $(BENCH)

clean: ## delete .venv and caches; runs/ and data/ stay
	rm -rf $(VENV) .build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@case "$$PWD" in *:*|*$$'\n'*) \
	  echo "error: this folder's path has a colon or a line break, which no Python environment may have; rename it"; \
	  exit 3;; esac
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "error: $(PYTHON) is " + sys.version.split()[0] + ", expected Python 3.11 to 3.13; install one and run make with PYTHON=python3.11")' || exit 3
	@$(PYTHON) -m venv $(VENV) || { echo "error: python3 -m venv failed; install it (Debian: apt-get install python3-venv)"; rm -rf $(VENV); exit 3; }
	@echo $(ACCELERATOR) >$(VENV)/.accelerator

$(VENV)/.host: requirements/build.lock $(LOCKS) | $(VENV)/bin/python
	@echo "setting up .venv (TensorFlow and what the tasks need; once, about two minutes)"
	@$(call PIP,-r requirements/build.lock)
	@$(call PIP,$(addprefix -r ,$(LOCKS)))
	@$(DISARM)
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.host
	@echo "adding the test tools to .venv"
	@$(call PIP,-r requirements/dev.lock)
	@$(DISARM)
	@touch $@
