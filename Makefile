# `make demo` and `make test` do all the set-up in a fresh clone; they need python3 with venv and pip.
# Say `make PYTHON=python3.12 test` for another interpreter, `make test PYTEST_ARGS="-k units"` for a part.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?= --budget 24MiB
PYTEST_ARGS ?=
# The path of operators on ready operands, c++ or python. Without a choice all tests run in C++, and
# then what touches operators in Python.
CORE ?=
IN_PYTHON := tests/sim/test_core.py tests/sim/test_ready_path.py tests/sim/test_watched_path.py \
	tests/sim/test_random_programs.py tests/sim/test_mixed_programs.py tests/sim/test_threads.py \
	tests/sim/test_training.py \
	tests/sim/test_native_calls.py tests/sim/test_injection.py tests/sim/test_random_eviction.py tests/sim/test_single_strides.py \
	tests/conformance/test_operators.py tests/conformance/test_formulas.py
# Who takes a sample of a sweep, itself or by fixtures of the folder.
SWEEPS = $(shell grep -rl 'sweeps import' tests/sim tests/unit --include 'test_*.py') \
	tests/conformance tests/device
RUN_TESTS = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --max-worker-restart=0
# Test files run side by side in so many processes. If one of them crashes, the run ends and says
# which test it was in. Three use two cores: a fifth of the time one waits for a child, or sleeps.
WORKERS ?= 3
# Of what waits for no child: another one would only import torch once more.
BUSY_WORKERS ?= 2
# Of each of them in torch's kernels: with more than there are cores, they wait for each other.
THREADS ?= 1
# Names of models or families; without any, all of them, and docs/compatibility.md is written.
MODELS ?=
MATRIX_ARGS ?=
SOAK_ARGS ?= --minutes 30
# The seed of the first program: another one sees other programs.
MIXED_ARGS ?= --seed 0
SANITIZE_ARGS ?= --minutes 10
INTERRUPTS_ARGS ?= --count 2000
# --one makes one call of under nine minutes, --scale medium a smaller model; docs/benchmarks.md.
GPU_ARGS ?=
GPU_DRY_ARGS ?=

# Compile our code once and not in each process, of which the tests start hundreds, even where an image
# has this set: 1.2 of 4 seconds of each.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# Errors only: without a progress bar its warnings would drown what matters.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# What the set-up depends on. Editing the sources needs no new set-up: the install is editable.
NEEDS := setup.cfg pyproject.toml constraints.txt
# Without a clean folder setuptools would put deleted modules into the wheel again.
LINT_DIR := .cache/lint

# What is there: our environment if it was made, else an interpreter that has torch, else one is made.
GPU_PYTHON_VERSION ?= 3.12
GPU_HAS_TORCH := $(if $(filter gpu%,$(MAKECMDGOALS)),$(shell $(PYTHON) -c 'import torch, transformers' 2>/dev/null && echo yes))
GPU_IS_BARE := $(if $(wildcard $(VENV)/test.stamp),,$(GPU_HAS_TORCH))
GPU_PYTHON := $(if $(GPU_IS_BARE),$(PYTHON),$(BIN)/python)
GPU_NEEDS := $(if $(GPU_IS_BARE)$(wildcard $(VENV)/test.stamp),,$(VENV)/test.stamp)

.PHONY: demo test core conformance compatibility matrix soak interrupts threads sweeps blocks mixed sanitize gpu gpu-dry gpu-rehearsal gpu-archive lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp core
	@echo "==> demos/embed_sentences.py $(DEMO_ARGS)"
	@$(BIN)/python demos/embed_sentences.py $(DEMO_ARGS)

test: $(VENV)/test.stamp core
	@echo "==> pytest $(PYTEST_ARGS) (operators: $(or $(CORE),c++))"
	@OMP_NUM_THREADS=$(THREADS) TTR_CORE=$(or $(CORE),c++) $(RUN_TESTS) $(PYTEST_ARGS)
ifeq ($(CORE)$(PYTEST_ARGS),)
	@echo "==> pytest, what touches operators (operators: python)"
	@OMP_NUM_THREADS=$(THREADS) TTR_CORE=python $(RUN_TESTS) -n $(BUSY_WORKERS) $(IN_PYTHON)
endif

# The library in C++; where it cannot be built that is said, and everything runs without it.
core: | $(BIN)/pip
	@$(BIN)/python -m torchTensorRef build || true

# Every operator of torch's own database with plain torch and with us: about half an hour on two cores.
# CONFORMANCE_ARGS="--blocks exact" forces each into blocks of random sizes (or "--blocks anywhere"),
# "--resume" goes on with a run broken off, "--only add,mul" runs a part.
conformance: $(VENV)/test.stamp
	@$(BIN)/python -m tests.conformance.operators $(CONFORMANCE_ARGS)

# Some ten minutes: every model of tests/conformance/zoo, with plain torch and with us.
compatibility: $(VENV)/compatibility.stamp
	@$(BIN)/python -m tests.conformance.models $(MODELS)

# A selection of the tests on the oldest, the pinned and the newest torch, and on a newer Python: in
# environments of their own under .venv-matrix, some 6 GB each. MATRIX_ARGS="newest" runs a part.
matrix: $(VENV)/test.stamp
	@$(BIN)/python -m tests.matrix $(MATRIX_ARGS)

soak: $(VENV)/test.stamp
	@$(BIN)/python -m tests.stress.soak $(SOAK_ARGS)

