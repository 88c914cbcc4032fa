"""The native library as a binary: what it exports, where wide instructions lie, how C++ programs use it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cerberus_kernels import _native
from cerberus_kernels.testing import available_isa_levels, isa_level

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ROOT / "cerberus_kernels" / "lib"
BUILD = ROOT / "build" / "tests-cpp"  # kept between runs, so that only what changed is compiled again
LEVELS = ("baseline", "avx2", "avx512", "amx")
OPERATORS = re.findall(r"X\((\w+), \w+\)", (ROOT / "csrc" / "cpu" / "ops.h").read_text())
# Functions of the C++ library beside the operators.
SERVICES = {"active_isa", "best_isa", "isa_name", "set_isa", "num_threads", "thread_runtime"}

on_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86-64 has several levels")


def output(*command: object, **environment: str) -> str:
    variables = {**os.environ, **environment}
    result = subprocess.run([str(part) for part in command], env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def tool(name: str) -> str:
    """A program that lies beside this interpreter, as installed from PyPI, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is needed; it comes with pip install 'cerberus-kernels[test]'"
    return found


def symbols(path: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Kind and demangled name of every defined symbol."""
    for line in output("nm", "-C", "--defined-only", *options, path).splitlines():
        match = re.match(r"[0-9a-f]* +(\w) (.*)", line)
        if match:
            yield match[1], match[2]


def test_exported_functions_are_the_operators_and_the_named_services():
    exported = {name for kind, name in symbols(LIBRARIES / "libcerberus_cpu.so", "-D") if kind == "T"}
    names = {re.sub(r"\(.*", "", name).removeprefix("cerberus::cpu::") for name in exported}
    assert set(OPERATORS) | SERVICES <= names
    # An operator may have helpers that begin with its name, such as one that packs its weights.
    assert all(name.startswith(tuple(OPERATORS)) for name in names - SERVICES), names


def test_the_binding_exports_every_operator_by_its_name():
    exported = {name for kind, name in symbols(LIBRARIES / "libcerberus_ffi.so", "-D") if kind == "T"}
    assert all(name.startswith("__tvm_ffi_") for name in exported), exported
    assert {f"__tvm_ffi_{operator}" for operator in OPERATORS} <= exported


def functions(library: Path) -> Iterator[tuple[str, str]]:
    """Demangled name and disassembly of every function."""
    text = output("objdump", "-d", "-C", "--no-show-raw-insn", library)
    for block in text.split("\n\n"):
        match = re.match(r"\s*[0-9a-f]+ <(.*)>:\n", block)
        if match:
            yield match[1], block


@on_x86
@pytest.mark.parametrize("library", ["libcerberus_cpu.so", "libcerberus_ffi.so"])
def test_wide_instructions_lie_only_in_functions_of_their_level(library):
    # VEX and EVEX instructions on vector registers, and the general ones of BMI.
    vector = re.compile(r"\tv[a-z0-9]+ .*%[xyz]mm")
    general = re.compile(r"\t(andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx)[lq]? ")
    avx512 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])")
    seen = {"isa_avx2": 0, "isa_avx512": 0, "isa_amx": 0}
    for name, code in functions(LIBRARIES / library):
        if "isa_amx" in name:
            seen["isa_amx"] += "%tmm" in code
            continue
        assert "%tmm" not in code, f"{name} holds tile instructions"
        if "isa_avx512" in name:
            seen["isa_avx512"] += 1
            continue
        assert not avx512.search(code), f"{name} holds AVX-512 instructions"
        if "isa_avx2" in name:
            seen["isa_avx2"] += 1
            continue
        assert not vector.search(code), f"{name} holds AVX instructions"
        assert not general.search(code), f"{name} holds BMI instructions"
    if library == "libcerberus_cpu.so":
        assert all(seen.values()), "the disassembly shows no function of some level"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Prefix of a CMake build and install that knows nothing of Python."""
    prefix = tmp_path_factory.mktemp("prefix")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    output(tool("cmake"), "-S", ROOT, "-B", BUILD / "library", *generator)
    output(tool("cmake"), "--build", BUILD / "library")
    output(tool("cmake"), "--install", BUILD / "library", "--prefix", prefix)
    return prefix


def build_consumer(source: Path, installed: Path, build: Path) -> Path:
    """A program built against the installed library; the folder it lies in."""
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    output(tool("cmake"), "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={installed}", *generator)
    output(tool("cmake"), "--build", build)
    return build


@pytest.fixture(scope="module")
def consumers(installed, tmp_path_factory) -> Path:
    return build_consumer(ROOT / "tests" / "cpp", installed, tmp_path_factory.mktemp("consumer"))


@pytest.fixture(scope="module")
def consumer(consumers) -> Path:
    return consumers / "tree_mask"


def test_cmake_installs_library_headers_and_configuration(installed):
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    headers = {f"include/cerberus/{path.name}" for path in (ROOT / "csrc" / "include" / "cerberus").glob("*.h")}
    assert headers <= found
    names = {Path(name).name for name in found - headers}
    assert {"libcerberus_cpu.so", "cerberus_kernels-config.cmake", "cerberus_kernels-config-version.cmake"} <= names
    assert not any("ffi" in name for name in names)


@on_x86
def test_objects_of_a_level_hold_no_symbol_that_another_level_could_share(installed):
    for level in LEVELS:
        objects = list((BUILD / "library").rglob(f"cerberus_cpu_{level}.dir/**/*.o"))
        assert objects
        for path in objects:
            shared = [name for kind, name in symbols(path) if kind in "WVu" and "isa_" not in name]
            assert not shared, f"{path.name} for {level} holds weak symbols: {shared[:3]}"


def test_a_cpp_program_finds_and_calls_the_library(consumer):
    assert output(consumer, CERBERUS_CPU_ISA="").split()[1:] == ["1", "3", "5", "11", "21"]


def test_every_operator_agrees_at_every_level_and_stays_within_its_arrays(consumers):
    levels, *operators = output(consumers / "levels").splitlines()
    assert levels.split() == output(consumers / "levels", "--list-levels").split() == list(available_isa_levels())
    cases = dict(re.fullmatch(r"(\w+): (\d+) cases agree", line).groups() for line in operators)
    assert set(cases) == set(OPERATORS)
    assert all(int(count) > 0 for count in cases.values())


def test_the_verify_example_prints_the_verdict(installed, tmp_path):
    example = build_consumer(ROOT / "examples" / "cpp", installed, tmp_path) / "verify"
    verdict = "accepted 2, path 0 2 4, tokens 5 2 11, status 0"
    assert output(example).splitlines() == [f"greedy: {verdict}", f"sample: {verdict}"]


@pytest.mark.parametrize("level", LEVELS)
def test_environment_forces_a_level_or_names_the_best(consumer, level):
    if level in available_isa_levels():
        assert output(consumer, CERBERUS_CPU_ISA=level).split() == [level, "1", "3", "5", "11", "21"]
    else:
        environment = {**os.environ, "CERBERUS_CPU_ISA": level}
        result = subprocess.run([consumer], env=environment, capture_output=True, text=True, check=False)
        best = available_isa_levels()[-1]
        refusal = f"CERBERUS_CPU_ISA must be a level this processor runs (best: {best}), got {level}"
        assert (result.returncode, result.stderr.strip()) == (1, refusal)


def test_an_unknown_level_is_refused_by_the_variables_name(consumer):
    environment = {**os.environ, "CERBERUS_CPU_ISA": "sse9"}
    result = subprocess.run([consumer], env=environment, capture_output=True, text=True, check=False)
    refusal = "CERBERUS_CPU_ISA must be baseline, avx2, avx512 or amx, got sse9"
    assert (result.returncode, result.stderr.strip()) == (1, refusal)


def test_levels_are_set_and_refused_at_run_time():
    before = _native.isa()
    for level in available_isa_levels():
        with isa_level(level):
            assert _native.isa() == level
    assert _native.isa() == before
    with pytest.raises(ValueError, match="isa must be baseline, avx2, avx512 or amx, got neon"):
        _native.set_isa("neon")


ONE_POOL = """
import os, re, torch, cerberus_kernels as ck
from cerberus_kernels import _native
torch.ones(512, 512) @ torch.ones(512, 512)
parents = torch.full((4096, 64), 0, dtype=torch.int32)
parents[:, 0] = -1
ck.tree_mask(parents, backend="native")
maps = open("/proc/self/maps").read()
print(_native.function("thread_runtime")())
print(len(set(re.findall(r"/\\S*lib(?:gomp|omp|iomp5)\\S*", maps))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime_serves_torch_and_the_library():
    path = os.pathsep.join([str(ROOT), str(ROOT / "python")])
    runtime, loaded = output(sys.executable, "-c", ONE_POOL, PYTHONPATH=path).split()
    assert "/torch" in runtime
    assert loaded == "1"


def test_thread_count_is_torchs():
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert _native.function("num_threads")() == count
    finally:
        torch.set_num_threads(before)
