"""The record of the GPU kernels' machine code: a part of it compiled again, and what the check must catch."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest

from cerberus_kernels.testing import machine_code

SHARE = "5/12"  # of the compilations; `make machine-code` does them all


def record() -> dict:
    return json.loads(machine_code.RECORD.read_text())


def test_a_share_compiles_to_what_is_recorded():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "cerberus_kernels.testing.machine_code",
        "--check",
        "--share",
        SHARE,
    ]
    done = subprocess.run(
        command, env=environment, cwd=machine_code.ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = int(done.stdout.splitlines()[-1].split()[0])
    assert count >= len(record()["rows"]) // 12


def test_the_record_is_without_fault_and_covers_every_kernel():
    rows = record()["rows"]
    assert machine_code.check(rows, record(), record()["compiler"]) == []
    assert {row["target"] for row in rows} == set(machine_code.TARGETS)
    operators = {path.parent.name for path in (machine_code.ROOT / "cerberus_kernels" / "ops").glob("*/triton*")}
    assert {row["case"].split()[0] for row in rows} == operators
    assert {row["kernel"] for row in rows} >= machine_code.WIDE_LOADS | machine_code.MATRICES
    assert machine_code.markdown(rows) in machine_code.PAGE.read_text()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spilled_bytes": 8}, "keeps 8 bytes on the stack"),
        ({"wide_loads": 0}, "has no 16-byte load"),
        ({"matrix_instructions": 0}, "has no matrix instruction"),
        ({"target": "gfx942", "shared_bytes": 70000}, "wants 70000 bytes of shared memory, of 65536"),
    ],
)
def test_faults_are_found(changes, expected):
    row = next(row for row in record()["rows"] if row["kernel"] == "_attention_kernel" and row["target"] == "sm_90")
    assert list(machine_code.faults(row)) == []
    assert expected in list(machine_code.faults(row | changes))


def test_changed_numbers_are_found_with_the_recorded_compiler_only(capsys):
    known = record()
    rows = copy.deepcopy(known["rows"])
    rows[3]["registers"] += 1
    (problem,) = machine_code.check(rows, known, known["compiler"])
    assert machine_code.key_of(rows[3]) in problem
    assert machine_code.check(rows, known, "another compiler") == []
    assert "numbers are not compared" in capsys.readouterr().out
