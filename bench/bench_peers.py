"""verify_tree, head_topk and tree_mask against the functions of Medusa and transformers that do the same job.

Trees of the first Medusa are products: every node of a level has as many children as the next head has candidates.
One of 64 nodes, and a chain.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import cerberus_kernels as ck
from bench import peers
from bench.conftest import same
from bench.measure import Work, in_turns

VOCAB, WIDTH = 49152, 576
EPSILON, DELTA = 0.09, 0.3
TREES = {"tree of 64": (3, 4, 4), "chain of 6": (1,) * 5}


def product_tree(branching: tuple[int, ...]) -> ck.Tree:
    depths = range(1, len(branching) + 1)
    return ck.Tree.from_choices([c for d in depths for c in itertools.product(*map(range, branching[:d]))])


@functools.lru_cache(maxsize=1)
def step(tree_name: str):
    """The tree, logits of the heads [K, 1, 1, V], of the base at the root and at the nodes; two drafts are right."""
    branching = TREES[tree_name]
    generator = torch.Generator().manual_seed(0)
    tree = product_tree(branching)
    head_logits = (torch.randn(len(branching), 1, 1, VOCAB, generator=generator) * 2).bfloat16()
    # Candidates without ties, whose order would be anybody's.
    for head in head_logits:
        tokens = torch.randperm(VOCAB, generator=generator)[: max(branching)]
        head[0, 0, tokens] = torch.arange(20.0, 20.0 - len(tokens), -1).bfloat16()
    root_logits = torch.randn(1, 1, VOCAB, generator=generator)
    drafts = tree.draft_tokens(root_logits[:, 0].argmax(-1), head_logits[None, :, 0, 0].topk(max(branching)).indices)
    logits = torch.randn(1, tree.num_nodes, VOCAB, generator=generator) * 2
    best = torch.randint(VOCAB, (tree.num_nodes,), generator=generator)
    path = tree.paths[len(tree.paths) // 2].long()
    best[path[:2]] = drafts[0, path[1:3]].long()
    logits[0].scatter_(1, best.unsqueeze(1), 18.0)
    return tree, head_logits, root_logits, drafts, logits.bfloat16()


def medusa_buffers(tree_name: str) -> dict[str, torch.Tensor]:
    return peers.medusa().generate_medusa_buffers((1, *TREES[tree_name]), device="cpu")


def medusa_verify(mode: str, logits, candidates, retrieve):
    """Its acceptance, and the next root as its loop takes it: the argmax at the last accepted node."""
    paths = logits[0, retrieve]
    temperature = 0.0 if mode == "greedy" else 1.0
    best, length = peers.medusa().evaluate_posterior(paths, candidates, temperature, EPSILON, DELTA)
    return candidates[best, 1 : int(length) + 1].tolist(), int(paths[best, length].argmax())


@pytest.mark.parametrize("case", ["native", "reference", "peer_medusa"])
@pytest.mark.parametrize("mode", ["greedy", "typical"])
@pytest.mark.parametrize("tree_name", TREES)
def test_verify_against_medusa(compare, tree_name, mode, case):
    tree, head_logits, root_logits, drafts, logits = step(tree_name)

    def ours(backend):
        return ck.verify_tree(
            logits, drafts, tree.parents, mode=mode, epsilon=EPSILON, delta=DELTA, max_depth=tree.max_depth,
            backend=backend,
        )  # fmt: skip

    calls = {backend: functools.partial(ours, backend) for backend in ("native", "reference")}
    if case == "peer_medusa":
        buffers = medusa_buffers(tree_name)
        candidates, tree_candidates = peers.medusa().generate_candidates(
            head_logits, root_logits, TREES[tree_name], buffers["tree_indices"], 0.0
        )
        assert torch.equal(tree_candidates, drafts.long()), "the two draft other tokens"
        calls[case] = functools.partial(medusa_verify, mode, logits, candidates, buffers["retrieve_indices"])

    def agree(found, right):
        assert right.num_accepted.tolist() == [2]
        if isinstance(found, ck.Verdict):
            return same(found, right)
        assert found[0] == right.tokens[0, :2].tolist()
        # Typical acceptance draws its last token here, Medusa takes the likeliest.
        assert mode == "typical" or found[1] == int(right.tokens[0, 2])

    work = Work(3 * VOCAB * logits.element_size())
    compare(f"verify_tree {mode} Medusa's {tree_name} V={VOCAB} bfloat16", calls, case, agree, work=work)


@pytest.mark.parametrize("case", ["native", "reference", "peer_medusa"])
def test_drafts_against_medusa(compare, case):
    """From the heads' states to the tokens of the tree: vocabulary projection, candidates, tokens by node."""
    tree_name = "tree of 64"
    branching, tree = TREES[tree_name], product_tree(TREES[tree_name])
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(len(branching), WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator) / WIDTH**0.5
    root_logits = torch.randn(1, 1, VOCAB, generator=generator)

    def ours(vocab_weight, backend):
        candidates = ck.head_topk(states, vocab_weight, max(branching), backend=backend)
        return tree.draft_tokens(root_logits[:, 0].argmax(-1), candidates.tokens[None]).long()

    calls = {b: in_turns(functools.partial(ours, backend=b), weight) for b in ("native", "reference")}
    if case == "peer_medusa":
        indices = medusa_buffers(tree_name)["tree_indices"]

        def peer(vocab_weight):
            logits = torch.nn.functional.linear(states, vocab_weight)[:, None, None]
            return peers.medusa().generate_candidates(logits, root_logits, branching, indices, 0.0)[1]

        calls[case] = in_turns(peer, weight)
    work = Work(weight.numel() * 4, 2 * len(branching) * weight.numel())
    compare(f"head_topk Medusa's {tree_name} V={VOCAB} H={WIDTH} float32", calls, case, work=work)


