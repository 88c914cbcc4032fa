"""Tiny models and heads for the decoder's tests: random weights, and heads that know the right answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
import transformers
from cerberus_decode import DraftHeads, HeadsConfig

import cerberus_kernels as ck

VOCAB = 97
HIDDEN = 64
TREE = ((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,), (1, 0), (0, 0, 0, 0), (3,), (0, 2), (1, 1), (0, 1, 0))

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(config_class: type, model_class: type, **overrides) -> transformers.PreTrainedModel:
    """A random model in eval mode, the same for the same arguments."""
    torch.manual_seed(overrides.pop("seed", 1))
    return model_class(config_class(**(SHAPE | overrides))).eval()


@functools.cache
def tiny_llama(**overrides) -> transformers.PreTrainedModel:
    """Shared between tests, which leave it as it is."""
    return build(transformers.LlamaConfig, transformers.LlamaForCausalLM, **overrides)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def greedy(model, ids: list[int], max_new_tokens: int, eos_token_id: int | None = None) -> list[int]:
    """transformers' own greedy continuation, cut from one run per prompt."""
    rounded = -(-max_new_tokens // 40) * 40 if eos_token_id is None else max_new_tokens
    return _kept_greedy(model, tuple(ids), rounded, eos_token_id)[:max_new_tokens]


def fresh_greedy(model, ids, max_new_tokens: int, eos_token_id: int | None = None) -> list[int]:
    """The same, run now."""
    tokens = torch.tensor([ids])
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


_kept_greedy = functools.cache(fresh_greedy)


def random_heads(seed: int = 0, num_candidates: int = 12, tree=TREE) -> DraftHeads:
    """Real linked heads with random weights: nearly all drafts are wrong."""
    generator = torch.Generator().manual_seed(seed)
    config = HeadsConfig(
        kind="cerberus",
        num_heads=4,
        num_blocks=2,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        root_embedding=True,
        root_scale=1.0,
        draft_vocab_size=VOCAB,
        num_candidates=num_candidates,
        tree=tree,
    )
    weight = torch.randn(config.weight_shape, generator=generator) * 0.1
    return DraftHeads(config, weight, torch.zeros(config.weight_shape[:3]))


class OracleHeads:
    """Heads that read the right continuation from ``text`` at the place where ``generation`` stands.

    Args:
        text: prompt and right continuation.
        num_heads: K.
        right: heads that are right in call ``i``, by default all; the others propose wrong tokens only.
        tree: the configuration's tree.
        vocab_size: wrong proposals stay below it.
    """

    def __init__(
        self,
        text: list[int],
        num_heads: int = 4,
        right: Callable[[int], int] | None = None,
        tree=TREE,
        vocab_size: int = VOCAB,
    ) -> None:
        self.vocab_size = vocab_size
        self.config = SimpleNamespace(num_heads=num_heads, tree=tree, tree_gains=(), gate={})
        self.text = text
        self.right = right or (lambda call: num_heads)
        self.calls: list[SimpleNamespace] = []
        self.generation = None

    def propose(self, hidden, root, k=10):
        position = self.generation.metrics.prompt_tokens + len(self.generation.tokens)
        known = self.text[position : position + self.config.num_heads]
        known += [0] * (self.config.num_heads - len(known))
        first_wrong = self.right(len(self.calls))
        rows = [
            [(token + rank + (head >= first_wrong)) % self.vocab_size for rank in range(k)]
            for head, token in enumerate(known)
        ]
        tokens = torch.tensor([rows], dtype=torch.int32)
        self.calls.append(SimpleNamespace(hidden=hidden.clone(), root=root.clone(), position=position, tokens=tokens))
        return tokens, torch.zeros(tokens.shape)


def run_oracle(decoder, ids: list[int], **options):
    """Generate with an oracle that follows the generation."""
    generation = decoder.stream(ids, **options)
    decoder.heads.generation = generation
    steps = list(generation)
    return generation.result(), steps


def tree_from_parents(parents) -> ck.Tree:
    """The tree of a parents list; siblings get ranks in order."""
    paths: list[tuple[int, ...]] = [()]
    children: dict[int, int] = {}
    for parent in list(parents)[1:]:
        rank = children.get(parent, 0)
        children[parent] = rank + 1
        paths.append((*paths[parent], rank))
    return ck.Tree.from_choices(paths[1:])
