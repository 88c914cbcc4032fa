"""What compilers make of the Triton kernels, for every target, without a GPU.

    python -m cerberus_kernels.testing.machine_code --write  # docs/machine_code.json and the table in docs/kernels.md
    python -m cerberus_kernels.testing.machine_code --check  # compiles again and compares; --share 0/4 for a quarter

The operators are called at typical sizes with the launch replaced by a recorder, so that what is compiled is what they
launch: the same types, constants and alignments. Registers, spills, shared memory, wide loads and matrix instructions
are read off the machine code. With the recorded compiler the numbers must be the recorded ones; with any, no kernel may
spill to memory, and those that must load 16 bytes at a time or multiply matrices do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "machine_code.json"
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# Bytes of shared memory and 32-bit registers of a multiprocessor, and the warps that it holds.
MULTIPROCESSORS = {"sm_80": (164 << 10, 65536, 64), "sm_90": (228 << 10, 65536, 64), "sm_100": (228 << 10, 65536, 64)}
# What reads most of what an operator reads, and what multiplies.
WIDE_LOADS = {"_attention_kernel", "_tile_kernel", "_block_kernel", "_commit_kv_kernel", "_moments_kernel"}
MATRICES = {"_attention_kernel", "_tile_kernel", "_block_kernel"}

# Bytes that a kernel may keep on the stack, for a reason: a program of 512 threads has 128 registers a thread at most.
EXCUSED = {"verify_tree typical: verify_tree_kernel (1) for sm_100": 32}


@dataclass
class Launch:
    """One launch as it was recorded.

    Attributes:
        case: name of the call.
        kernel: the kernel's function.
        signature: type of every argument.
        constants: values of those that the compiler knows.
        aligned: positions of arguments that are multiples of 16.
        options: warps, stages and the like.
    """

    case: str
    kernel: Any
    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.fn.__name__


def cases() -> dict[str, Callable[[], object]]:
    """Calls at typical sizes: one request of a small model, a batch of a large one."""
    import cerberus_kernels as ck

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    parents = ck.Tree.from_choices([(rank,) for rank in range(32)] + [(rank, 0) for rank in range(31)]).parents
    mask = ck.tree_mask(parents)
    options: dict[str, Any] = {"backend": "triton"}

    def attention(
        nodes: int, slots: int, heads: tuple[int, int], width: int, batch: int = 1, full: bool = False
    ) -> Any:
        dtype = torch.float32 if full else torch.bfloat16
        q = torch.zeros(batch, nodes, heads[0], width, dtype=dtype)
        cache = torch.zeros(batch, slots, heads[1], width, dtype=dtype)
        bits, lengths = mask if nodes == 64 else int32([[1]]), int32([8] * batch)
        return lambda: ck.tree_attention(q, cache, cache, bits, lengths, **options)

    def verify(mode: str, batch: int, **more: Any) -> Any:
        logits, drafts = bf16(batch, 64, 49152), torch.zeros(batch, 64, dtype=torch.int32)
        return lambda: ck.verify_tree(logits, drafts, parents, mode=mode, max_depth=4, **more, **options)

    stacked, path = bf16(30, 1, 128, 3, 64), int32([[0, 1, 33]])
    blocks = bf16(2, 4, 576, 1152), bf16(2, 4, 576)
    weights = ck.GateWeights(bf16(64, 576), bf16(64), bf16(64), bf16(1))
    return {
        "tree_mask N=64": lambda: ck.tree_mask(parents, **options),
        "tree_attention N=64 9/3 x 64": attention(64, 256, (9, 3), 64),
        "tree_attention N=64 9/3 x 64 split": attention(64, 2048, (9, 3), 64),
        "tree_attention N=1 32/8 x 128 split": attention(1, 8192, (32, 8), 128),
        "tree_attention N=64 32/8 x 128": attention(64, 256, (32, 8), 128, batch=4),
        "tree_attention N=64 9/3 x 64 fp32": attention(64, 256, (9, 3), 64, full=True),
        "head_states B=1 H=576": lambda: ck.head_states(bf16(1, 576), *blocks, **options),
        "head_states B=64 H=576": lambda: ck.head_states(bf16(64, 576), *blocks, **options),
        "head_topk R=4 V=49152": lambda: ck.head_topk(bf16(4, 576), bf16(49152, 576), 10, **options),
        "head_topk R=64 V=49152": lambda: ck.head_topk(bf16(64, 576), bf16(49152, 576), 10, **options),
        "head_loss V=8192": lambda: ck.head_loss(
            torch.zeros(8, 4, 64, requires_grad=True), torch.zeros(8192, 64), torch.zeros(8, 4, dtype=torch.int64),
            teacher_states=torch.zeros(8, 4, 64), soft_weight=0.5, **options,
        ),
        "gate logits V=49152": lambda: ck.gate(None, logits=bf16(1, 49152), threshold=2.0, **options),
        "gate learned H=576": lambda: ck.gate(bf16(1, 576), kind="learned", weights=weights, threshold=0.5, **options),
        "commit_kv 30 layers": lambda: ck.commit_kv(stacked, stacked.clone(), path, int32([2]), int32([8]), **options),
        "verify_tree greedy": verify("greedy", 1),
        "verify_tree typical": verify("typical", 1),
        "verify_tree sample": verify("sample", 1),
        "verify_tree sample top_p": verify("sample", 4, top_p=0.9, top_k=50),
        "verify_tree rejection": verify("rejection", 1, drafting="iid", draft_probs=bf16(1, 64, 49152) + 1 / 49152),
    }  # fmt: skip


def recorded(case: str, call: Callable[[], object]) -> list[Launch]:
    """The launches of a call; nothing runs."""
    from triton.runtime.jit import JITFunction

    from cerberus_kernels import _dispatch

    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(case, self, args, kwargs))

    before, why = JITFunction.run, _dispatch.why_no_triton
    JITFunction.run, _dispatch.why_no_triton = record, lambda device_type: ""  # type: ignore[method-assign]
    try:
        call()
    finally:
        JITFunction.run, _dispatch.why_no_triton = before, why  # type: ignore[method-assign]
    kernels: dict[str, Launch] = {}
    for launch in launches:
        kernels.setdefault(f"{launch.name} {launch.signature} {launch.constants}", launch)
    return list(kernels.values())


def _launch(case: str, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Types and constants as Triton itself would take them from the arguments."""
    launch = Launch(case, kernel, options={key: value for key, value in kwargs.items() if key not in kernel.arg_names})
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for position, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if "INTERPRET" in name:
            value = False  # recorded on CPU tensors, compiled for a GPU
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            launch.signature[name], launch.constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            launch.signature[name] = "*" + _TYPES[value.dtype]
            launch.aligned.append(position)
        elif isinstance(value, bool):
            launch.signature[name] = "i1"
        elif isinstance(value, int):
            launch.signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                launch.aligned.append(position)
        else:
            launch.signature[name] = "fp32"
    return launch


