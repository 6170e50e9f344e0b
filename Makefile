# make demo    an AMP training run that the usual loss code breaks, beside safeops
# make test    the tests to run for every change. `make test TORCH=2.11.0` runs them with that torch, in an environment
#              of its own; `make test TORCH=2.13.0 PYTHON=python3.13` also with that Python
# make test-all  these tests, the slow ones (make test-slow), each clause of the contract on every op and variant
#              (make test-exhaustive), and the CPU kernels under g++'s sanitizers (make sanitize)
# make docs    the documentation as a site, build/site/index.html
# All run `make setup` first: .venv, pinned dependencies, the build. It needs Python, pip and g++, and nvcc for the CUDA
# kernels, which are built for this machine's GPUs. Files in .venv mark finished steps, so that none is repeated.

PYTHON ?= python3
OTHER  := $(and $(TORCH),$(filter-out python3,$(notdir $(PYTHON))))
VENV   := .venv$(TORCH:%=-torch-%)$(OTHER:%=-%)
BIN    := $(VENV)/bin
# -qq: print errors only
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
SOURCE := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)
CXX_FILES := $(filter %.h %.cuh %.cpp %.cu,$(SOURCE)) $(wildcard tests/kernels/executed/*.h tests/kernels/executed/*.cpp)
SHELL  := /bin/bash -o pipefail
# Where it is set, each of the tests' many processes compiles all of torch's modules again: 3 s.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:
.PHONY: setup demo test hopper architectures test-slow test-kernels test-exhaustive sanitize test-all mutants types lint docs bench \
    gpu-model wheel release hub gpu-check gpu-kernels clean

PINNED := requirements-dev.txt
BUILD  := rm -f safeops/*.so;
ifdef TORCH
# Another torch brings its own Triton, and may refuse the pinned setuptools. The extension is not built again: .venv's
# works with every torch. With another Python only pytest is pinned, since it may not have the other versions.
PINNED := <(sed -E '/^(setuptools|torch|triton)=/d; $(OTHER:%=/^pytest=/!s/==.*//)' requirements-dev.txt)
PINNED += "setuptools>=77" torch==$(TORCH)
BUILD  := $(MAKE) -s TORCH= setup && SAFEOPS_NO_EXT=1
endif

# --no-compile: of a hundred packages, few modules are ever imported.
$(VENV)/installed: requirements-dev.txt requirements-sources.txt
	@echo "== environment: $(VENV) (pinned in requirements-dev.txt)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile -r $(PINNED)
	@$(PIP) install --no-compile --no-deps -r requirements-sources.txt
	@touch $@

# Libraries that only recipes and benchmarks import.
$(VENV)/rivals: $(VENV)/installed requirements-rivals.txt
	@echo "== environment: what recipes and benchmarks compare with (pinned in requirements-rivals.txt)"
	@$(PIP) install --no-compile -r requirements-rivals.txt
	@touch $@

# The oldest supported Triton, in a folder: some tests compile the kernels with it, in processes that import from here.
$(VENV)/oldest-triton: $(VENV)/installed requirements-triton.txt
	@echo "== environment: the oldest Triton that is supported (pinned in requirements-triton.txt)"
	@rm -rf $@
	@$(PIP) install --no-compile --no-deps --target $@ -r requirements-triton.txt
	@touch $@

# The loader of the Hugging Face Hub. It has a folder of its own, since its package is called `kernels`, like ours.
$(VENV)/hub-loader: $(VENV)/installed requirements-hub.txt
	@rm -rf $@
	@$(PIP) install --no-compile --no-deps --target $@ -r requirements-hub.txt
	@touch $@