@pytest.mark.parametrize("case", ["native", "reference", "peer_medusa"])
def test_mask_against_medusa(compare, case):
    """What a tree's shape means, from its description to mask, depths and paths."""
    tree_name = "tree of 64"

    def ours(backend):
        tree = product_tree(TREES[tree_name])
        mask = ck.unpack_mask(ck.tree_mask(tree.parents, backend=backend), tree.num_nodes)
        return mask, tree.depths.long(), tree.paths.long()

    def peer():
        buffers = medusa_buffers(tree_name)
        return buffers["medusa_attn_mask"][0, 0] > 0, buffers["medusa_position_ids"], buffers["retrieve_indices"]

    calls = {"native": lambda: ours("native"), "reference": lambda: ours("reference"), "peer_medusa": peer}
    if case == "peer_medusa":
        peers.medusa()
    compare(f"tree_mask Medusa's {tree_name}, all buffers", calls, case)


@pytest.mark.parametrize("case", ["native", "reference", "peer_transformers"])
def test_rejection_against_transformers(compare, case):
    """A chain of drafts drawn from a draft model: two that the target likes better, then one that it never says."""
    count = 5
    generator = torch.Generator().manual_seed(0)
    draft_logits = torch.randn(1, count, VOCAB, generator=generator) * 2
    logits = torch.randn(1, count + 1, VOCAB, generator=generator) * 2
    tokens = torch.randint(VOCAB, (1, count), generator=generator)
    draft_logits.scatter_(2, tokens[..., None], 12.0)
    logits[0, torch.arange(count), tokens[0]] = torch.tensor([18.0, 18.0, -80.0, 18.0, 18.0])
    nodes = torch.cat([torch.zeros(1, 1, dtype=torch.int64), tokens], dim=1)
    parents = torch.arange(-1, count, dtype=torch.int32)

    def ours(backend):
        # As its peer, from the draft model's logits; a node's row is the distribution that its token was drawn from.
        probs = draft_logits.softmax(-1)
        verdict = ck.verify_tree(
            logits, nodes, parents, mode="rejection", drafting="iid",
            draft_probs=torch.cat([probs[:, :1], probs], dim=1), backend=backend,
        )  # fmt: skip
        return verdict.tokens[0, :2].tolist(), int(verdict.num_accepted)

    def peer():
        valid, matches = sampling(tokens, draft_logits, count, logits)
        return valid[0, :2].tolist(), int(matches)

    calls = {"native": lambda: ours("native"), "reference": lambda: ours("reference"), "peer_transformers": peer}
    if case == "peer_transformers":
        sampling = peers.transformers_sampling()

    def agree(found, right):
        assert right == (tokens[0, :2].tolist(), 2)
        assert found == right

    work = Work((3 * logits.element_size() + 2 * 4 * count) * VOCAB)
    compare(f"verify_tree rejection chain of {count} V={VOCAB} float32", calls, case, agree, work=work)