_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1", torch.int16: "i16", torch.float64: "fp64",
}  # fmt: skip


def measured(launch: Launch, target: str) -> dict[str, int]:
    """Compile a launch for a target and read its machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    attributes = {(position,): [["tt.divisibility", 16]] for position in launch.aligned}
    options = dict(launch.options)
    if target == "gfx942" and "num_stages" in options:
        options["num_stages"] = max(1, options["num_stages"] - 1)  # as the operators do on ROCm
    if target == "gfx942":
        options.pop("maxnreg", None)
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    binary = compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    warps = binary.metadata.num_warps
    if target == "gfx942":
        return _amd(binary.asm["amdgcn"], binary.metadata.shared, warps)
    return _nvidia(binary.asm["cubin"], binary.metadata.shared, warps, target)


def _nvidia(cubin: bytes, shared: int, warps: int, target: str) -> dict[str, int]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(*command: str) -> str:
            return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout

        usage = run(str(tools / "cuobjdump"), "--dump-resource-usage")
        code = run(str(tools / "nvdisasm"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, stack = int(found[1]), int(found[2])
    memory, file_size, most = MULTIPROCESSORS[target]
    blocks = min(file_size // (-(-registers // 8) * 8 * 32 * warps), memory // (shared + 1024), most // warps, 32)
    return {
        "warps": warps,
        "registers": registers,
        "spilled_bytes": stack,
        "shared_bytes": shared,
        "wide_loads": len(re.findall(r"LDG\.E(?:\.\w+)*\.128|LDGSTS\.E(?:\.\w+)*\.128", code)),
        "matrix_instructions": len(re.findall(r"\b(?:HMMA|HGMMA|IMMA|UTC\w*MMA)\b", code)),
        "occupancy_percent": 100 * blocks * warps // most,
    }


def _amd(code: str, shared: int, warps: int) -> dict[str, int]:
    def number(name: str) -> int:
        return max((int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", code)), default=0)

    registers = number("vgpr_count")
    waves = min(8, 512 // max(8, -(-registers // 8) * 8)) * 4  # of the four units of a multiprocessor
    blocks = min(waves // warps, (64 << 10) // shared if shared else 32)
    return {
        "warps": warps,
        "registers": registers,
        "spilled_bytes": number("private_segment_fixed_size"),
        "shared_bytes": shared,
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", code)),
        "matrix_instructions": code.count("v_mfma"),
        "occupancy_percent": 100 * blocks * warps // 32,
    }


def faults(row: dict[str, Any]) -> Iterator[str]:
    """What no compiler may make of a kernel."""
    if row["spilled_bytes"] > EXCUSED.get(key_of(row), 0):
        yield f"keeps {row['spilled_bytes']} bytes on the stack"
    if row["kernel"] in WIDE_LOADS and not row["wide_loads"]:
        yield "has no 16-byte load"
    if row["kernel"] in MATRICES and "fp32" not in row["case"] and not row["matrix_instructions"]:
        yield "has no matrix instruction"
    if row["target"] == "gfx942" and row["shared_bytes"] > 64 << 10:
        yield f"wants {row['shared_bytes']} bytes of shared memory, of 65536"


def table(share: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
    """Rows of every launch for every target; with a share (i, n), every n-th of them from the i-th on."""
    rows, index = [], 0
    for case, call in cases().items():
        for number, launch in enumerate(recorded(case, call), start=1):
            for target in TARGETS:
                if index % share[1] == share[0]:
                    place = {"case": case, "launch": number, "kernel": launch.name, "target": target}
                    rows.append({**place, **measured(launch, target)})
                index += 1
    return rows


def check(rows: list[dict[str, Any]], record: dict[str, Any], compiler: str) -> list[str]:
    """Faults, and with the recorded compiler differences from the record."""
    problems = [f"{key_of(row)} {fault}" for row in rows for fault in faults(row)]
    if record["compiler"] != compiler:
        print(f"compiled by {compiler}, recorded with {record['compiler']}: numbers are not compared")
        return problems
    known = {key_of(row): row for row in record["rows"]}
    for row in rows:
        if known.get(key_of(row)) != row:
            problems.append(f"{key_of(row)} is {row}, recorded as {known.get(key_of(row))}")
    return problems


def key_of(row: dict[str, Any]) -> str:
    """Case, launch and target of a row."""
    return f"{row['case']}: {row['kernel']} ({row['launch']}) for {row['target']}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/kernels.md: a line per launch, its targets' numbers side by side."""
    lines = ["| call | kernel | warps | registers | spilled | shared KiB | 16-byte loads | matrix | occupancy % |"]
    lines += ["| --- " * 9 + "|"]
    grouped: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["launch"]), []).append(row)
    for (case, _), group in grouped.items():
        cells = [" ".join(str(row[name]) for row in group) for name in ("registers", "spilled_bytes")]
        cells.append(" ".join(f"{row['shared_bytes'] / 1024:.0f}" for row in group))
        names = ("wide_loads", "matrix_instructions", "occupancy_percent")
        cells += [" ".join(str(row[name]) for row in group) for name in names]
        lines.append(f"| {case} | `{group[0]['kernel']}` | {group[0]['warps']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 where the check fails."""
    parser = argparse.ArgumentParser(prog="python -m cerberus_kernels.testing.machine_code", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="record the numbers")
    action.add_argument("--check", action="store_true", help="compare with the record")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th compilation, from the I-th on")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("machine_code: TRITON_INTERPRET must be unset, got 1")
    import triton

    compiler = f"triton {triton.__version__}"
    first, step = map(int, options.share.split("/"))
    rows = table((first, step))
    if options.write:
        RECORD.write_text(json.dumps({"compiler": compiler, "rows": rows}, indent=1) + "\n")
        page = PAGE.read_text()
        head, rest = page.split(BEGIN)
        PAGE.write_text(head + BEGIN + "\n" + markdown(rows) + "\n" + END + rest.split(END)[1])
    problems = check(rows, json.loads(RECORD.read_text()), compiler)
    print("\n".join([*problems, f"{len(rows)} compilations, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
