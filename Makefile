# Every target sets itself up from a bare clone: a virtual environment, pinned dependencies, then the work.
# Needs Python 3.11 or newer with its venv module (Debian: apt install python3-venv), and make. Nothing else.
#
#   PYTHON=python3.12      which interpreter makes the virtual environment
#   VENV=.venv             where it goes
#   PIP_FLAGS=...          more flags for pip, such as an index that offers a torch build for your hardware. On Linux the torch
#                          that pip finds by itself brings CUDA along, some gigabytes; for the CPU's:
#                          PIP_FLAGS="--extra-index-url URL", with the URL that pytorch.org gives for CPUs
#   ARGS=...               more arguments for demo, pytest, soak, bench, release-check or gpu-check

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Of what demo needs, where there is not the whole: to serve on a CPU, and what is compiled.
LEAN := $(VENV)/.serves
COMPILED := $(VENV)/.compiled
COMPILERS := $(VENV)/compilers
PIP_INSTALL := $(BIN)/pip install -qq --disable-pip-version-check
C_SOURCES := $(wildcard kernels/headway_kernels/cpu/c/*.[ch])
CORE_SOURCES := $(wildcard services/scheduler/headway_scheduler/core/*.py services/scheduler/headway_scheduler/core/[a-z]*/*.py)
BUILDERS := kernels/headway_kernels/cpu/build.py services/scheduler/headway_scheduler/compile_core.py
# A run of pytest that finds nothing to do for ARGS ends with 5. What it makes of the tests' sources it keeps, also where the
# environment forbids Python to keep bytecode: else each worker of each run makes it anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Two of these at a time: each waits for three quarters of its time, so that both have the processor to themselves.
ALONE := tests/chaos tests/e2e
# Of tests/e2e, what starts processes but looks at no clock.
NO_CLOCK := $(patsubst %,tests/e2e/test_%.py,adapters bad_model_files batch demo documentation embeddings extreme_numbers fleet flight_log \
  gateway_chain gateway_process llm mistakes numerical_truth openai_through_smg other_languages out_of_memory pinning poison prompt_logprobs \
  ranks ranks_of_a_model roles several_executors traces vllm_engine)
