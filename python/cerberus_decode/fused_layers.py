"""Decoder layers of the Llama family in one call each, for passes over draft trees on the CPU.

A small model's pass over one token spends as much time on the way between its operators as in these;
:func:`~cerberus_kernels.decoder_layer` is all of a layer. Only passes that carry a tree's context go this way. Every
other call of the layer runs transformers' own code on the same weights.
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
    """Let a layer of :func:`can_fuse` run in one call over draft trees; parameters and modules stay as they are."""
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
    """What a pass takes from a layer's modules; to look it up there each time costs as much as the call itself.

    Attributes:
        linears: q, k, v, gate, up, output and down projection.
        packed: their packed weights when the parts were made.
        norms: input and post-attention normalisation's weights.
        merged: the first three linear layers as one, and the next two.
        weights: all of it as the operator takes it.
        layer_index: place in the cache.
        scale: of the scores.
    """

    linears: tuple[Any, ...]
    packed: tuple[ck.PackedWeight, ...]
    norms: tuple[torch.Tensor, torch.Tensor]
    merged: tuple[Merged, Merged]
    weights: ck.DecoderWeights
    layer_index: int
    scale: float

    def are_current(self, layer: Any) -> bool:
        """Whether the layer still has these weights: a linear layer packs anew when its weight has changed."""
        modules = layer._modules
        before, after = modules["input_layernorm"], modules["post_attention_layernorm"]
        norms = (before._parameters["weight"], after._parameters["weight"])
        return (
            norms[0] is self.norms[0]
            and norms[1] is self.norms[1]
            and all(linear.__dict__["packed"] is part for linear, part in zip(self.linears, self.packed, strict=True))
        )


def _parts(layer: Any) -> Parts:
    """A layer's parts, made anew where a weight has changed since."""
    known: Parts | None = layer.__dict__.get("_fused_parts")
    if known is not None and known.are_current(layer):
        return known
    groups, attention, mlp = _groups(layer), layer.self_attn, layer.mlp
    qkv, gate_up = map(_merge, groups)
    linears = (*groups[0], *groups[1], attention.o_proj, mlp.down_proj)
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    weights = ck.DecoderWeights(
        qkv.packed,
        attention.o_proj.packed,
        gate_up.packed,
        mlp.down_proj.packed,
        before.weight.detach(),
        after.weight.detach(),
        before.variance_epsilon,
        after.variance_epsilon,
        qkv.bias,
        attention.o_proj.bias,
        gate_up.bias,
        mlp.down_proj.bias,
    )
    packed = tuple(linear.packed for linear in linears)
    norms = (before.weight, after.weight)
    layer._fused_parts = Parts(
        linears, packed, norms, (qkv, gate_up), weights, attention.layer_idx, float(attention.scaling)
    )
    return layer._fused_parts


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
    cos, sin = position_embeddings
    return context.run_layer(parts.layer_index, hidden_states.contiguous(), parts.weights, cos, sin, parts.scale)
