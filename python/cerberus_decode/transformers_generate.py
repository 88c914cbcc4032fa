"""Tree decoding inside transformers: ``model.generate(ids, custom_generate=custom_generate, heads=heads)``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cerberus_kernels._checks import refuse

from .decode import Decoder
from .policy import Policy

_OP = "custom_generate"
# Rules that verify_tree applies by itself, in the same order; all others change logits in ways it does not know.
_FILTERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_MODES = {"greedy_search": "greedy", "sample": "sample"}
_SETTINGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # in the order of _FILTERS
_ATTRIBUTE = "_cerberus_decoder"


class _Kept:
    """A model's decoder, hung on the model: the two go together, and copies of the model make their own."""

    def __init__(self, heads: Any = None, policy: Policy | None = None, decoder: Decoder | None = None) -> None:
        self.heads, self.policy, self.decoder = heads, policy, decoder

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def custom_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    heads: Any = None,
    policy: Policy | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """What transformers calls in place of its own decoding loop; not to be called by hand.

    Give it to ``generate`` with the heads: the text is that of plain decoding, greedily token for token in fp32, and
    with ``do_sample=True`` of the same distribution (temperature, top_k, top_p and min_p inside ``verify_tree``). The
    noise is seeded from torch's generator, so ``torch.manual_seed`` makes it repeatable. Stopping criteria are asked
    after every token, also within a step. Rows of a batch run one after another. One decoder is kept per model.

    Args:
        model: the model whose ``generate`` was called.
        input_ids: int64 ``[B, S]``, prompts without padding.
        logits_processor: may hold temperature, top_k, top_p and min_p only.
        stopping_criteria: any.
        generation_config: greedy search or sampling.
        synced_gpus: must be False.
        streamer: gets each token. transformers 5.24 hands neither ``streamer`` nor ``assistant_model`` on to a
            callable: bind a streamer with ``functools.partial(custom_generate, streamer=streamer)``.
        heads: :class:`~cerberus_decode.heads.DraftHeads`; None decodes without drafts.
        policy: see :class:`~cerberus_decode.decode.Decoder`.
        **model_kwargs: what else ``generate`` prepared; a padded prompt, embeddings or a filled cache are refused.

    Returns:
        int64 ``[B, S + new]``, shorter rows padded with the padding token.

    Raises:
        ValueError: an option that cannot be honoured, by name.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> ids = torch.tensor([[5, 7, 11]])
        >>> tokens = model.generate(ids, custom_generate=custom_generate, max_new_tokens=4, do_sample=False)
        >>> torch.equal(tokens, model.generate(ids, max_new_tokens=4, do_sample=False))
        True
    """
    mode = _check(input_ids, logits_processor, generation_config, synced_gpus, model_kwargs)
    options: dict[str, Any] = {"mode": mode, "eos_token_id": ()}
    if mode == "sample":
        options |= _settings(logits_processor)
        options["seed"] = int(torch.randint(2**62, (1,)))
    decoder = _decoder(model, heads, policy)
    rows = []
    for index, row in enumerate(input_ids):
        if mode == "sample":
            options["seed"] += index
        rows.append(_run(decoder, row, stopping_criteria, generation_config, streamer, options))
    if streamer is not None:
        streamer.end()
    longest = max(len(row) for row in rows)
    padding = _padding_token(generation_config) if len(rows) > 1 else 0
    padded = [torch.nn.functional.pad(row, (0, longest - len(row)), value=padding) for row in rows]
    return torch.stack(padded)


def _run(
    decoder: Decoder,
    prompt: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    streamer: Any,
    options: dict[str, Any],
) -> torch.Tensor:
    """One row to its end: prompt and new tokens, int64 [S + new]."""
    limit = max(int(generation_config.max_length) - len(prompt), 0)
    text = torch.cat([prompt, prompt.new_zeros(limit)])
    length = len(prompt)
    for step in decoder.stream(prompt, max_new_tokens=limit, **options):
        for token in step.tokens:
            text[length] = token
            length += 1
            if streamer is not None:
                streamer.put(text[length - 1 : length].cpu())
            if bool(stopping_criteria(text[None, :length], None).all()):
                return text[:length]
    warnings.warn(f"custom_generate: the text ends at {length} tokens, where the model's positions do", stacklevel=4)
    return text[:length]


def _settings(logits_processor: LogitsProcessorList) -> dict[str, Any]:
    """verify_tree's parameters from the rules that transformers made of the call's options or got from the caller."""
    settings, last = dict(_SETTINGS), -1
    for rule in logits_processor:
        place = _FILTERS.index(type(rule))
        name = list(_SETTINGS)[place]
        if place <= last:
            refuse(_OP, "logits_processor", f"in the order {', '.join(_SETTINGS)}, each once", type(rule).__name__)
        if getattr(rule, "min_tokens_to_keep", 1) > 1:
            refuse(_OP, "min_tokens_to_keep", "1", rule.min_tokens_to_keep)
        settings[name], last = getattr(rule, name), place
    return settings


def _check(
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str:
    """Refuse what the decoder cannot honour; the acceptance mode."""
    search = str(generation_config.get_generation_mode().value)
    if search not in _MODES:
        refuse(_OP, "generation_config", f"for {' or '.join(_MODES)}", search)
    unknown = [type(rule).__name__ for rule in logits_processor if type(rule) not in _FILTERS]
    if unknown:
        refuse(_OP, "logits_processor", "free of rules but temperature, top_k, top_p and min_p", ", ".join(unknown))
    if generation_config.return_dict_in_generate:
        refuse(_OP, "return_dict_in_generate", "False (only token ids are returned)", True)
    if synced_gpus:
        refuse(_OP, "synced_gpus", "False", True)
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        refuse(_OP, "attention_mask", "all ones (prompts without padding)", f"{int((mask != 1).sum())} other entries")
    if model_kwargs.get("inputs_embeds") is not None:
        refuse(_OP, "inputs_embeds", "absent (the decoder takes ids)", list(model_kwargs["inputs_embeds"].shape))
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        refuse(_OP, "cache", "empty (the decoder keeps its own)", f"{cache.get_seq_length()} positions")
    positions = model_kwargs.get("position_ids")
    if positions is not None and not bool((positions == torch.arange(input_ids.shape[1]).to(positions)).all()):
        refuse(_OP, "position_ids", "counted from 0", positions.tolist())
    return _MODES[search]


def _padding_token(generation_config: Any) -> int:
    token = generation_config.pad_token_id
    if token is None:
        ends = generation_config.eos_token_id
        token = ends[0] if isinstance(ends, (list, tuple)) else ends
    return 0 if token is None else int(token)


def _decoder(model: Any, heads: Any, policy: Policy | None) -> Decoder:
    """The decoder of these parts, made once: its checks run the model."""
    kept = vars(model).get(_ATTRIBUTE)
    if kept is None or kept.decoder is None or kept.heads is not heads or kept.policy is not policy:
        kept = _Kept(heads, policy, Decoder(model, heads, policy))
        setattr(model, _ATTRIBUTE, kept)
    return kept.decoder