# One worker more than processors, since many of these tests wait for a process to start.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
BESIDE := $(filter-out $(ALONE),$(patsubst %/,%,$(wildcard tests/*/)))
say = @printf '\n== %s\n'

.DEFAULT_GOAL := help
.PHONY: help setup kernels core demo test deep chaos sanitize emulate soak lint format stubs flags lock docs release-check bench gpu-check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) kernels core  ## virtual environment with all for development, compiled kernels and core
	@echo 'ready: $(VENV)'

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "headway needs Python 3.11 or newer, and $(PYTHON) is older or missing; try: make PYTHON=python3.11 $(or $(GOAL),$(MAKECMDGOALS))" >&2; exit 1; }
	@printf '\n== making a virtual environment in $(VENV)\n'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }

# pip compiles neither bytecode, which Python makes of what it imports, nor what has targets of its own: pip would keep its
# progress to itself.
define install
@$(PIP_INSTALL) --no-compile $(PIP_FLAGS) -r $<
@HEADWAY_BUILD_CPU_KERNELS=0 HEADWAY_BUILD_CORE=0 $(PIP_INSTALL) --no-deps --no-build-isolation -e .
@touch $@
endef

$(READY): requirements/dev.lock pyproject.toml | $(BIN)/pip
	$(say) 'installing what development takes, $< (some minutes the first time: 0.9 GB to fetch, 3.3 GB on disk)'
	$(install)
	@# For hundreds of processes of the tests, also where the environment forbids Python to keep bytecode. Packages hold files
	@# that are not meant to be Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib proto kernels services lab || :
	@for part in tests/unit "tests --ignore=tests/unit"; do $(PYTEST) --collect-only -qq $$part >/dev/null 2>&1 & done; wait
	@touch $@

$(LEAN): requirements/serve.lock pyproject.toml | $(BIN)/pip
	$(say) 'installing what serving on a CPU takes, $< (a minute the first time: 0.2 GB to fetch with a PyTorch for CPUs, 0.9 GB on disk)'
	$(install)

# Beside that, and with nothing of it: compilers for the occasion, in the versions of dev.lock, and what they look at.
$(COMPILED): $(C_SOURCES) $(CORE_SOURCES) $(BUILDERS) requirements/dev.lock | $(BIN)/pip
	$(say) 'compiling the CPU kernels and the core (a minute: 0.1 GB of compilers to fetch, 0.5 GB until they are removed)'
	@set -e; core=; rm -rf $(COMPILERS); trap 'kill $$core 2>/dev/null || :; rm -rf $(COMPILERS)' EXIT; trap 'exit 1' HUP INT TERM; \
	  $(PIP_INSTALL) --no-compile $(PIP_FLAGS) --target $(COMPILERS) --constraint requirements/dev.lock \
	    isal msgspec mypy numpy setuptools ziglang; \
	  export PYTHONPATH=$(abspath $(COMPILERS)):$(abspath services/scheduler); \
	  $(BIN)/python -P -m headway_scheduler.compile_core & core=$$!; \
	  $(BIN)/python -P $(firstword $(BUILDERS)); wait $$core; core=
	@touch $@

# What the C compiler makes of its own library is kept for its next run: the tests compile too.
kernels core test deep sanitize emulate: export ZIG_GLOBAL_CACHE_DIR ?= $(abspath $(VENV))/zig

# Runs every time, since it takes a tenth of a second where nothing has changed: a library says what it was made of.
# By path, so that nothing of the package is imported; -P, so that no file beside it passes for a standard module.
kernels: $(READY)  ## compile the CPU kernels whose C sources have changed
	@$(BIN)/python -P kernels/headway_kernels/cpu/build.py

# As above: what is compiled says which sources it was made of, and other sources run as they are written.
core: $(READY)  ## compile the scheduler's core if its sources have changed
	@$(BIN)/python -P -m headway_scheduler.compile_core

# With the whole environment, if there is one. Without it the two parts come side by side, since one fetches while the other
# computes.
demo: $(if $(wildcard $(READY)),$(READY) kernels core)  ## serve the demo model, stream a dozen prompts at once, print the timings
	@test -e $(READY) || $(MAKE) --no-print-directory -j2 GOAL=$@ $(LEAN) $(COMPILED)
	$(say) 'headway demo'
	@$(BIN)/headway demo $(ARGS)

test: lint kernels core  ## all checks and all tests
	$(say) 'pytest: what looks at real processes and clocks'
	@$(PYTEST) -n 2 --dist worksteal $(ALONE) $(NO_CLOCK:%=--ignore=%) $(ARGS) || test $$? = 5
	$(say) 'pytest: the rest, on every core'
	@$(PYTEST) -n $(WORKERS) --dist worksteal $(BESIDE) $(NO_CLOCK) $(ARGS) || test $$? = 5

deep: kernels core  ## what `make test` tests with some settings and examples, with all, and ten times as many (an hour)
	$(say) 'pytest: every combination'
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m deep --timeout=1800 $(ARGS)
	$(say) 'pytest: ten times as many drawn examples'
	@EXAMPLES=10 $(PYTEST) -n $(WORKERS) --dist worksteal --timeout=3600 tests/fuzz tests/property $(ARGS)

chaos: kernels core  ## the table of promises against real processes (some 15 minutes; root for the network namespaces)
	$(say) 'chaos: the table is written to tests/chaos/RESULTS.md'
	@CHAOS_RESULTS=tests/chaos/RESULTS.md $(BIN)/python -m pytest tests/chaos -q -m 'not chaos_quick' --timeout=900 $(ARGS)

sanitize: kernels  ## the C kernels under sanitizers of addresses, undefined behaviour and threads (minutes)
	$(say) 'sanitizers'
	@$(BIN)/python tools/sanitize.py $(ARGS)

emulate: kernels  ## the tests of the AMX kernels on a processor without AMX, if it has AVX512_BF16 (a minute)
	$(say) 'AMX, emulated'
	@$(BIN)/python tools/emulate_tiles.py $(ARGS)

soak: $(READY) core  ## new schedules of faults until interrupted; ARGS="--minutes N" for so long
	@PYTHONPATH=tests $(BIN)/python -m simulation.soak $(ARGS)

lint: $(READY)  ## ruff, clang-format, mypy, import contracts, links of the documentation
	$(say) 'ruff check'
	@$(BIN)/ruff check
	$(say) 'ruff format --check'
	@$(BIN)/ruff format --check
	$(say) 'clang-format'
	@$(BIN)/clang-format --dry-run --Werror $(C_SOURCES) tools/*.h
	$(say) 'mypy'
	@$(BIN)/mypy
	$(say) 'import contracts'
	@$(BIN)/lint-imports
	$(say) 'links of the documentation'
	@$(BIN)/python tools/check_links.py

format: $(READY)  ## let ruff and clang-format fix and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(C_SOURCES) tools/*.h

stubs: $(READY)  ## generate the protobuf and gRPC stubs from the .proto files
	@$(BIN)/python tools/generate_stubs.py

flags: $(READY)  ## write the table of settings in docs/settings.md from the code
	@$(BIN)/python tools/document_flags.py

lock: $(READY)  ## write requirements/*.lock from what the virtual environment holds
	@$(BIN)/python tools/pin_requirements.py

docs: $(READY)  ## the documentation as a site in build/site
	@$(BIN)/sphinx-build -q -W --keep-going -c docs -b html . build/site
	@echo 'build/site/docs/README.html'

release-check: $(READY) kernels core  ## build the wheel, install it into an empty environment, and run the main job there
	@$(BIN)/python tools/release_check.py --pip-flags="$(PIP_FLAGS)" $(ARGS)

bench: $(READY) kernels core  ## run the benchmarks; see benchmarks/README.md
	@set -e; for benchmark in scheduler_step gateway torch_cpu; do \
	  printf '\n== %s\n' "$$benchmark"; $(BIN)/python benchmarks/$$benchmark.py $(ARGS); done

# With what is there, since a host with a device may reach no package index: the whole environment, or PYTHON as it is.
gpu-check:  ## everything that needs a CUDA device: speeds beside their floors, then checks
	@$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) tools/gpu_check.py $(ARGS)

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find kernels -name '*libheadway_cpu.*' -delete
	rm -rf services/scheduler/headway_scheduler/core/_compiled*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
