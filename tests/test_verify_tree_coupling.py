"""Sample mode over any tree of drafts gives the tokens of plain sampling at the same seed and positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_cases import int32

import cerberus_kernels as ck
from cerberus_kernels.testing import random_parents


class ToyModel:
    """Logits from the last two tokens alone; entries are coarse, so that equal ones are common."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randint(-6, 7, (vocab_size, vocab_size, vocab_size), generator=generator) / 2

    def rows(self, text: list[int], drafts: list[int], parents: list[int]) -> torch.Tensor:
        """Logits [N, V]: row i is that of the token after node i; the root is the text's last token."""
        tokens = [text[-1], *(max(token, 0) for token in drafts[1:])]  # nothing follows the padding -1
        before = [text[-2], *(tokens[parent] for parent in parents[1:])]
        return self.table[before, tokens]


def plain_text(model: ToyModel, prompt: list[int], length: int, backend: str, **parameters) -> list[int]:
    """One token a step, from trees of the root alone."""
    text = list(prompt)
    for _ in range(length):
        rows = model.rows(text, [0], [-1]).unsqueeze(0)
        verdict = ck.verify_tree(
            rows, int32([[text[-1]]]), int32([-1]), mode="sample", position=len(text), backend=backend, **parameters
        )
        text.append(verdict.tokens.item())
    return text


def draft(model: ToyModel, text: list[int], future: list[int], parents: list[int], hit: float, generator) -> list[int]:
    """Tokens for a tree's nodes that often are the text's true continuation; others are random, or no token at all."""
    drafts, depths = [text[-1]], [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
        place = depths[-1] - 1
        if place < len(future) and torch.rand((), generator=generator) < hit:
            drafts.append(future[place])
        else:
            drafts.append(int(torch.randint(-1, model.vocab_size, (), generator=generator)))
    return drafts


@settings(max_examples=40, deadline=None)
@given(
    vocab_size=st.integers(2, 9),
    seed=st.integers(-(2**63), 2**63 - 1),
    tree_seed=st.integers(0, 2**31),
    hit=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    parameters=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
            "top_k": st.sampled_from([0, 0, 1, 3]),
            "top_p": st.sampled_from([1.0, 1.0, 0.5, 0.9]),
            "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        }
    ),
)
def test_text_equals_plain_sampling(vocab_size, seed, tree_seed, hit, parameters):
    model, prompt, length = ToyModel(vocab_size, tree_seed), [0, 1], 12
    for backend in ("native", "reference"):
        keys = {"seed": seed, **parameters}
        expected = plain_text(model, prompt, length, backend, **keys)
        generator = torch.Generator().manual_seed(tree_seed)
        text, steps = list(prompt), 0
        while len(text) < len(expected):
            nodes = int(torch.randint(1, 12, (), generator=generator))
            parents = random_parents(nodes, seed=tree_seed + steps)
            drafts = draft(model, text, expected[len(text) :], parents, hit, generator)
            verdict = ck.verify_tree(
                model.rows(text, drafts, parents).unsqueeze(0), torch.tensor([drafts]), int32(parents), mode="sample",
                position=len(text), backend=backend, **keys,
            )  # fmt: skip
            emitted = int(verdict.num_accepted) + 1
            text += verdict.tokens[0, :emitted].tolist()
            steps += 1
        assert text[: len(expected)] == expected
        if hit == 1.0:
            assert steps < length  # drafts that are right are kept


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_a_batch_of_texts_equals_plain_sampling(vocab_size):
    """Requests of several lengths and seeds go through ragged trees together; each gets its own text."""
    generator = torch.Generator().manual_seed(vocab_size)
    table = torch.randn(64, vocab_size, generator=generator) * 2
    seeds, keys = torch.tensor([3, -4, 2**40]), {"mode": "sample", "temperature": 0.8, "top_p": 0.95}

    def after(token: int) -> torch.Tensor:
        return table[token % 64]

    prompts = [[5], [6, 7, 8], [9]]
    plain = [list(prompt) for prompt in prompts]
    for _ in range(30):
        for b, text in enumerate(plain):
            row, own = after(text[-1]).view(1, 1, -1), {"seed": int(seeds[b]), "position": len(text)}
            verdict = ck.verify_tree(row, int32([[0]]), int32([-1]), **own, **keys)
            text.append(verdict.tokens.item())
    texts, steps = [list(prompt) for prompt in prompts], 0
    while min(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)) < 20:
        trees = [random_parents(4 + 3 * b, seed=50 * b + steps) for b in range(3)]
        drafts, rows = [], []
        for text, whole, parents in zip(texts, plain, trees, strict=True):
            tokens, depths = [text[-1]], [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
                place = len(text) + depths[-1] - 1
                hit = place < len(whole) and torch.rand((), generator=generator) < 0.7
                tokens.append(whole[place] if hit else int(torch.randint(vocab_size, (), generator=generator)))
            drafts.append(torch.tensor(tokens))
            rows.append(torch.stack([after(token) for token in tokens]))
        verdict = ck.verify_tree(
            torch.cat(rows), torch.cat(drafts), torch.cat([int32(parents) for parents in trees]), seed=seeds,
            position=torch.tensor([len(text) for text in texts]), cu_nodes=int32([0, 4, 11, 21]), max_depth=10, **keys,
        )  # fmt: skip
        for b, text in enumerate(texts):
            text += verdict.tokens[b, : int(verdict.num_accepted[b]) + 1].tolist()
        steps += 1
    assert steps < 20
    for text, whole in zip(texts, plain, strict=True):
        count = min(len(text), len(whole))
        assert text[:count] == whole[:count]
