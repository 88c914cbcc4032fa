# Everything runs in .venv, made on first use. PYTHON names the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

NATIVE := $(shell find csrc -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
PACKAGE := pyproject.toml setup.py CMakeLists.txt $(NATIVE)
RESULTS := .benchmarks/results.json
QUICK_BENCH := --quick --benchmark-only

.PHONY: help build lint format test sanitize emulate-avx512 machine-code bench bench-quick bench-report demo clean distclean

help:
	@echo "make build        compile and install into .venv"
	@echo "make demo         generate text, then compare decoding methods in a table"
	@echo "make test         run the tests"
	@echo "make sanitize     run the operators' tests on a build that stops at bad memory accesses"
	@echo "make emulate-avx512  run the AVX-512 level in an emulated processor"
	@echo "make machine-code compile every GPU kernel for every target and compare with docs/machine_code.json"
	@echo "make lint         check style and types; make format fixes the style"
	@echo "make bench        time every operator against its reference; bench-quick only runs each once,"
	@echo "                  bench-report writes docs/performance.md from the last run of bench"
	@echo "make clean        remove what was built; distclean removes .venv too"

build: $(VENV)/decode.stamp

# torch comes first and alone: left to the package's open range, pip would fetch the newest build with its CUDA part.
$(VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	@touch $@

$(VENV)/decode.stamp: $(VENV)/torch.stamp $(PACKAGE)
	$(PIP) -e '.[decode]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp $(PACKAGE)
	$(PIP) -e '.[dev]'
	@touch $(VENV)/decode.stamp $@

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(wildcard tests/cpp/*.cc examples/cpp/*.cc)
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(wildcard tests/cpp/*.cc examples/cpp/*.cc)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

bench: $(VENV)/dev.stamp
	@mkdir -p $(dir $(RESULTS))
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-json=$(RESULTS)

bench-report: $(VENV)/dev.stamp
	$(BIN)/python -m bench.report $(RESULTS)

bench-quick: $(VENV)/dev.stamp
	$(BIN)/python -m pytest bench $(QUICK_BENCH)

sanitize: $(VENV)/dev.stamp
	PYTHON=$(CURDIR)/$(BIN)/python tests/sanitize.sh

# Not in the virtual environment: it needs packages of the system, which its head lists.
emulate-avx512:
	tests/emulate_avx512.sh

machine-code: $(VENV)/dev.stamp
	$(BIN)/python -W ignore -m cerberus_kernels.testing.machine_code --check

demo: $(VENV)/decode.stamp
	$(BIN)/cerberus generate "Explain in three sentences why the sky is blue." --max-new-tokens 96
	$(BIN)/cerberus bench --limit 4 --max-new-tokens 64

clean:
	rm -rf build dist *.egg-info python/*.egg-info cerberus_kernels/lib .pytest_cache .mypy_cache .ruff_cache .benchmarks
	rm -f $(VENV)/decode.stamp $(VENV)/dev.stamp

distclean: clean
	rm -rf $(VENV)
