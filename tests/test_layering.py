"""Who may import whom: the direction of dependencies of docs/design.md, read from the sources."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cerberus_kernels as ck

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "cerberus_kernels"
DECODE = ROOT / "python" / "cerberus_decode"
OPERATOR_FOLDERS = sorted(path.parent.name for path in (KERNELS / "ops").glob("*/api.py"))

# What each top-level module of cerberus_kernels may import from its own package.
BASE_MODULES = {
    "version": set(),
    "source_hash": set(),
    "_native": {"source_hash"},
    "_checks": set(),
    "tree": {"_checks"},
    "_dispatch": {"_native", "version"},
}
# What a file of ops/<op>/ may import from outside its folder, and its neighbours inside it.
OPERATOR_BASE = {
    "reference": {"tree", "_checks"},
    "native": {"tree", "_checks", "_native"},
    "triton": {"tree", "_checks"},
    "api": {"tree", "_checks", "_dispatch"},
}
OPERATOR_NEIGHBOURS = {
    "reference": set(),
    "native": {"reference"},
    "triton": {"reference"},
    "api": {"reference", "native", "triton"},
}
# An operator made of others may import their files: the specification is their composition.
COMPOSED_OF = {"decoder_layer": {"packed_linear", "tree_attention"}}
FOREIGN_TO_KERNELS = {"transformers", "safetensors", "gguf", "rich", "typer", "cerberus_decode", "bench", "tests"}


def module_name(path: Path, source_root: Path) -> str:
    parts = path.relative_to(source_root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, source_root: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Absolute dotted names that a file imports, `from a import b` giving a.b."""
    package = module_name(path, source_root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    tree = ast.parse(path.read_text())
    nodes = [node for statement in tree.body for node in _reached(statement)] if at_import_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def _reached(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the file is imported: everything outside function bodies."""
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _reached(child)


def own(path: Path) -> set[str]:
    """Dotted names below cerberus_kernels that a file of it imports."""
    prefix = "cerberus_kernels."
    return {name.removeprefix(prefix) for name in imports(path, ROOT) if name.startswith(prefix)}


@pytest.mark.parametrize("module", BASE_MODULES)
def test_base_modules_import_only_what_lies_below(module):
    allowed = BASE_MODULES[module]
    for name in own(KERNELS / f"{module}.py"):
        assert name.split(".")[0] in allowed, f"cerberus_kernels/{module}.py imports {name}"


def test_every_base_module_has_a_rule():
    assert {path.stem for path in KERNELS.glob("*.py")} - {"__init__"} == set(BASE_MODULES)


@pytest.mark.parametrize("operator", OPERATOR_FOLDERS)
def test_operator_files_keep_to_their_folder(operator):
    for path in (KERNELS / "ops" / operator).rglob("*.py"):
        layer = path.relative_to(KERNELS / "ops" / operator).parts[0].removesuffix(".py")
        here = f"ops.{operator}"
        for name in own(path):
            if name == here or name.startswith(here + "."):
                neighbour = name.removeprefix(here).lstrip(".").split(".")[0]
                refused = set(OPERATOR_NEIGHBOURS) - OPERATOR_NEIGHBOURS.get(layer, set(OPERATOR_NEIGHBOURS)) - {layer}
                assert neighbour not in refused, f"{path.relative_to(ROOT)} imports its neighbour {neighbour}"
            elif not any(name.startswith(f"ops.{part}.") for part in COMPOSED_OF.get(operator, ())):
                assert not name.startswith("ops"), f"{path.relative_to(ROOT)} imports another operator: {name}"
                allowed = OPERATOR_BASE.get(layer, set().union(*OPERATOR_BASE.values()))
                assert name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_compat_stands_on_public_names_and_is_not_loaded_by_them():
    for path in (KERNELS / "compat").glob("*.py"):
        for name in own(path):
            allowed = {"compat", "tree", "_checks"} | set(ck.__all__)
            philox = name.startswith("ops.verify_tree.philox.")
            assert philox or name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"
    for path in [KERNELS / "__init__.py", *(KERNELS / "ops").rglob("*.py"), *KERNELS.glob("*.py")]:
        assert not any(name.startswith("compat") for name in own(path)), f"{path.relative_to(ROOT)} imports compat"


def test_kernels_never_import_the_decoder_or_its_needs():
    for path in KERNELS.rglob("*.py"):
        for name in imports(path, ROOT):
            assert name.split(".")[0] not in FOREIGN_TO_KERNELS, f"{path.relative_to(ROOT)} imports {name}"


def test_kernels_import_only_declared_packages():
    declared = {"torch", "tvm_ffi", "numpy", "cerberus_kernels"}
    for path in KERNELS.rglob("*.py"):
        triton = {"triton"} if {"triton", "machine_code"} & {path.stem, *path.parts} else set()
        for name in imports(path, ROOT):
            top = name.split(".")[0]
            assert top in declared | triton | sys.stdlib_module_names, f"{path.relative_to(ROOT)} imports {name}"


def test_tvm_ffi_is_known_in_one_place_only():
    users = {
        p.relative_to(KERNELS).as_posix() for p in KERNELS.rglob("*.py") if "tvm_ffi" in " ".join(imports(p, ROOT))
    }
    assert users == {"_native.py"}


def test_decoder_uses_the_operators_through_their_public_names():
    for path in DECODE.rglob("*.py"):
        for name in imports(path, ROOT / "python"):
            if name.startswith("cerberus_kernels."):
                assert not name.startswith("cerberus_kernels.ops."), f"{path.relative_to(ROOT)} imports {name}"
            assert name.split(".")[0] not in {"tests", "bench"}, f"{path.relative_to(ROOT)} imports {name}"


def test_python_is_a_source_root_not_a_package():
    assert not (ROOT / "python" / "__init__.py").exists()


def includes(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".h", ".cc", ".cu", ".cuh"}:
            for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE):
                yield path.relative_to(ROOT), name


def test_algorithm_headers_know_neither_torch_nor_python_nor_ffi():
    for path, name in includes(ROOT / "csrc" / "include"):
        standard = "/" not in name and "." not in name
        toolkit = re.fullmatch(r"(cuda|hip)\w*(/\w+)*\.h", name) is not None
        assert standard or toolkit or name.startswith("cerberus/"), f"{path} includes {name}"


def test_only_the_binding_knows_tvm_ffi():
    for folder in ("include", "cpu", "cuda"):
        for path, name in includes(ROOT / "csrc" / folder):
            assert not re.match(r"(tvm|torch|ATen|c10|Python|dlpack|pybind11)", name), f"{path} includes {name}"


def test_operator_stems_match_in_every_folder():
    for folder, suffix in (("csrc/cpu", ".cc"), ("csrc/ffi", ".cc"), ("csrc/cuda", ".cu")):
        helpers = {"isa", "parallel", "dispatch", "library"}
        stems = {path.stem for path in (ROOT / folder).glob(f"*{suffix}")} - helpers
        assert stems <= set(OPERATOR_FOLDERS), f"{folder} holds a file named after no operator"
