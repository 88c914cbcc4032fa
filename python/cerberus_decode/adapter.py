"""Running transformers' causal language models over draft trees, without touching their code.

transformers looks up its attention function by name. This module registers one that writes the new keys and values
into the decoder's own cache and calls ``tree_attention``; the tree travels to it as an extra keyword of ``forward``.
The name is active only during a call of :class:`Adapter`, so the model stays usable with ``generate`` in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import cerberus_kernels as ck
from cerberus_kernels._checks import refuse

from .cache import KVCache
from .drafting import DraftTree
from .layout import TreeLayout

ATTENTION_NAME = "cerberus_tree"
CONTEXT_KEYWORD = "cerberus_context"
PREFILL_CHUNK = 512


class ModelUnsupported(ValueError):
    """The model cannot be decoded with trees; the message says what it lacks."""


class TreeContext:
    """What the attention function needs in one forward pass: the cache and the tree's mask."""

    __slots__ = ("cache", "layers_run", "mask")

    def __init__(self, cache: KVCache, mask: torch.Tensor) -> None:
        self.cache = cache
        self.mask = mask
        self.layers_run = 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
        softcap: float = 0.0,
        window: int | None = None,
    ) -> torch.Tensor:
        """Put the nodes' keys and values, ``[B, N, Hkv, Dh]``, into the cache and attend; ``[B, N, Hq, Dh]``."""
        key_cache, value_cache = self.cache.write(layer, keys, values)
        self.layers_run += 1
        lengths = self.cache.prefix_lens
        attended = ck.tree_attention(
            queries, key_cache, value_cache, self.mask, lengths, scale=scale, softcap=softcap, window=window
        )
        assert isinstance(attended, torch.Tensor)  # without return_lse
        return attended

    def run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: ck.DecoderWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """A whole decoder layer over the nodes, its keys and values into the cache; ``[B, N, H]``."""
        key_cache, value_cache = self.cache.reserve(layer, hidden.shape[1])
        self.layers_run += 1
        return ck.decoder_layer(
            hidden, weights, cos, sin, key_cache, value_cache, self.mask, self.cache.prefix_lens, scale=scale
        )


def _tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """transformers' attention function: query ``[B, Hq, N, Dh]``, key and value ``[B, Hkv, N, Dh]``."""
    context = kwargs.get(CONTEXT_KEYWORD)
    if context is None:
        raise ModelUnsupported(f"{type(module).__name__} drops the keyword {CONTEXT_KEYWORD} on its way to attention")
    if s_aux is not None:
        raise ModelUnsupported(f"{type(module).__name__} uses attention sinks, which tree_attention does not have")
    parts = (part.transpose(1, 2) for part in (query, key, value))
    return context.attend(module.layer_idx, *parts, scaling, softcap or 0.0, sliding_window), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask function: the tree's mask travels in the context."""


