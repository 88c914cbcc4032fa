#!/usr/bin/env bash
# Builds the CPU library and its binding with AddressSanitizer and UndefinedBehaviorSanitizer, as a second build beside
# the installed one, and runs the operators' tests on it. Arguments, if any, replace the default choice of tests; --build
# alone only builds.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=build/sanitize

# The level amx runs on emulated tiles. Of the others, only those that this processor runs can be tested, and the wide one takes longest to compile.
avx512=$(grep -qw avx512bw /proc/cpuinfo && echo ON || echo OFF)
source_hash=$("$python" - <<'END'
import pathlib, runpy
print(runpy.run_path("cerberus_kernels/source_hash.py")["source_hash"](pathlib.Path("csrc")))
END
)
PATH=$(dirname "$(command -v "$python")"):$PATH
cmake -S . -B $build -G Ninja -DCERBERUS_SANITIZE=ON -DCERBERUS_EMULATE_TILES=ON -DCERBERUS_AVX512="$avx512" -DCERBERUS_PYTHON=ON \
  -Dtvm_ffi_DIR="$("$python" -m tvm_ffi.config --cmakedir)" -DCERBERUS_SOURCE_HASH="$source_hash" \
  -DCERBERUS_PYTHON_DESTINATION=lib
cmake --build $build
test "${1:-}" = --build && exit

if [ $# -eq 0 ]; then
  set -- -q tests/test_sanitize.py tests/test_verify_tree_agreement.py tests/test_verify_tree_memory.py \
    tests/test_verify_tree_drafts.py
  for operator in cerberus_kernels/ops/*/; do
    test -f "$operator/native.py" && set -- "$@" tests/test_"$(basename "$operator")".py
  done
fi
# The process is python's, so both runtimes must be in it before anything else: without libstdc++ in the beginning,
# AddressSanitizer has no exceptions to pass on. Python leaks by design. Captured output would be lost with the process.
export CERBERUS_LIBRARY=$PWD/$build/libcerberus_ffi.so CERBERUS_TEST_BACKENDS=native
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
  exec "$python" -m pytest --capture=sys "$@"