# An error at every line of the package under every strategy, then real SIGINTs at random moments. One
# thread: with several most of the time goes into their waiting for each other. Nobody tells the
# stacks of what takes its time: that walks through frames that run, and ended a process so.
interrupts: LINES = .cache/interrupted_lines
interrupts: $(VENV)/test.stamp
	@mkdir -p .cache && rm -f $(LINES)
	@OMP_NUM_THREADS=1 WHOLE_SWEEPS=1 INTERRUPT_EVERY_LINE=$(LINES) $(BIN)/python -m pytest -q -n $(WORKERS) \
		-o faulthandler_timeout=0 -k "at_any_line or fulfilled_again" tests/sim/test_interrupts.py \
		tests/sim/test_interrupted_scopes.py tests/sim/test_interrupted_promises.py
	@INTERRUPT_EVERY_LINE=$(LINES) $(BIN)/python -m pytest -q -s -k every_line_of tests/sim/test_interrupts.py
	@$(BIN)/python -m tests.stress.interrupts $(INTERRUPTS_ARGS)

# What eight threads do at once, under every strategy, a hundred times: half an hour on two cores.
threads: $(VENV)/test.stamp
	@THREAD_ROUNDS=100 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -k eight_threads tests/sim/test_threads.py

# Every combination of what `make test` combines in part only, and every case of what it has a
# sample of (tests/support/sweeps.py).
sweeps: $(VENV)/test.stamp core
	@WHOLE_SWEEPS=1 OMP_NUM_THREADS=$(THREADS) TTR_CORE=$(or $(CORE),c++) $(RUN_TESTS) $(SWEEPS)

# Operators in blocks with several threads of torch's, and MKL as users have it: five minutes.
blocks: $(VENV)/test.stamp
	@$(BIN)/python -W ignore -m tests.stress.blocked $(BLOCKS_ARGS)

# Random programs of many kinds of steps: five minutes each as they are, on the double of a real
# accelerator, on promises, with all that can be set changed between the steps, and in Python; and
# such that train, as they are and on promises.
mixed: export MKL_CBWR = COMPATIBLE
mixed: $(VENV)/test.stamp core
	@$(BIN)/python -W ignore -m tests.stress.mixed $(MIXED_ARGS)
	@$(BIN)/python -W ignore -m tests.stress.mixed --device late $(MIXED_ARGS)
	@$(BIN)/python -W ignore -m tests.stress.mixed --promised $(MIXED_ARGS)
	@$(BIN)/python -W ignore -m tests.stress.mixed --changes $(MIXED_ARGS)
	@TTR_CORE=python $(BIN)/python -W ignore -m tests.stress.mixed $(MIXED_ARGS)
	@$(BIN)/python -W ignore -m tests.stress.mixed --training $(MIXED_ARGS)
	@$(BIN)/python -W ignore -m tests.stress.mixed --training --promised $(MIXED_ARGS)

# Eight threads against an evictor, with the library in C++ under the sanitizers.
sanitize: $(VENV)/test.stamp
	@$(BIN)/python -m tests.stress.sanitizers $(SANITIZE_ARGS)

# On a machine with an accelerator: the tests on it, then the benchmark against peers. Goes on where
# it was broken off. Installs nothing where there is a torch: a rented machine may reach no registry;
# what it lacks is carried (gpu-archive).
gpu: $(GPU_NEEDS)
	@$(GPU_PYTHON) -m benchmarks.small_gpu.carried benchmarks.small_gpu.calls $(GPU_ARGS)

# The same harness on the simulated device, the peers on the host: a few minutes, no accelerator.
gpu-dry: $(GPU_NEEDS)
	@$(GPU_PYTHON) -m benchmarks.small_gpu.carried benchmarks.small_gpu --dry $(GPU_DRY_ARGS)

# The same harness over the adapter for real accelerators, with the host in the place of one.
gpu-rehearsal: $(GPU_NEEDS)
	@$(GPU_PYTHON) -m benchmarks.small_gpu.carried benchmarks.small_gpu --device cpu $(GPU_DRY_ARGS)

# One file to be carried there: this tree, and wheels of the peers that such machines lack.
gpu-archive:
	@$(GPU_PYTHON) -m benchmarks.small_gpu.carried --fetch $(GPU_PYTHON_VERSION)
	@$(GPU_PYTHON) -m benchmarks.small_gpu.carried --pack .cache/carried.tar.gz
	@ls -l .cache/carried.tar.gz

# mypy finds only packages that are really there, which an editable install is not, so it gets a
# plain one in a folder of its own. The tests must not see it: they run against the edited files.
lint: $(VENV)/test.stamp
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> mypy"
	@rm -rf $(LINT_DIR) build
	@$(PIP) install --no-deps --target $(LINT_DIR) .
	@rm -rf build
	@cd $(LINT_DIR) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/setup.cfg

clean:
	rm -rf $(VENV) .venv-matrix .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@echo "==> $(PYTHON) -m venv $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "This needs Python with venv and pip (on Debian and Ubuntu: apt install python3-venv)."; \
	    rm -rf $(VENV); exit 1; }

# Python compiles what it imports, at first; pip would compile all there is, which takes half the time.
$(VENV)/%.stamp: $(NEEDS) | $(BIN)/pip
	@echo "==> installing torchTensorRef[$*] into $(VENV) (the first time takes some minutes)"
	@$(PIP) install --no-compile -c constraints.txt -e '.[$*]'
	@touch $@
