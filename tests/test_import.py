"""Importing on machines that lack something: a GPU, triton, a compiler, the native library, a new enough torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels import _dispatch, _native

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ROOT / "cerberus_kernels" / "lib"
FFI_LIBRARY = "libcerberus_ffi.so"
PARENTS = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)

BARE_MACHINE = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch, cerberus_kernels as ck
parents = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
assert ck.tree_mask(parents).flatten().tolist() == [1, 3, 5, 11, 21]
heavy = ("transformers", "safetensors", "gguf", "cerberus_decode", "rich", "typer")
print([name for name in heavy if name in sys.modules])
try:
    ck.tree_mask(parents, backend="triton")
except ck.BackendUnavailable as error:
    print(error)
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")]), **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


def test_bld_01_import_and_run_with_no_gpu_no_triton_and_no_compiler():
    result = python(BARE_MACHINE, CUDA_VISIBLE_DEVICES="", PATH="")
    assert result.returncode == 0, result.stderr
    loaded, refusal = result.stdout.splitlines()
    assert loaded == "[]"
    assert refusal.startswith("tree_mask: backend 'triton' is unavailable on cpu: ")


def test_bld_01_import_leaves_triton_alone_and_takes_the_interpreter_switch():
    code = "import torch, sys; before = 'triton' in sys.modules; import cerberus_kernels as ck\n"
    code += "assert before or 'triton' not in sys.modules\n"
    code += "assert ck.tree_mask(torch.tensor([-1, 0], dtype=torch.int32)).tolist() == [[1], [3]]"
    result = python(code, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """The package's folder, looked up at a place of the test's own."""
    package = tmp_path / "cerberus_kernels"
    shutil.copytree(LIBRARIES, package / "lib")
    monkeypatch.setattr(_native, "_PACKAGE", package)
    monkeypatch.setattr(_native, "_LIBRARY", package / "lib" / FFI_LIBRARY)
    forget()
    yield package
    monkeypatch.undo()
    forget()


def forget() -> None:
    _native._load.cache_clear()
    _native.function.cache_clear()
    _dispatch.force_backend()


def refusal() -> str:
    """How a call that names the native backend is refused, after checking that an automatic one works."""
    forget()
    assert ck.tree_mask(PARENTS).flatten().tolist() == [1, 3, 5, 11, 21]
    with pytest.raises(ck.BackendUnavailable) as error:
        ck.tree_mask(PARENTS, backend="native")
    return str(error.value)


def test_a_missing_library_is_named_and_the_reference_works(installed):
    shutil.rmtree(installed / "lib")
    message = refusal()
    assert message.startswith("tree_mask: backend 'native' is unavailable on cpu: ")
    assert f"{FFI_LIBRARY} does not exist; build it with `pip install" in message


def test_a_stale_library_is_refused_by_name(installed):
    shutil.copytree(ROOT / "csrc", installed.parent / "csrc")
    assert _native.available(), _native.why_unavailable()
    with (installed.parent / "csrc" / "include" / "cerberus" / "tree.h").open("a") as header:
        header.write("// changed\n")
    assert re.search(rf"{FFI_LIBRARY} is stale: it was built from other sources than .*csrc holds now", refusal())


@pytest.mark.parametrize("foreign", ["text", "another library"])
def test_a_foreign_library_is_refused_by_name(installed, foreign):
    library = installed / "lib" / FFI_LIBRARY
    library.unlink()
    if foreign == "text":
        library.write_text("not a library")
    else:
        shutil.copy(library.with_name("libcerberus_cpu.so"), library)
    assert re.search(rf"{FFI_LIBRARY} cannot be loaded \(.+\); build it", refusal())


def test_bld_08_metadata_pins_torch_and_nothing_is_compiled_against_it():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert "torch>=" + ".".join(map(str, _dispatch.MINIMUM_TORCH)) in project["project"]["dependencies"]
    assert not [need for need in project["build-system"]["requires"] if need.startswith("torch")]
    for library in LIBRARIES.glob("*.so"):
        headers = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True).stdout
        assert not re.search(r"NEEDED\s+lib(torch|c10|python|gomp|omp|iomp)", headers), library


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_bld_08_an_old_torch_is_refused_with_both_versions(version):
    message = f"cerberus_kernels {ck.__version__} needs torch 2.11 or newer, found {version}"
    with pytest.raises(ImportError, match=re.escape(message)):
        _dispatch.check_torch_version(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0a0+git1234", "3.0"])
def test_bld_08_newer_torch_builds_are_taken(version):
    _dispatch.check_torch_version(version)
