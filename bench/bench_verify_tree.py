"""verify_tree against its reference and the plain PyTorch way: argmax or softmax of all rows, then a walk on lists."""

from __future__ import annotations

import functools

import pytest
import torch

import cerberus_kernels as ck
from bench.conftest import same
from bench.measure import Work
from cerberus_kernels.testing import binary

NODES, VOCAB = 64, 49152
EPSILON, DELTA = 0.09, 0.3


@functools.lru_cache(maxsize=1)
def inputs(batch: int, vocab: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    return logits.to(getattr(torch, dtype)), drafts, parents


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


def torch_greedy(logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor) -> list[list[int]]:
    best, above = logits.argmax(-1).tolist(), parents.tolist()
    tokens = []
    for b, row in enumerate(drafts.tolist()):
        path = plain_walk(lambda node, token, b=b: best[b][node] == token, row, above)
        last = torch.softmax(logits[b, path[-1]].float(), -1)
        torch.special.entr(last).sum()
        tokens.append([row[node] for node in path[1:]] + [best[b][path[-1]]])
    return tokens


def torch_typical(logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor) -> list[list[int]]:
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


def torch_sample(logits: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor) -> list[list[int]]:
    """A draw at every row, then the walk of greedy mode."""
    probs, above = torch.softmax(logits.float(), -1), parents.tolist()
    drawn = torch.multinomial(probs.flatten(0, 1), 1).view(logits.shape[:2]).tolist()
    tokens = []
    for b, row in enumerate(drafts.tolist()):
        path = plain_walk(lambda node, token, b=b: drawn[b][node] == token, row, above)
        tokens.append([row[node] for node in path[1:]] + [drawn[b][path[-1]]])
    return tokens


PLAIN = {"greedy": torch_greedy, "typical": torch_typical, "sample": torch_sample}


def agree(mode: str, found: ck.Verdict | list[list[int]], right: ck.Verdict) -> None:
    """Plain PyTorch has its own noise, so that beyond greedy mode only the accepted drafts are the same."""
    assert right.num_accepted.tolist() == [3] * len(right.tokens)
    if isinstance(found, ck.Verdict):
        same(found, right)
    else:
        count = 4 if mode == "greedy" else 3
        assert [row[:count] for row in found] == right.tokens[:, :count].tolist()


def visited(logits: torch.Tensor) -> int:
    """Bytes of the rows that a walk over three accepted drafts stands on."""
    return 4 * logits.shape[0] * logits.shape[2] * logits.element_size()


@pytest.mark.parametrize("case", ["native", "reference", "torch"])
@pytest.mark.parametrize("mode", list(PLAIN))
@pytest.mark.parametrize(
    ("batch", "vocab", "dtype"), [(1, VOCAB, "bfloat16"), (1, 128256, "bfloat16"), (4, VOCAB, "float32")]
)
def test_verify_tree(compare, batch, vocab, dtype, mode, case):
    logits, drafts, parents = inputs(batch, vocab, dtype)
    out = ck.verify_tree(logits, drafts, parents)

    def ours(backend):
        return ck.verify_tree(
            logits, drafts, parents, mode=mode, epsilon=EPSILON, delta=DELTA, backend=backend, out=out
        )

    calls = {
        "native": functools.partial(ours, "native"),
        "reference": functools.partial(ours, "reference"),
        "torch": lambda: PLAIN[mode](logits, drafts, parents),
    }
    group = f"verify_tree {mode} B={batch} N={NODES} V={vocab} {dtype}"
    compare(group, calls, case, functools.partial(agree, mode), work=Work(visited(logits)))


@pytest.mark.parametrize("case", ["native", "reference"])
@pytest.mark.parametrize("drafting", ["iid", "without_replacement"])
def test_rejection(compare, drafting, case):
    logits, drafts, parents = inputs(1, VOCAB, "bfloat16")
    draft_probs = torch.softmax(logits[:, :1].float() / 2, -1).expand(-1, NODES, -1)

    def run(backend):
        return ck.verify_tree(
            logits, drafts, parents, mode="rejection", drafting=drafting, draft_probs=draft_probs, backend=backend
        )

    calls = {backend: functools.partial(run, backend) for backend in ("native", "reference")}
    # Every node's draft distribution is the same row here.
    work = Work(visited(logits) + VOCAB * draft_probs.element_size())
    compare(f"verify_tree rejection {drafting} B=1 N={NODES} V={VOCAB} bfloat16", calls, case, work=work)


@pytest.mark.parametrize("case", ["native", "reference"])
@pytest.mark.parametrize("filters", [{"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_sample_with_filters(compare, filters, case):
    logits, drafts, parents = inputs(1, VOCAB, "bfloat16")
    run = functools.partial(ck.verify_tree, logits, drafts, parents, mode="sample", **filters)
    calls = {backend: functools.partial(run, backend=backend) for backend in ("native", "reference")}
    name = " ".join(f"{key}={value}" for key, value in filters.items())
    group = f"verify_tree sample {name} B=1 N={NODES} V={VOCAB} bfloat16"
    compare(group, calls, case, work=Work(visited(logits)))
