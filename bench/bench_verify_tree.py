"""verify_tree against its reference and the plain PyTorch way: argmax or softmax of all rows, then a walk on lists."""

from __future__ import annotations

import math
import time

import pytest
import torch

import cerberus_kernels as ck
from cerberus_kernels.testing import binary

NODES, VOCAB = 64, 49152
EPSILON, DELTA = 0.09, 0.3


def inputs(batch: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with one likely token a row, in the manner of a language model; three drafts are accepted."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, NODES, vocab, generator=generator) * 2
    best = torch.randint(vocab, (batch, NODES), generator=generator)
    logits.scatter_(2, best.unsqueeze(2), 18.0)
    drafts = torch.randint(vocab, (batch, NODES), generator=generator)
    parents = torch.tensor(binary(NODES), dtype=torch.int32)
    node = 0
    for child in (2, 5, 12):
        drafts[:, child] = best[:, node]
        node = child
    return logits.to(dtype), drafts, parents


def plain_walk(passes, drafts: list[int], parents: list[int]) -> list[int]:
    """Longest accepted path; ``passes(parent, token)``."""
    depth = {0: 0}
    for node in range(1, len(parents)):
        if parents[node] in depth and passes(parents[node], drafts[node]):
            depth[node] = depth[parents[node]] + 1
    node = max(depth, key=lambda n: (depth[n], -n))
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def plain_torch_greedy(logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor) -> list[list[int]]:
    best, above = logits.argmax(-1).tolist(), parents.tolist()
    tokens = []
    for b, row in enumerate(drafts.tolist()):
        path = plain_walk(lambda node, token, b=b: best[b][node] == token, row, above)
        last = torch.softmax(logits[b, path[-1]].float(), -1)
        torch.special.entr(last).sum()
        tokens.append([row[node] for node in path[1:]] + [best[b][path[-1]]])
    return tokens


def plain_torch_typical(logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor) -> list[list[int]]:
    probs, above = torch.softmax(logits.float(), -1), parents.tolist()
    limits = (torch.special.entr(probs).sum(-1).neg().exp() * DELTA).clamp(max=EPSILON)
    of_parent = parents.clamp(min=0).to(torch.int64)
    passed = (probs[:, of_parent].gather(-1, drafts.unsqueeze(-1)).squeeze(-1) > limits[:, of_parent]).tolist()
    tokens = []
    for b, row in enumerate(drafts.tolist()):
        index = {(above[node], row[node]): passed[b][node] for node in range(1, len(row))}
        path = plain_walk(lambda node, token, index=index: index[node, token], row, above)
        last = probs[b, path[-1]]
        bonus = int(torch.multinomial(torch.where(last > limits[b, path[-1]], last, 0.0), 1))
        tokens.append([row[node] for node in path[1:]] + [bonus])
    return tokens


def plain_torch_sample(logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor) -> list[list[int]]:
    """A draw at every row, then the walk of greedy mode."""
    probs, above = torch.softmax(logits.float(), -1), parents.tolist()
    drawn = torch.multinomial(probs.flatten(0, 1), 1).view(logits.shape[:2]).tolist()
    tokens = []
    for b, row in enumerate(drafts.tolist()):
        path = plain_walk(lambda node, token, b=b: drawn[b][node] == token, row, above)
        tokens.append([row[node] for node in path[1:]] + [drawn[b][path[-1]]])
    return tokens


PLAIN = {"greedy": plain_torch_greedy, "typical": plain_torch_typical, "sample": plain_torch_sample}


def seconds_to_stream(num_bytes: int) -> float:
    """Time to read so many bytes from memory, by the rate at which torch reads an array no cache holds."""
    array = torch.zeros(1 << 26, dtype=torch.int16)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        array.max()
        times.append(time.perf_counter() - start)
    return num_bytes / (array.numel() * 2 / min(times))


@pytest.mark.parametrize("implementation", ["native", "reference", "plain_torch"])
@pytest.mark.parametrize("mode", list(PLAIN))
@pytest.mark.parametrize(
    ("batch", "vocab", "dtype"), [(1, VOCAB, "bfloat16"), (1, 128256, "bfloat16"), (4, VOCAB, "float32")]
)
def test_verify_tree(benchmark, batch, vocab, dtype, mode, implementation):
    """The extra column ``of_bound`` is the median over the time to read the visited rows and 5 us per call."""
    logits, drafts, parents = inputs(batch, vocab, getattr(torch, dtype))
    out = ck.verify_tree(logits, drafts, parents)

    def run(backend: str = implementation):
        if backend == "plain_torch":
            return PLAIN[mode](logits, drafts, parents)
        return ck.verify_tree(
            logits, drafts, parents, mode=mode, epsilon=EPSILON, delta=DELTA, backend=backend, out=out
        )

    expected = ck.Verdict(*(field.clone() for field in run("reference")))
    assert expected.num_accepted.tolist() == [3] * batch
    assert [row[:3] for row in run("plain_torch")] == expected.tokens[:, :3].tolist()
    assert torch.equal(run("native").tokens, expected.tokens)
    benchmark.group = f"verify_tree {mode} B={batch} N={NODES} V={vocab} {dtype}"
    benchmark.pedantic(run, rounds=100 if implementation == "native" else 3, warmup_rounds=1)
    bound = seconds_to_stream(4 * batch * vocab * logits.element_size()) + 5e-6
    benchmark.extra_info["of_bound"] = round(benchmark.stats.stats.median / bound, 2)


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("drafting", ["iid", "without_replacement"])
def test_rejection(benchmark, drafting, implementation):
    logits, drafts, parents = inputs(1, VOCAB, torch.bfloat16)
    draft_probs = torch.softmax(logits[:, :1].float() / 2, -1).expand(-1, NODES, -1)

    def run(backend: str = implementation):
        return ck.verify_tree(
            logits, drafts, parents, mode="rejection", drafting=drafting, draft_probs=draft_probs, backend=backend
        )

    assert torch.equal(run("native").tokens, run("reference").tokens)
    benchmark.group = f"verify_tree rejection {drafting} B=1 N={NODES} V={VOCAB} bfloat16"
    benchmark.pedantic(run, rounds=20, warmup_rounds=1)


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("filters", [{"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_sample_with_filters(benchmark, filters, implementation):
    logits, drafts, parents = inputs(1, VOCAB, torch.bfloat16)

    def run(backend: str = implementation):
        return ck.verify_tree(logits, drafts, parents, mode="sample", backend=backend, **filters)

    assert torch.equal(run("native").tokens, run("reference").tokens)
    benchmark.group = f"verify_tree sample {filters} B=1 N={NODES} V={VOCAB} bfloat16"
    benchmark.pedantic(run, rounds=20, warmup_rounds=1)


@pytest.mark.parametrize("form", ["new outputs", "out="])
def test_call_overhead(benchmark, form):
    """Two nodes over a vocabulary of 8: nothing but the way there and back."""
    logits, drafts = torch.randn(1, 2, 8), torch.tensor([[1, 2]])
    parents = torch.tensor([-1, 0], dtype=torch.int32)
    out = ck.verify_tree(logits, drafts, parents) if form == "out=" else None
    benchmark.group = "verify_tree call overhead B=1 N=2 V=8"
    benchmark.pedantic(lambda: ck.verify_tree(logits, drafts, parents, out=out), rounds=500, warmup_rounds=20)


@pytest.mark.parametrize("parts", ["matmul then verify", "matmul", "verify"])
def test_threads_are_shared_with_torch(benchmark, parts):
    """Alternating a matrix product of torch with the operator costs no more than the two apart."""
    logits, drafts, parents = inputs(1, VOCAB, torch.float32)
    left = torch.randn(256, 256)

    def run() -> None:
        if "matmul" in parts:
            left @ left
        if "verify" in parts:
            ck.verify_tree(logits, drafts, parents, backend="native")

    assert math.isfinite(float((left @ left).sum()))
    benchmark.group = "verify_tree alternating with torch"
    benchmark.pedantic(run, rounds=200, warmup_rounds=10)
