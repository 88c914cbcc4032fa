"""Every operator is whole: folder, reference, public name, documentation, schema, tests and benchmark."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels._dispatch import BACKENDS, NAMESPACE, OPERATORS, LazyTriton

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(path.parent.name for path in (ROOT / "cerberus_kernels" / "ops").glob("*/api.py"))
PUBLIC_FUNCTIONS = sorted(name for name in ck.__all__ if inspect.isfunction(getattr(ck, name)))
SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")
# The operators that docs/design.md names.
PROMISED = {
    "commit_kv",
    "gate",
    "grow_tree",
    "head_loss",
    "head_states",
    "head_topk",
    "tree_attention",
    "tree_mask",
    "verify_tree",
}


def folder_of(operator: str) -> str:
    """An operator that writes into the caller's tensors, `<op>_out`, lives in the folder of `<op>`."""
    return operator.removesuffix("_out")


def test_promised_operators_are_there():
    assert set(FOLDERS) >= PROMISED
    assert set(ck.__all__) >= PROMISED


def test_folders_and_registered_operators_match():
    assert {folder_of(name) for name in OPERATORS} == set(FOLDERS)


def test_public_names_exist_once():
    assert len(set(ck.__all__)) == len(ck.__all__)
    assert all(hasattr(ck, name) for name in ck.__all__)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_operator_has_its_files(name):
    folder = ROOT / "cerberus_kernels" / "ops" / name
    for file in ("__init__.py", "api.py", "reference.py"):
        assert (folder / file).is_file(), f"{name} lacks {file}"
    module = importlib.import_module(f"cerberus_kernels.ops.{name}")
    assert getattr(module, name) is getattr(ck, name)
    assert list((ROOT / "tests").glob(f"test_{name}*.py")), f"{name} has no tests"
    assert list((ROOT / "bench").glob(f"bench_{name}*.py")), f"{name} has no benchmark"


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_reference_and_known_backends(name):
    backends = set(OPERATORS[name].implementations)
    assert "reference" in backends
    assert backends <= set(BACKENDS) - {"auto"}


@pytest.mark.parametrize("name", OPERATORS)
def test_schema_takes_a_backend_and_says_what_it_changes(name):
    schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
    backend = [argument for argument in schema.arguments if argument.name == "backend"]
    assert [str(argument.type) for argument in backend] == ["str"]
    assert backend[0].default_value == "auto"
    if name.endswith("_out"):
        assert any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
        assert not schema.returns


@pytest.mark.parametrize("name", OPERATORS)
def test_implementations_take_the_schemas_arguments(name):
    schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
    arguments = {argument.name for argument in schema.arguments} - {"backend"}
    for backend, implementation in OPERATORS[name].implementations.items():
        if isinstance(implementation, LazyTriton):
            implementation = implementation.load()
        parameters = inspect.signature(implementation).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            keywords = {argument.name for argument in schema.arguments if argument.kwarg_only} - {"backend"}
            assert keywords <= set(parameters), f"{name}: {backend} lacks {keywords - set(parameters)}"
        assert len(parameters) >= 1 or not arguments


@pytest.mark.parametrize("name", FOLDERS)
def test_public_operator_takes_backend_by_keyword(name):
    parameter = inspect.signature(getattr(ck, name)).parameters["backend"]
    assert parameter.default == "auto"
    assert parameter.kind is parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_public_functions_are_documented(name):
    function = getattr(ck, name)
    document = inspect.getdoc(function) or ""
    refuses = re.search(r"refuse\(|check_\w+\(|raise ", inspect.getsource(function))
    missing = [section for section in SECTIONS if section not in document and (section != "Raises:" or refuses)]
    assert not missing, f"{name}'s docstring lacks {missing}"
    assert ">>> " in document, f"{name}'s docstring has no runnable example"
    for parameter in inspect.signature(function).parameters:
        assert f"{parameter}:" in document or f"{parameter}," in document or f", {parameter}" in document, (
            f"{name}'s docstring does not speak of {parameter}"
        )


@pytest.mark.parametrize("name", sorted(set(ck.__all__) - set(PUBLIC_FUNCTIONS) - {"__version__"}))
def test_public_types_are_documented(name):
    assert len(inspect.getdoc(getattr(ck, name)) or "") > 20
