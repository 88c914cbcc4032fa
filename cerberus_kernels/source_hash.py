"""A fingerprint of the native sources, built into the libraries so that a stale one is noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_hash(folder: Path) -> str:
    """First 16 hex digits of the SHA-256 over names and contents of the C++ files below ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
