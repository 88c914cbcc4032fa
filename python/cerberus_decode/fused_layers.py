"""Decoder layers of the Llama family in six calls, for passes over draft trees on the CPU.

A small model's pass over one token spends as much time in the small steps between its matrix products as in these.
:func:`~cerberus_kernels.packed_linear` can take most of those steps along; what is left of a layer is two products and
an attention, a product, and a gated pair. Only passes that carry a tree's context go this way. Every other call of the
layer runs transformers' own code on the same weights.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import nn

import cerberus_kernels as ck

from .adapter import CONTEXT_KEYWORD

# Layers with nothing but norm, rotary attention, norm, and a SiLU-gated feed-forward part.
_KNOWN_LAYERS = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
}


class Merged(NamedTuple):
    """Several linear layers as one.

    Attributes:
        parts: the layers' packed weights, views into ``packed``.
        packed: all of them, one below the other.
        bias: all biases, or None.
    """

    parts: tuple[ck.PackedWeight, ...]
    packed: ck.PackedWeight
    bias: torch.Tensor | None


def can_fuse(layer: nn.Module) -> bool:
    """Whether a module is a decoder layer that :func:`fuse` understands, with packed linear layers throughout."""
    kind = type(layer)
    if f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN_LAYERS or layer.training:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    if getattr(attention.config, "hidden_act", None) != "silu" or _window(attention) is not None:
        return False
    groups = _groups(layer)
    linears = [linear for group in groups for linear in group] + [attention.o_proj, mlp.down_proj]
    return all(hasattr(linear, "packed") for linear in linears) and all(map(_can_merge, groups))


def fuse(layer: nn.Module) -> None:
    """Let a layer of :func:`can_fuse` run in few calls over draft trees; parameters and modules stay as they are."""
    layer.forward = types.MethodType(_forward, layer)


def is_fused(layer: nn.Module) -> bool:
    """Whether :func:`fuse` was here."""
    return "forward" in vars(layer) and getattr(layer.forward, "__func__", None) is _forward


def _window(attention: Any) -> int | None:
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    # Mistral's attention asks its configuration, others have no window.
    return getattr(attention.config, "sliding_window", None) if "mistral" in type(attention).__module__ else None


def _groups(layer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Linear layers that read the same rows."""
    attention, mlp = layer.self_attn, layer.mlp
    return (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)


def _can_merge(linears: tuple[Any, ...]) -> bool:
    """Panels of full width can stand one below the other, and biases must be all there or all absent."""
    width = linears[0].packed.panels.shape[2] // 2 if hasattr(linears[0], "packed") else 0
    full = width > 0 and all(linear.out_features % width == 0 for linear in linears)
    return full and len({linear.bias is None for linear in linears}) == 1


def _merge(linears: tuple[Any, ...]) -> Merged:
    """One packed weight for several layers, which from then on hold views of it instead of their own copies."""
    panels = torch.cat([linear.packed.panels for linear in linears])
    first = 0
    for linear in linears:
        packed = linear.packed
        last = first + packed.panels.shape[0]
        linear.packed = ck.PackedWeight(panels[first:last], packed.out_features, packed.in_features)
        first = last
    parts = tuple(linear.packed for linear in linears)
    packed = ck.PackedWeight(panels, sum(part.out_features for part in parts), parts[0].in_features)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Merged(parts, packed, torch.cat(biases) if biases else None)


class Parts(NamedTuple):
    """What a pass takes from a layer's modules; to look it up there costs a third of a small model's pass.

    Attributes:
        norms: input and post-attention normalisation.
        linears: q, k, v, gate, up, output and down projection.
        packed: their packed weights when the parts were made.
        qkv: the first three as one.
        gate_up: the next two as one.
        attention: the attention module.
        num_queries: heads of the queries.
        num_values: heads of the values, and of the keys.
    """

    norms: tuple[Any, Any]
    linears: tuple[Any, ...]
    packed: tuple[ck.PackedWeight, ...]
    qkv: Merged
    gate_up: Merged
    attention: Any
    num_queries: int
    num_values: int

    def are_current(self) -> bool:
        """Whether no linear layer has packed its weight anew since, as it does when the weight has changed."""
        return all(linear.__dict__["packed"] is part for linear, part in zip(self.linears, self.packed, strict=True))


def _parts(layer: Any) -> Parts:
    """A layer's parts, made anew where a weight has changed since."""
    known: Parts | None = layer.__dict__.get("_fused_parts")
    if known is not None and known.are_current():
        return known
    groups, attention = _groups(layer), layer.self_attn
    qkv, gate_up = map(_merge, groups)
    linears = (*groups[0], *groups[1], attention.o_proj, layer.mlp.down_proj)
    heads = [part.out_features // attention.head_dim for part in qkv.parts]
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    packed = tuple(linear.packed for linear in linears)
    layer._fused_parts = Parts(norms, linears, packed, qkv, gate_up, attention, heads[0], heads[2])
    return layer._fused_parts


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[B, N, heads, Dh]`` by ``[B, N, Dh]``, in the order of transformers' roundings."""
    low, high = x.chunk(2, -1)
    return x * cos.unsqueeze(2) + torch.cat((-high, low), -1) * sin.unsqueeze(2)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The layer's forward: hidden states ``[B, N, H]`` to the same."""
    context = kwargs.get(CONTEXT_KEYWORD)
    if context is None or position_embeddings is None or torch.is_grad_enabled():
        return type(self).forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            **kwargs,
        )
    parts = _parts(self)
    before, after = parts.norms
    output, down = parts.linears[5:]
    num_queries, num_values = parts.num_queries, parts.num_values
    attention = parts.attention.__dict__
    batch, nodes, _ = hidden_states.shape
    hidden_states = hidden_states.contiguous()
    heads = ck.packed_linear(
        hidden_states, parts.qkv.packed, bias=parts.qkv.bias, norm_weight=before.weight, eps=before.variance_epsilon
    ).view(batch, nodes, -1, attention["head_dim"])
    queries_and_keys, values = heads.split((num_queries + num_values, num_values), 2)
    queries, keys = _rotated(queries_and_keys, *position_embeddings).split((num_queries, num_values), 2)
    attended = context.attend(attention["layer_idx"], queries, keys, values, scale=attention["scaling"])
    hidden_states = ck.packed_linear(
        attended.view(batch, nodes, -1), parts.packed[5], bias=output.bias, residual=hidden_states
    )
    inner = ck.packed_linear(
        hidden_states,
        parts.gate_up.packed,
        bias=parts.gate_up.bias,
        norm_weight=after.weight,
        eps=after.variance_epsilon,
    )
    return ck.packed_linear(inner, parts.packed[6], bias=down.bias, gated=True, residual=hidden_states)
