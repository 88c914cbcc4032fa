"""That `make sanitize` would see a fault: reading or writing past a tensor's end, or undefined arithmetic, stops it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif("CERBERUS_LIBRARY" not in os.environ, reason="only `make sanitize` has the library")

START = """
import torch, cerberus_kernels as ck
from cerberus_kernels import _native
parents = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)

def cut(tensor):
    "The tensor, with the memory of its last element given back."
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() - tensor.element_size())
    return tensor
"""
SOUND = "assert ck.tree_mask(parents, backend='native').flatten().tolist() == [1, 3, 5, 11, 21]; print('sound')"
FAULTS = {
    "read": (
        "_native.function('tree_mask')(cut(parents[None].clone()), None, torch.ones(1, 5, 1, dtype=torch.int32))",
        "heap-buffer-overflow",
    ),
    "read of a wide load": (
        "ck.head_states(cut(torch.ones(1, 64)), torch.ones(1, 1, 64, 128), torch.zeros(1, 1, 64), backend='native')",
        "heap-buffer-overflow",
    ),
    "write": (
        "_native.function('tree_mask')(parents[None], None, cut(torch.ones(1, 5, 1, dtype=torch.int32)))",
        "heap-buffer-overflow",
    ),
    "overflow": ("_native.function('unchecked_sum')(2**63 - 1, 1)", "signed integer overflow"),
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, check=False)


def test_sound_calls_run_in_the_sanitized_library():
    result = run(SOUND + "; _native.function('unchecked_sum')")
    assert (result.returncode, result.stdout.strip()) == (0, "sound"), result.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault):
    code, finding = FAULTS[fault]
    result = run(code + "; print('not caught')")
    assert result.returncode != 0
    assert finding in result.stderr
    assert "not caught" not in result.stdout
