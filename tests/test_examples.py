"""The programs in examples/ run as they stand; the C++ one is built in test_library.py."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("array_library", ["numpy", "jax", "cupy"])
def test_verify_tree_takes_arrays_of_other_libraries(array_library):
    path = EXAMPLES / f"{array_library}_verify.py"
    compile(path.read_text(), str(path), "exec")
    pytest.importorskip(array_library)
    if array_library == "cupy" and not torch.cuda.is_available():
        pytest.skip("CuPy needs a GPU")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    assert printed.getvalue() == "accepted 2 drafts, tokens [5, 2, 11]\n"


def test_dlpack_copies_nothing():
    numpy = pytest.importorskip("numpy")
    logits = numpy.zeros((1, 2, 8), dtype=numpy.float32)
    assert torch.from_dlpack(logits).data_ptr() == logits.ctypes.data