# Development install: the package is imported from this folder, and the extensions are built into safeops/. The .pth
# file is for scripts beside a checkout that is called safeops: without it they would import that folder as the package.
$(VENV)/built: $(VENV)/installed $(SOURCE)
	@echo "== build: safeops (development install, for this machine; minutes, the first time)"
	@$(BUILD) $(PIP) install --no-build-isolation --no-deps --editable .
	@$(BIN)/python -c "import sysconfig; open(sysconfig.get_path('purelib') + '/safeops-checkout.pth', 'w').write('$(CURDIR)\n')"
	@ls safeops/*.so 2>/dev/null || echo "no C++ compiler found: pure Python, every op runs its composite"
	@touch $@

setup: $(VENV)/built

demo: setup
	@$(BIN)/safeops demo $(ARGS)

# Two workers for two cores. loadgroup: tests that share a costly fixture (the wheel) run in one worker (xdist_group).
PYTEST := $(BIN)/python -m pytest -q -n $(or $(JOBS),2) --dist loadgroup
test: setup
	@$(PYTEST) -m "not slow" $(ARGS)

define build_cuda
	@echo "== build: CUDA kernels for $(1) (minutes, the first time)"
	@SAFEOPS_CUDA_ARCH=$(1) .venv/bin/python setup.py -q build_ext --inplace > $(VENV)/build.log 2>&1 \
	    || { cat $(VENV)/build.log; exit 1; }
	@touch $(VENV)/cuda-$(1)
endef

hopper: setup
	$(call build_cuda,9.0)

architectures: setup
	$(call build_cuda,all)

# The tests that `make test` leaves out. Those of the kernels of GPUs run only if sources or launches have changed since
# they passed (tests/kernels/passed.txt).
test-slow: setup docs $(VENV)/rivals $(VENV)/hub-loader
	@$(BIN)/python -m tests.kernels.passed || $(MAKE) --no-print-directory test-kernels
	@$(PYTEST) -m "slow and not exhaustive" --ignore=tests/kernels $(ARGS)

# The kernels of GPUs: CUDA's, compiled for Hopper, and Triton's, compiled by both versions, are read, executed and
# interpreted. passed.txt is committed with what has changed. Some of the tests compile for minutes.
test-kernels: hopper $(VENV)/oldest-triton
	@$(PYTEST) --timeout 1800 -m "slow and not exhaustive" tests/kernels $(ARGS)
	@$(if $(ARGS),,$(BIN)/python -m tests.kernels.passed --write)

# Tests that repeat another test for further ops, dtypes or numbers of ranks. CUDA kernels are built for all
# architectures, as in the wheel.
test-exhaustive: architectures $(VENV)/oldest-triton
	@$(PYTEST) -m exhaustive $(ARGS)

# The CPU kernels under g++'s sanitizers of addresses and undefined behavior. The first report ends the process, so
# pytest gets -s: captured output would be lost.
SANITIZED  := tests/test_sanitized.py tests/contract/test_contract.py tests/contract/test_properties.py \
    tests/callers/test_nonsense.py tests/callers/test_numbers.py
SANITIZERS := -fsanitize=address,undefined,float-cast-overflow -fno-omit-frame-pointer -g1
sanitize: setup
	@echo "== build: sanitized CPU kernels (some 10 minutes, the first time)"
	@SAFEOPS_NO_CUDA=1 CXX="g++ $(SANITIZERS)" $(BIN)/python setup.py -q build --build-lib build/sanitized \
	    > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    $(PYTEST) -s --max-worker-restart=0 -m "not slow" -o pythonpath="build/sanitized ." $(SANITIZED) $(ARGS)

test-all: test test-kernels test-slow test-exhaustive sanitize

# Writes safeops/*.pyi, the types that editors read, from the current signatures.
types: setup
	@$(BIN)/python scripts/type_stubs.py

lint: $(VENV)/installed
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check --output-format concise . > $(VENV)/format.log || { cat $(VENV)/format.log; exit 1; }
	@! grep -nE '.{121,}|[[:space:]]$$|$(shell printf '\t')' $(CXX_FILES) /dev/null \
	    || { echo "lint: C++ lines of at most 120, no tabs, no trailing blanks"; exit 1; }
	@$(BIN)/python scripts/lint_comments.py
	@echo "lint: no complaints"

$(VENV)/docs: $(VENV)/installed requirements-docs.txt
	@echo "== environment: what builds the documentation (pinned in requirements-docs.txt)"
	@$(PIP) install --no-compile -r requirements-docs.txt
	@touch $@

# The site can be read without a server and without a network.
docs: build/site/index.html
build/site/index.html: $(VENV)/built $(VENV)/docs mkdocs.yml $(shell find *.md docs scripts/docs_* safeops benchmarks \
    -name '*.py' -o -name '*.md' -o -path 'docs/*.*' -o -name '*.toml')
	@echo "== documentation: build/site (a minute)"
	@$(BIN)/mkdocs build --strict > $(VENV)/docs.log 2>&1 || { cat $(VENV)/docs.log; exit 1; }
	@touch $@

bench: setup $(VENV)/rivals
	@$(BIN)/python -m benchmarks $(ARGS)

# Writes the table of docs/gpu-model.md: the predicted times of the kernels on several GPUs (minutes).
gpu-model: architectures
	@$(BIN)/python -m tests.kernels.modelled

# The published wheel, for any Linux of manylinux_2_28, with the CUDA kernels for all architectures. ARCH=aarch64: CPU
# kernels only, cross-compiled by Debian's g++-aarch64-linux-gnu.
MACHINE := $(shell uname -m)
ARCH  ?= $(MACHINE)
CROSS := $(if $(filter-out $(MACHINE),$(ARCH)),CXX=$(ARCH)-linux-gnu-g++ SAFEOPS_NO_CUDA=1)
wheel: setup
	@rm -f dist/*$(ARCH).whl
	@$(CROSS) SAFEOPS_PLATFORM=manylinux_2_28_$(ARCH) $(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

$(VENV)/release: $(VENV)/installed requirements-release.txt
	@$(PIP) install --no-compile -r requirements-release.txt
	@touch $@

# Builds, checks and lists the files of a release, and publishes nothing: ARGS="--arch x86_64 aarch64"
release: setup $(VENV)/release
	@$(BIN)/python scripts/release.py --dry-run $(ARGS)

# Writes dist/hub: the Python package and its Triton kernels, as a kernel for the Hugging Face Hub.
hub: setup
	@$(BIN)/python scripts/hub.py
	@ls -d dist/hub/build/*

# Breaks kernels in a copy under build/mutants, and counts how many the tests notice: minutes for each. For example,
# ARGS="--count 100 --seed 13".
mutants: setup
	@$(BIN)/python scripts/mutants.py $(ARGS)

# Runs on a machine with a GPU. Without make: python3 scripts/gpu_check.py --wheel safeops-*.whl
KERNELS := dist/gpu-kernels.tar.xz
gpu-check: wheel
	@$(BIN)/python scripts/gpu_check.py --wheel dist/*$(ARCH).whl $(if $(wildcard $(KERNELS)),--kernels $(KERNELS)) $(ARGS)

# Compiles the Triton kernels that gpu-check launches into dist/gpu-kernels.tar.xz, on any machine (some 8 minutes on
# two cores). ARGS="--python python3.12" names an interpreter with the Python and Triton versions of the GPU's machine.
gpu-kernels: setup
	@$(BIN)/python scripts/gpu_kernels.py $(ARGS)

clean:
	rm -rf build dist *.egg-info safeops/*.so .pytest_cache .ruff_cache .venv*/built
