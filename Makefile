# The commands of the README. CI runs `make check test-all test-aiperf`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Torch goes in first, by itself: on Linux the plain index offers a build that pulls gigabytes of CUDA packages.
# For the CPU build, name PyTorch's own CPU index:  make setup TORCH_INDEX_URL=<the CPU index of pytorch.org>
# Nothing is fetched when this version is already there, from whatever index.
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?=

PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-all test-aiperf test-page test-clients test-gguf test-heads test-oldest test-xla test-arm check bench peers measure charts study study-counts ablation picture docs clean

help:
	@echo "make setup | demo [MODEL=pycode] [MODE=...] | test | test-full | test-all | test-aiperf | test-page | test-clients | test-gguf | test-heads | test-oldest | test-xla | test-arm | check | bench | peers | measure | charts | study | study-counts | ablation | picture | docs | clean"

setup: $(VENV)/.stamp

$(VENV)/.stamp: $(VENV)/.stamp-run
	$(PIP) install -e ".[dev]"
	@touch $@

# What decoding needs, and the demo: without what serves, tests and draws.
# A new folder is a new package, which an editable install has to learn.
$(VENV)/.stamp-run: pyproject.toml setup.py $(wildcard */__init__.py orchestrator/*/__init__.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH)"
	$(PIP) install -e .
	@touch $@

demo: $(VENV)/.stamp-run
	$(BIN)/python examples/demo.py $(if $(MODEL),--model $(MODEL)) $(if $(MODE),--mode $(MODE))

# Processes that share the test files among them. Three keep two cores busy: those that use Ray, or ranks, wait a lot.
WORKERS ?= 3

# Threads that wait must not spin on cores that others need.
PYTEST = OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations 15

test: setup
	$(PYTEST) -m "not full and not aiperf and not page and not clients and not gguf and not speculators and not arm"

# The rest: every case of what `make test` asks in a few, and what runs on the stand-in for the Neuron SDK.
test-full: setup
	$(PYTEST) -m full

test-all: test test-full

# NVIDIA's aiperf against our server. It pins some 140 packages (1.2 GB), so it gets an environment of its own, too.
AIPERF ?= aiperf==0.13.0
AIPERF_VENV ?= .venv-aiperf

$(AIPERF_VENV)/.stamp:
	$(PYTHON) -m venv $(AIPERF_VENV)
	$(AIPERF_VENV)/bin/python -m pip --disable-pip-version-check --quiet install "$(AIPERF)"
	@touch $@

test-aiperf: setup $(AIPERF_VENV)/.stamp
	PATH="$$PATH:$(abspath $(AIPERF_VENV)/bin)" $(BIN)/python -m pytest -m aiperf tests/serving/test_clients.py

# The page at / in Chromium, which the system's package manager installs. Playwright drives it, out of a folder of its own.
PLAYWRIGHT ?= playwright==1.65.2
PAGE_PACKAGES ?= .venv-page

$(PAGE_PACKAGES)/.stamp:
	$(PIP) install --target $(PAGE_PACKAGES) "$(PLAYWRIGHT)"
	@touch $@

test-page: setup $(PAGE_PACKAGES)/.stamp
	PYTHONPATH=$(abspath $(PAGE_PACKAGES)) $(BIN)/python -m pytest -m page tests/serving/test_page_browser.py

# The oldest transformers that pyproject.toml allows and the index still offers, before the newest in the path.
OLDEST ?= transformers==4.57.1 "huggingface_hub==0.34.*" "tokenizers==0.22.*"
OLDEST_PACKAGES ?= .venv-oldest

$(OLDEST_PACKAGES)/.stamp:
	$(PIP) install --no-deps --target $(OLDEST_PACKAGES) $(OLDEST)
	@touch $@

test-oldest: setup $(OLDEST_PACKAGES)/.stamp
	PYTHONPATH=$(abspath $(OLDEST_PACKAGES)) $(PYTEST) -m "not full" tests/huggingface tests/serving/test_prompts.py \
	  tests/serving/test_tool_formats.py tests/orchestrator/test_stopping.py tests/orchestrator/test_quick_tokenizer.py \
	  tests/orchestrator/test_against_transformers.py

# Clients of the server from the package index, guidellm and lm-eval, against it, in an environment of their own.
CLIENTS ?= "transformers==4.57.*" guidellm==0.8.1 openai llama-index-llms-openai-like langchain-openai llm \
  "lm-eval[hf,api]==0.4.13"
CLIENTS_VENV ?= .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin

$(CLIENTS_VENV)/.stamp:
	test -x $(CLIENTS_BIN)/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_BIN)/python -m pip --disable-pip-version-check --quiet install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH)"
	$(CLIENTS_BIN)/python -m pip --disable-pip-version-check --quiet install $(CLIENTS)
	@touch $@

test-clients: setup $(CLIENTS_VENV)/.stamp
	PATH="$$PATH:$(abspath $(CLIENTS_BIN))" $(BIN)/python -m pytest -m clients tests/serving/test_clients.py
# llama.cpp, built from the sources of its Python bindings (some minutes of every core), and its converter of models:
# GGUF files are read as it reads them. The converter runs in the environment of the tests.
LLAMA_CPP ?= llama-cpp-python==0.3.36
GGUF_VENV ?= .venv-gguf
GGUF_BIN := $(GGUF_VENV)/bin
GGUF_SOURCES := $(abspath $(GGUF_VENV))/sources
GGUF_PIP := $(GGUF_BIN)/python -m pip --disable-pip-version-check --quiet

$(GGUF_VENV)/.stamp:
	$(PYTHON) -m venv $(GGUF_VENV)
	$(GGUF_PIP) install cmake ninja numpy diskcache jinja2 typing-extensions
	$(GGUF_PIP) download --no-deps --no-binary llama-cpp-python --dest $(GGUF_VENV) "$(LLAMA_CPP)"
	mkdir -p $(GGUF_SOURCES)
	tar -xzf $(GGUF_VENV)/llama_cpp_python-*.tar.gz -C $(GGUF_SOURCES) --strip-components 1
	PATH="$(abspath $(GGUF_BIN)):$$PATH" cmake -S $(GGUF_SOURCES) -B $(GGUF_VENV)/build -G Ninja \
	  -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF -DSKBUILD_PLATLIB_DIR=.
	PATH="$(abspath $(GGUF_BIN)):$$PATH" cmake --build $(GGUF_VENV)/build --target llama
	echo "$(GGUF_SOURCES)" > "$$($(GGUF_BIN)/python -c 'import site; print(site.getsitepackages()[0])')/llama_cpp.pth"
	@touch $@

test-gguf: setup $(GGUF_VENV)/.stamp
	LLAMA_CPP_PYTHON="$(abspath $(GGUF_BIN))/python" LLAMA_CPP_LIB_PATH="$(abspath $(GGUF_VENV))/build/bin" \
	  LLAMA_CPP_SOURCES="$(GGUF_SOURCES)/vendor/llama.cpp" \
	  $(BIN)/python -m pytest -m gguf tests/decoder/test_llama_cpp.py tests/orchestrator/test_gguf_vectors.py \
	  tests/serving/test_tool_formats.py

# Heads that the speculators library writes, against its own forward pass. It wants another transformers than ours, and
# its training packages are left out, so it gets an environment of its own.
SPECULATORS ?= speculators==0.9.0 hs-connectors transformers==5.19.0
HEADS_VENV ?= .venv-heads
HEADS_BIN := $(HEADS_VENV)/bin

$(HEADS_VENV)/.stamp:
	test -x $(HEADS_BIN)/python || $(PYTHON) -m venv $(HEADS_VENV)
	$(HEADS_BIN)/python -m pip --disable-pip-version-check --quiet install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH)"
	$(HEADS_BIN)/python -m pip --disable-pip-version-check --quiet install "transformers==5.19.0" datasets loguru pydantic-settings
	$(HEADS_BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps $(SPECULATORS)
	@touch $@

test-heads: setup $(HEADS_VENV)/.stamp
	SPECULATORS_PYTHON="$(abspath $(HEADS_BIN))/python" $(BIN)/python -m pytest -m speculators tests/heads tests/eagle

# XLA, and through it Neuron: torch_xla has no newer PyTorch than 2.9, so it gets an environment of its own (about
# 7 GB: on Linux this version brings CUDA packages with it). The core tests run there too: are the pinned versions good?
XLA_VENV ?= .venv-xla
XLA_BIN := $(XLA_VENV)/bin

$(XLA_VENV)/.stamp: pyproject.toml
	test -x $(XLA_BIN)/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_BIN)/python -m pip --disable-pip-version-check --quiet install torch==2.9.0 torch_xla==2.9.0 "transformers==4.57.*"
	$(XLA_BIN)/python -m pip --disable-pip-version-check --quiet install -e ".[dev]"
	@touch $@

# torch-mlir, TorchNeuron's way to StableHLO: with TorchNeuron's PyTorch in an environment of its own.
MLIR_VENV ?= .venv-mlir
MLIR_BIN := $(MLIR_VENV)/bin

$(MLIR_VENV)/.stamp: pyproject.toml
	test -x $(MLIR_BIN)/python || $(PYTHON) -m venv $(MLIR_VENV)
	$(MLIR_BIN)/python -m pip --disable-pip-version-check --quiet install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH)"
	$(MLIR_BIN)/python -m pip --disable-pip-version-check --quiet install torch-mlir==20261001
	$(MLIR_BIN)/python -m pip --disable-pip-version-check --quiet install -e ".[dev]"
	@touch $@

test-xla: $(XLA_VENV)/.stamp $(MLIR_VENV)/.stamp
	PJRT_DEVICE=CPU $(XLA_BIN)/python -m pytest tests/core tests/xla
	$(MLIR_BIN)/python -m pytest tests/mlir

# Kernels for ARM, in an emulator, with Debian's cross compiler (apt install g++-aarch64-linux-gnu qemu-user).
test-arm: setup
	$(BIN)/python -m pytest -m arm tests/decoder/test_arm.py

check: setup
	PYTHON=$(BIN)/python scripts/check
	$(BIN)/python scripts/count.py --check

bench: setup
	$(BIN)/paceline bench --target examples/pycode/target --draft examples/pycode/draft --prompts examples/pycode/prompts.jsonl

# Paceline beside other programs (benchmarks/peers.py), which are in an environment of their own. llama.cpp's tools are
# built for this machine; the libraries of `test-gguf` are for AVX2.
PEERS ?= "transformers==5.24.*" openvino-genai==2026.4.1 onnxruntime-genai==0.18.0 onnx onnx-ir mlx-lm==0.32.2 "mlx[cpu]"
PEERS_VENV ?= .venv-peers
PEERS_BIN := $(PEERS_VENV)/bin
RACE = $(BIN)/python benchmarks/peers.py --llama $(GGUF_VENV)/tools/bin --converter $(GGUF_SOURCES)/vendor/llama.cpp \
  --python $(PEERS_BIN)/python

$(GGUF_VENV)/.stamp-tools: $(GGUF_VENV)/.stamp
	PATH="$(abspath $(GGUF_BIN)):$$PATH" cmake -S $(GGUF_SOURCES)/vendor/llama.cpp -B $(GGUF_VENV)/tools -G Ninja \
	  -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=ON
	PATH="$(abspath $(GGUF_BIN)):$$PATH" cmake --build $(GGUF_VENV)/tools --target llama-bench llama-quantize llama-server
	@touch $@

$(PEERS_VENV)/.stamp:
	test -x $(PEERS_BIN)/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_BIN)/python -m pip --disable-pip-version-check --quiet install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$(TORCH)"
	$(PEERS_BIN)/python -m pip --disable-pip-version-check --quiet install $(PEERS)
	@touch $@

peers: setup $(GGUF_VENV)/.stamp-tools $(PEERS_VENV)/.stamp
	$(BIN)/paceline fetch smollm2
	$(RACE) --peers
	$(if $(filter x86_64,$(shell uname -m)),$(RACE) --processor x86-64-v3 --ggml $(abspath $(GGUF_VENV))/build/bin)

# docs/results.md: run every benchmark it shows (about an hour), then make its tables and charts.
measure: setup
	PYTHON=$(BIN)/python scripts/measure

charts: setup
	$(BIN)/python scripts/report.py

# docs/study.md: which drafter on which prompts. `study-counts` is the part that a busy machine does not change.
study: setup
	PYTHON=$(BIN)/python PACELINE=$(BIN)/paceline scripts/study

study-counts: setup
	PYTHON=$(BIN)/python PACELINE=$(BIN)/paceline scripts/study counts

# What losses, norms and kinds of heads gain at equal tokens (an hour on one core), and what the drafters are worth.
RECIPE := examples/smollm2/recipe
ABLATION := build/ablation

ablation: setup
	$(BIN)/paceline fetch smollm2
	mkdir -p $(ABLATION)
	$(BIN)/python $(RECIPE)/instructions.py --out $(ABLATION)/train.jsonl --count 512
	$(BIN)/python $(RECIPE)/answers.py --target smollm2 --instructions $(ABLATION)/train.jsonl --new 160 --out $(ABLATION)/answers.bin
	$(BIN)/python $(RECIPE)/answers.py --target smollm2 --instructions examples/smollm2/prompts.jsonl --new 96 --out $(ABLATION)/answers-eval.bin
	$(BIN)/python $(RECIPE)/ablation.py --target smollm2 --data $(ABLATION)/answers.bin --out $(ABLATION)/runs
	$(BIN)/python benchmarks/modes.py benchmarks/experiments/trained.yaml
	$(BIN)/python benchmarks/modes.py benchmarks/experiments/trained.yaml --temperature 0.7

# The coloured text of the README, from a generation of the demo pair.
picture: setup
	$(BIN)/python scripts/picture.py

# The pages of docs/ and the API reference, in build/docs. Diagrams are drawn by the reader's browser.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
