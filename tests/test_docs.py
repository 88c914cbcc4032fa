"""Documentation that can be run is run; files, links and commands that it names exist."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import cerberus_kernels as ck

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGE_NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
# Words that a page or a comment should not be left with, and folders of somebody's machine.
LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b|(?<![\w.])/(home|root|work|Users|tmp/\w+)/|localhost")


def blocks(path: Path, *languages: str) -> list[str]:
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [name for name in ck.__all__ if name != "__version__"])
def test_examples_in_docstrings(name):
    thing = getattr(ck, name)
    members = [value for key, value in vars(thing).items() if not key.startswith("_")] if inspect.isclass(thing) else []
    for owner in [thing, *members]:
        # inspect.getdoc takes away the indentation that doctest would take for part of the expected output
        text = inspect.getdoc(owner) or ""
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
        report: list[str] = []
        runner.run(example, out=report.append)
        assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("path", PAGES, ids=PAGE_NAMES)
def test_python_on_pages_runs(path):
    for code in blocks(path, "python"):
        exec(compile(code, str(path), "exec"), {})


def test_the_readme_has_its_example():
    example = [code for code in blocks(ROOT / "README.md", "python") if "verify_tree" in code]
    assert len(example) == 1
    assert len(example[0].strip().splitlines()) <= 12


@pytest.mark.parametrize("path", PAGES, ids=PAGE_NAMES)
def test_relative_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.split("#")[0]).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=PAGE_NAMES)
def test_files_named_in_code_spans_exist(path):
    for span in re.findall(r"`([^`\n]+)`", path.read_text()):
        named = re.fullmatch(r"(?:cerberus_kernels|csrc|python|tests|bench|docs|\.ci)/[\w./-]*", span)
        if named and "<" not in span:
            assert (ROOT / span).exists(), f"{path.name} names {span}"


@pytest.mark.parametrize("path", PAGES, ids=PAGE_NAMES)
def test_make_targets_exist(path):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z0-9-]+)", path.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name} names make {target}"


@pytest.mark.parametrize("name", [*PAGE_NAMES, "Makefile"])
def test_commands_take_the_options_that_are_named(name):
    typer = pytest.importorskip("typer")
    application = typer.main.get_command(importlib.import_module("cerberus_decode.cli.app").app)
    for command, rest in re.findall(r"(?:^\s*|`|/)cerberus (\w+)([^`\n#]*)", (ROOT / name).read_text(), re.MULTILINE):
        assert command in application.commands, f"{name} names cerberus {command}"
        known = {option for parameter in application.commands[command].params for option in parameter.opts}
        known |= {option for parameter in application.commands[command].params for option in parameter.secondary_opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known, f"{name} gives cerberus {command}{rest}"


def test_variables_in_the_documentation_are_read_by_the_code():
    sources = [*ROOT.glob("*.py"), *(ROOT / "cerberus_kernels").rglob("*.py"), *(ROOT / "python").rglob("*.py")]
    sources += (ROOT / "csrc").rglob("*.cc")
    code = "\n".join(path.read_text() for path in sources)
    for path in PAGES:
        for variable in re.findall(r"CERBERUS_[A-Z_]+[A-Z]", path.read_text().replace("CERBERUS_HD", "")):
            assert variable in code, f"{path.name} names {variable}"


def test_the_changelog_speaks_of_this_version_and_of_every_operator():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {ck.__version__}" in text or f"## [{ck.__version__}]" in text
    for operator in (ROOT / "cerberus_kernels" / "ops").glob("*/api.py"):
        assert f"`{operator.parent.name}`" in text


def test_the_design_names_every_operator():
    text = (ROOT / "docs" / "design.md").read_text()
    for operator in (ROOT / "cerberus_kernels" / "ops").glob("*/api.py"):
        assert f"`{operator.parent.name}`" in text


def test_nothing_is_left_lying_about():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".h", ".cc", ".toml", ".txt", ".yaml"} and path != Path(__file__).resolve():
            found = LEFTOVERS.search(path.read_text())
            assert not found, f"{name} holds {found[0]!r}"


def test_the_licence_is_the_one_that_the_metadata_names():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
