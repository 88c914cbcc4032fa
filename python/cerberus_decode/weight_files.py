"""Checks of a model's files before anything reads them: missing, truncated, foreign or partial ones are named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .embedded import ModelUnavailable

# struct formats by the number of GGUF's value type; 8 is a string, 9 an array
_GGUF_SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
_GGUF_STRING, _GGUF_ARRAY = 8, 9


class ModelUnreadable(ValueError):
    """A model is there but cannot be used: a damaged, foreign or incomplete file, named in one line."""


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its type's name where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def check_folder(folder: Path) -> None:
    """Refuse a model folder with missing, damaged or foreign files.

    Raises:
        ModelUnreadable: naming the file and the reason.
    """
    config = folder / "config.json"
    if not config.is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; to load a GGUF file, pass the file itself: {folder / ggufs[0]}" if ggufs else ""
        raise ModelUnreadable(f"{folder} is no model folder: it holds no config.json{hint}")
    read_json(config)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = sorted(set(read_json(index).get("weight_map", {}).values()))
        if not parts:
            _unreadable(index, "lists no weight files")
        for part in parts:
            if not (folder / part).is_file():
                _unreadable(index, f"lists {part}, which is missing")
            check_safetensors(folder / part)
    elif (folder / "model.safetensors").exists():
        check_safetensors(folder / "model.safetensors")
    elif not any((folder / name).is_file() for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        raise ModelUnreadable(f"{folder} holds no weights: neither model.safetensors nor its index")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; anything else is refused with the file's name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelUnreadable(f"{path} is not readable JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        _unreadable(path, "is not a JSON object")
    return content


def _unreadable(path: Path, reason: str) -> NoReturn:
    raise ModelUnreadable(f"{path} {reason}")


def _readable_size(path: Path) -> int:
    """Size of ``path`` in bytes, having refused folders, empty files and stand-ins for large files."""
    if path.is_dir():
        _unreadable(path, "is a folder, not a file")
    size = path.stat().st_size
    if size == 0:
        _unreadable(path, "is empty")
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            _unreadable(path, "is a Git LFS pointer; fetch the file itself with `git lfs pull`")
    return size


def check_safetensors(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file whose header and size agree.

    Raises:
        ModelUnreadable: naming the file and the reason.
    """
    size = _readable_size(path)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            _unreadable(path, "is truncated in its header, or no safetensors file")
        try:
            header = json.loads(file.read(header_bytes))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
            data_bytes = max(ends.values(), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ModelUnreadable(f"{path} is no safetensors file: its header cannot be read") from error
    if size != 8 + header_bytes + data_bytes:
        state = "truncated" if size < 8 + header_bytes + data_bytes else "damaged"
        _unreadable(path, f"is {state}: it must hold {8 + header_bytes + data_bytes} bytes, got {size}")
    return sorted(ends)


def check_gguf(path: Path) -> None:
    """Refuse a GGUF file that is truncated, foreign, or one part of several.

    Raises:
        ModelUnreadable: naming the file and the reason.
        ModelUnavailable: the package gguf, which knows the sizes of quantised blocks, is not installed.
    """
    size = _readable_size(path)
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ModelUnavailable(f"cannot read {path}: {error}; pip install 'cerberus-kernels[decode]'") from error
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
        if magic != b"GGUF":
            _unreadable(path, f"is no GGUF file: it begins with {magic!r}, not b'GGUF'")
        if version not in (2, 3):
            _unreadable(path, f"is of GGUF version {version}; versions 2 and 3 are read")
        try:
            settings, tensors = _gguf_header(file)
        except (struct.error, ValueError, IndexError, OverflowError, OSError) as error:
            raise ModelUnreadable(f"{path} is truncated or damaged in its header") from error
        header_bytes = file.tell()
    num_parts = settings.get("split.count", 1)
    if num_parts > 1:
        _unreadable(path, f"is one part of {num_parts}; merge them with `llama-gguf-split --merge` first")
    if not tensors:
        _unreadable(path, "holds no tensors")
    alignment = settings.get("general.alignment", 32)
    data_start = -(-header_bytes // alignment) * alignment
    needed = 0
    for name, elements, kind, offset in tensors:
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise ModelUnreadable(f"{path} holds {name} in an unknown format, number {kind}") from error
        needed = max(needed, data_start + offset + elements // block * block_bytes)
    if needed > size:
        _unreadable(path, f"is truncated: it must hold {needed} bytes, got {size}")


def _gguf_header(file: BinaryIO) -> tuple[dict[str, int], list[tuple[str, int, int, int]]]:
    """Integer settings by name, and (name, elements, format, offset) of each tensor; ``file`` ends up behind them."""
    num_tensors, num_settings = _unpack(file, "QQ")
    settings: dict[str, int] = {}
    for _ in range(num_settings):
        name = _gguf_string(file)
        value = _gguf_value(file, *_unpack(file, "I"))
        if isinstance(value, int):
            settings[name] = value
    tensors = []
    for _ in range(num_tensors):
        name = _gguf_string(file)
        elements = 1
        for dim in _unpack(file, "Q" * _unpack(file, "I")[0]):
            elements *= dim
        tensors.append((name, elements, *_unpack(file, "IQ")))
    return settings, tensors


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    form = struct.Struct("<" + layout)
    return form.unpack(file.read(form.size))


def _gguf_string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > 1 << 26:  # a longer one is a damaged length, not a name
        raise ValueError(length)
    data = file.read(length)
    if len(data) < length:
        raise ValueError(length)
    return data.decode("utf-8", "replace")


def _gguf_value(file: BinaryIO, kind: int) -> int | None:
    """One value; None stands for a string, an array or a fraction, which nothing here needs."""
    if kind == _GGUF_STRING:
        _gguf_string(file)
        return None
    if kind == _GGUF_ARRAY:
        item, count = _unpack(file, "IQ")
        if item in (_GGUF_STRING, _GGUF_ARRAY):
            for _ in range(count):
                _gguf_value(file, item)
        else:
            file.seek(struct.calcsize("<" + _GGUF_SCALARS[item]) * count, 1)
        return None
    (value,) = _unpack(file, _GGUF_SCALARS[kind])
    return value if isinstance(value, int) else None