AttentionInterface.register(ATTENTION_NAME, _tree_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class Adapter:
    """A causal language model that runs over draft trees with the decoder's own cache.

    Making one checks, on eight tokens, that the model's logits over a small tree equal its own plain forward passes
    over the tree's paths, so a model that ignores the attention interface is refused before it produces wrong text.

    Args:
        model: a transformers causal LM in eval mode.

    Raises:
        ModelUnsupported: not a decoder-only model of the attention interface, or the check failed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            raise ModelUnsupported(f"model must be a transformers PreTrainedModel, got {name}")
        if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
            raise ModelUnsupported(f"model must be a decoder-only causal LM with an output projection, got {name}")
        if not getattr(model, "_supports_attention_backend", False):
            raise ModelUnsupported(f"{name} does not use transformers' attention interface")
        if model.training:
            raise ModelUnsupported(f"{name} must be in eval mode, got training mode")
        self.model = model
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.num_layers: int = config.num_hidden_layers
        query_heads = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or query_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // query_heads
        self._configs = list(
            {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}.values()
        )
        chain = torch.arange(-1, PREFILL_CHUNK - 1, dtype=torch.int32)
        self._chain_mask = ck.tree_mask(chain).to(self.device)  # [512, 16]
        self._self_check()

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lives."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of hidden states and cache."""
        return self.model.dtype

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache for this model."""
        return KVCache(self.num_layers, batch, capacity, self.num_kv_heads, self.head_dim, self.dtype, self.device)

    def forward(
        self,
        tokens: torch.Tensor,
        layout: TreeLayout | DraftTree,
        cache: KVCache,
        valid: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the nodes of a tree; their keys and values end up behind the committed slots.

        Args:
            tokens: integer ``[B, N]``, token of every node.
            layout: the tree.
            cache: committed prefix of each sequence.
            valid: bool ``[B, N]`` or None; nodes that are False hold no token (-1, or anything), their rows are
                undefined, and no valid node may descend from one.

        Returns:
            Last hidden states ``[B, N, H]`` (the LM head's input) and logits ``[B, N, V]``.

        Raises:
            ValueError: a token outside the vocabulary in a valid place, or too few free slots.
        """
        if valid is not None:
            tokens = tokens.where(valid, 0)
        self._check_tokens(tokens)
        context = TreeContext(cache, layout.mask)
        positions = cache.prefix_lens.unsqueeze(1) + layout.depths
        return self._run(tokens, positions, context, logits_to_keep=0)

    def prefill(
        self, tokens: torch.Tensor, cache: KVCache, keep_hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run and commit the prompt, or the next part of one, as chains of at most 512 tokens.

        Args:
            tokens: integer ``[B, P]``, P >= 1.
            cache: receives the keys and values.
            keep_hidden: whether the hidden states of all tokens are wanted.

        Returns:
            Last hidden state ``[B, 1, H]``, or ``[B, P, H]`` with ``keep_hidden``, and logits ``[B, 1, V]`` of the
            last token.

        Raises:
            ValueError: a token outside the vocabulary, an empty prompt, or too few free slots.
        """
        if tokens.shape[1] == 0:
            refuse("prefill", "tokens", "at least one token long", list(tokens.shape))
        if tokens.shape[1] > cache.free_slots:
            refuse("prefill", "tokens", f"at most {cache.free_slots} long (the free slots)", tokens.shape[1])
        self._check_tokens(tokens)
        states: list[torch.Tensor] = []
        chunks = tokens.split(PREFILL_CHUNK, dim=1)
        for chunk in chunks:
            length = chunk.shape[1]
            context = TreeContext(cache, self._chain_mask[:length, : (length + 31) // 32])
            positions = cache.prefix_lens.unsqueeze(1) + torch.arange(length, device=self.device)
            if chunk is not chunks[-1]:
                with self._tree_attention_active():
                    output = self.model.base_model(
                        input_ids=chunk, position_ids=positions, use_cache=False, **{CONTEXT_KEYWORD: context}
                    )
                if keep_hidden:
                    states.append(output.last_hidden_state)
            else:
                hidden, logits = self._run(chunk, positions, context, 1, states if keep_hidden else None)
            cache.advance(length)
        return torch.cat(states, dim=1) if keep_hidden else hidden, logits

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: TreeContext,
        logits_to_keep: int,
        states: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of the last ``logits_to_keep`` tokens (0: all); ``states`` gets all states."""
        captured: list[torch.Tensor] = []
        head = self.model.get_output_embeddings()
        hooks = [head.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0]))]
        if states is not None:
            hooks.append(
                self.model.base_model.register_forward_hook(
                    lambda module, inputs, output: states.append(output.last_hidden_state)
                )
            )
        try:
            with self._tree_attention_active():
                output = self.model(
                    input_ids=tokens,
                    position_ids=positions,
                    use_cache=False,
                    logits_to_keep=logits_to_keep,
                    **{CONTEXT_KEYWORD: context},
                )
        finally:
            for hook in hooks:
                hook.remove()
        return captured[0], output.logits

    @contextmanager
    def _tree_attention_active(self) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = ATTENTION_NAME
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name

    def _check_tokens(self, tokens: torch.Tensor) -> None:
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            refuse("forward", "tokens", f"in [0, {self.vocab_size})", low if low < 0 else high)

    @torch.inference_mode()
    def _self_check(self) -> None:
        name = type(self.model).__name__
        ids = torch.arange(1, 9, device=self.device) * (self.vocab_size - 1) // 9
        prefix, nodes = ids[:3], ids[3:]
        paths = ([0, 1, 3], [0, 2, 4])
        rows = torch.stack([torch.cat([prefix, nodes[path]]) for path in paths])
        expected = self.model(input_ids=rows, use_cache=False).logits[:, 3:]  # [2, 3, V]
        cache = self.new_cache(capacity=8)
        layout = TreeLayout(ck.Tree.from_choices([(0,), (1,), (0, 0), (1, 0)]), self.device)
        context = TreeContext(cache, layout.mask)
        try:
            self.prefill(prefix.unsqueeze(0), cache)
            positions = cache.prefix_lens.unsqueeze(1) + layout.depths
            _, logits = self._run(nodes.unsqueeze(0), positions, context, logits_to_keep=0)
        except (TypeError, ValueError) as error:
            raise ModelUnsupported(f"{name} cannot run over a tree: {error}") from error
        if context.layers_run != self.num_layers:
            raise ModelUnsupported(
                f"{name} does not use transformers' attention interface in "
                f"{self.num_layers - context.layers_run} of {self.num_layers} layers"
            )
        actual = torch.stack([logits[0, path] for path in paths])
        difference = _relative_difference(actual, expected)
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        if not difference <= tolerance:
            raise ModelUnsupported(
                f"{name} does not follow the tree: its logits differ from plain forward passes by {difference:.2g} "
                f"(relative, at most {tolerance} allowed)"
            )


def _relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((actual - expected).norm() / spread.clamp(min=torch.finfo(torch.float32).tiny))
