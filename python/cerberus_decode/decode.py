"""The decode loop: gate, heads and tree, one forward pass over the tree, verification, commit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cerberus_kernels as ck
from cerberus_kernels._checks import refuse

from .adapter import Adapter
from .cache import KVCache
from .context import ContextMatcher
from .cost_tree import CostTree, Limits
from .costs import CostTable, cost_table
from .drafting import DraftTree
from .heads import DraftState
from .layout import LayoutCache, TreeLayout
from .metrics import Metrics
from .options import Options, active_rules, end_token_ids, prompt_tokens, refuse_unknown
from .policy import AutoRegressive, FixedTree, Policy


@dataclass(frozen=True)
class Step:
    """What one step emitted.

    Attributes:
        tokens: token ids, after cuts; never empty.
        num_accepted: how many of them were drafts; the rest, at most one at the end, is the model's own.
        num_proposed: drafts that were checked.
    """

    tokens: list[int]
    num_accepted: int
    num_proposed: int


@dataclass(frozen=True)
class Result:
    """A finished generation.

    Attributes:
        tokens: new token ids, the end token included if one was reached.
        metrics: counts and times.
        finish_reason: ``"eos"``, ``"length"`` (max_new_tokens) or ``"context"`` (the model's or the cache's limit).
    """

    tokens: list[int]
    metrics: Metrics
    finish_reason: str


class Decoder:
    """Generates text with draft trees; the same object serves any number of generations, also interleaved.

    Args:
        model: a transformers causal LM in eval mode, or an :class:`~cerberus_decode.adapter.Adapter` around one,
            which several decoders may share.
        heads: draft heads, see :class:`~cerberus_decode.heads.DraftHeads`; bound to the model here if they are not
            yet. None: plain decoding only.
        policy: when and how much to draft; by default the heads' whole tree in every step, and without heads
            plain decoding.

    Attributes:
        adapter: the model's adapter.
        heads: the bound heads, or None.
        policy: the policy with every automatic choice made.

    Raises:
        ModelUnsupported: the model cannot be decoded with trees.
        HeadsMismatch: the heads belong to another model.
        ValueError: a policy that drafts without heads, or a tree that the heads cannot fill.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> decoder = Decoder(model)
        >>> result = decoder.generate([5, 7, 11], max_new_tokens=4)
        >>> len(result.tokens), result.metrics.tokens_per_step, result.finish_reason
        (4, 1.0, 'length')
        >>> [len(step.tokens) for step in decoder.stream([5, 7, 11], max_new_tokens=2)]
        [1, 1]
    """

    def __init__(self, model: Any, heads: Any = None, policy: Policy | None = None) -> None:
        self.adapter = model if isinstance(model, Adapter) else Adapter(model)
        base = self.adapter.model
        if heads is not None and hasattr(heads, "bind") and heads.vocab_weight is None:
            heads = heads.bind(base.get_input_embeddings().weight, base.get_output_embeddings().weight)
        self.heads = heads
        self._layouts = LayoutCache(self.adapter.device)
        self._costs: CostTable | None = None
        if policy is None:
            policy = AutoRegressive() if heads is None else FixedTree()
        self.policy = policy.resolve(getattr(heads, "config", None), self.costs)
        self._check_policy()
        rules = active_rules(base)
        if rules:
            warnings.warn(f"the model's generation configuration sets {', '.join(rules)}: not applied", stacklevel=2)

    def costs(self) -> CostTable:
        """Seconds of a step by tree size on this machine, measured on first use and kept in the cache folder."""
        if self._costs is None:
            self._costs = cost_table(self.adapter, self.heads)
        return self._costs

    def stream(
        self,
        ids: torch.Tensor | Sequence[int],
        *,
        max_new_tokens: int = 256,
        eos_token_id: int | Iterable[int] | None = None,
        mode: str = "greedy",
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        epsilon: float = 0.09,
        delta: float = 0.3,
        seed: int = 0,
        capacity: int | None = None,
        **unknown: Any,
    ) -> Generation:
        """Start a generation and return an iterator over its steps; it may be abandoned at any point.

        Args:
            ids: the prompt, integer ``[S]`` or ``[1, S]`` or a list of ids, S >= 1.
            max_new_tokens: tokens at most, 0 allowed.
            eos_token_id: end token or tokens; None takes the model's own, ``()`` has none.
            mode: acceptance rule of ``verify_tree``: ``"greedy"``, ``"typical"`` or ``"sample"``.
            temperature: for typical and sample; 0 is greedy.
            top_k: filter for typical and sample, 0 for none.
            top_p: filter for typical and sample, 1 for none.
            min_p: filter for typical and sample, 0 for none.
            epsilon: typical acceptance's upper bound of the threshold.
            delta: typical acceptance's factor of exp(-entropy).
            seed: noise for typical and sample.
            capacity: cache slots, by default what prompt, new tokens and the largest tree need. With fewer, trees
                shrink near the end.
            **unknown: any other option of transformers' ``generate`` is refused by name.

        Returns:
            The running :class:`Generation`.

        Raises:
            ValueError: an option outside its range or unknown, more than one sequence, a token outside the
                vocabulary, or a prompt that does not fit the context.
        """
        refuse_unknown(unknown)
        options = Options(
            max_new_tokens=max_new_tokens,
            eos_token_ids=end_token_ids(eos_token_id, self.adapter.model),
            mode=mode,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            epsilon=epsilon,
            delta=delta,
            seed=seed,
            capacity=capacity,
        )
        return Generation(self, prompt_tokens(ids, self.adapter.vocab_size, self.adapter.device), options)

    def generate(self, ids: torch.Tensor | Sequence[int], **options: Any) -> Result:
        """Generate to the end; arguments as for :meth:`stream`."""
        generation = self.stream(ids, **options)
        for _ in generation:
            pass
        return generation.result()

    @property
    def uses_context(self) -> bool:
        """Whether drafts come from the text so far too."""
        return isinstance(self.policy, CostTree) and self.policy.context

    def layout(self, num_drafts: int, max_depth: int) -> TreeLayout:
        """The policy's tree cut to a number of drafts and a depth."""
        return self._layouts.layout(self.policy.choices, num_drafts, max_depth)

    def _check_policy(self) -> None:
        choices = self.policy.choices
        if isinstance(self.policy, CostTree) and self.heads is None and not self.policy.context:
            refuse("Decoder", "heads", "given for CostTree without context", None)
        if not choices:
            return
        if self.heads is None:
            refuse("Decoder", "heads", f"given for {type(self.policy).__name__}", None)
        tree = ck.Tree.from_choices(choices)
        num_heads = self.heads.config.num_heads
        if tree.max_depth > num_heads:
            refuse("Decoder", "policy", f"a tree at most {num_heads} deep (the heads)", tree.max_depth)


class Generation:
    """One running generation: an iterator over its steps that owns its cache.

    Attributes:
        tokens: new tokens so far.
        metrics: counts and times so far.
        finish_reason: why it ended; empty while it runs.
        cache: committed keys and values; after every step it holds all of prompt and new tokens but the newest.
    """

    def __init__(self, decoder: Decoder, prompt: torch.Tensor, options: Options) -> None:
        self._decoder = decoder
        self._adapter = decoder.adapter
        self._options = options
        self._prompt = prompt
        self._verify_arguments = options.verify_arguments()
        self.tokens: list[int] = []
        self.metrics = Metrics(prompt_tokens=prompt.shape[1])
        self.finish_reason = ""
        self._limit, self._limit_reason = self._token_limit()
        if self._limit == 0:
            self.finish_reason = self._limit_reason
        self.cache: KVCache = self._adapter.new_cache(self._capacity())
        self._drafts = DraftState(decoder.heads, self.cache.capacity)
        self._matcher = ContextMatcher() if decoder.uses_context else None
        self._root: torch.Tensor  # int32 [B], newest token
        self._hidden: torch.Tensor  # [B, H], last hidden state of the last accepted node
        self._entropy: torch.Tensor  # fp32 [B], nats, of the distribution there

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self.finish_reason:
            raise StopIteration
        with torch.inference_mode():
            return self._tree_step() if self.metrics.steps else self._prefill_step()

    def result(self) -> Result:
        """Tokens, metrics and finish reason as they stand."""
        return Result(self.tokens, self.metrics, self.finish_reason)

    def _token_limit(self) -> tuple[int, str]:
        """New tokens that max_new_tokens, the model's positions and the cache allow, and which of them binds."""
        options, prompt = self._options, self._prompt.shape[1]
        limit, reason = options.max_new_tokens, "length"
        for name, slots in (("positions", self._adapter.max_positions), ("cache slots", options.capacity)):
            if slots is None:
                continue
            if prompt > slots:
                refuse("generate", "ids", f"at most {slots} tokens long (the {name})", prompt)
            if slots - prompt < limit:
                limit, reason = slots - prompt, "context"
        return limit, reason

    def _capacity(self) -> int:
        if self._options.capacity is not None:
            return self._options.capacity
        return self._prompt.shape[1] + self._limit + self._decoder.policy.max_drafts

    def _prefill_step(self) -> Step:
        clock = _Clock(self._adapter.device)
        every = self._drafts.needs_all_positions
        hidden, logits = self._adapter.prefill(self._prompt, self.cache, keep_hidden=every)
        self.metrics.forward_s = self.metrics.prefill_s = clock.lap()
        root_only = self._decoder.layout(0, 0)
        last = self._prompt[:, -1:].to(torch.int32)
        verdict = self._verify(logits, root_only.with_tokens(last))
        self._entropy = verdict.entropy
        self._hidden = hidden[:, -1]
        self._root = verdict.tokens[:, 0]
        following = torch.cat([self._prompt[:, 1:].to(torch.int32), verdict.tokens[:, :1]], dim=1)
        self._drafts.observe(hidden, following[:, -hidden.shape[1] :])
        if self._matcher is not None:
            self._matcher.extend([*self._prompt[0].tolist(), int(self._root)])
        emitted = verdict.tokens[0, :1].tolist()
        self.metrics.flagged_steps += int(verdict.status.any())
        self.metrics.verify_s += clock.lap()
        step = self._emit(emitted, 0)
        self.metrics.total_s += clock.total()
        return step

    def _tree_step(self) -> Step:
        clock, metrics = _Clock(self._adapter.device), self.metrics
        tree = self._draft()
        metrics.draft_s += clock.lap()
        hidden, logits = self._adapter.forward(tree.tokens, tree, self.cache)
        metrics.forward_s += clock.lap()
        verdict = self._verify(logits, tree)
        metrics.verify_s += clock.lap()
        before = self.cache.lengths[0]
        (accepted,) = self.cache.commit(verdict.path, verdict.num_accepted)
        metrics.commit_s += clock.lap()
        kept = hidden[:, verdict.path[0, : accepted + 1].to(torch.int64)]  # [1, accepted + 1, H]
        self._hidden = kept[:, -1]
        self._drafts.observe(kept, verdict.tokens[:, : accepted + 1])
        self._entropy = verdict.entropy
        self._root = verdict.tokens[:, accepted]
        metrics.flagged_steps += int(verdict.status.any())
        emitted = verdict.tokens[0, : accepted + 1].tolist()
        if self._matcher is not None:
            self._matcher.extend(emitted)
        step = self._emit(emitted, tree.num_nodes - 1)
        if len(step.tokens) <= accepted:
            self.cache.set_length(before + len(step.tokens))
        metrics.total_s += clock.total()
        return step

    def _draft(self) -> DraftTree:
        """The policy's tree for this step; its root alone where it drafts nothing or there is no room."""
        policy, decoder = self._decoder.policy, self._decoder
        limits = Limits(self._limit - len(self.tokens) - 1, self.cache.free_slots - 1)
        tree = None
        if min(limits.depth, limits.drafts) > 0:
            self.metrics.gated_steps += 1
            if isinstance(policy, CostTree):
                entropy = float(self._entropy)
                tree = policy.tree(self._drafts, self._matcher, int(self._root), entropy, limits)
            else:
                num_drafts = min(policy.num_drafts(self._hidden, self._entropy), limits.drafts)
                tree = self._fixed_tree(decoder.layout(num_drafts, limits.depth))
        if tree is None:
            return decoder.layout(0, 0).with_tokens(self._root.unsqueeze(1))
        self.metrics.open_steps += 1
        return tree

    def _fixed_tree(self, layout: TreeLayout) -> DraftTree | None:
        """The heads' candidates laid out as a tree."""
        if layout.num_nodes == 1:
            return None
        candidates, _ = self._drafts.propose(layout.num_candidates)
        return layout.with_tokens(layout.draft_tokens(self._root, candidates))

    def _verify(self, logits: torch.Tensor, tree: DraftTree) -> Any:
        return ck.verify_tree(
            logits,
            tree.tokens,
            tree.parents,
            vocab_size=self._adapter.vocab_size,
            max_depth=tree.max_depth,
            position=self.metrics.prompt_tokens + len(self.tokens),
            **self._verify_arguments,
        )

    def _emit(self, emitted: list[int], num_proposed: int) -> Step:
        """Cut a step's tokens at the first end token and at the limit, then count what is left."""
        accepted = len(emitted) - 1
        kept = emitted[: self._limit - len(self.tokens)]
        end = next((index for index, token in enumerate(kept) if token in self._options.eos_token_ids), None)
        if end is not None:
            kept = kept[: end + 1]
            self.finish_reason = "eos"
        self.tokens += kept
        if not self.finish_reason and len(self.tokens) == self._limit:
            self.finish_reason = self._limit_reason
        num_accepted = min(accepted, len(kept))
        metrics = self.metrics
        metrics.steps += 1
        metrics.tokens += len(kept)
        metrics.accepted += num_accepted
        metrics.own_tokens += len(kept) - num_accepted
        metrics.proposed += num_proposed
        return Step(kept, num_accepted, num_proposed)


@dataclass
class _Clock:
    """Laps of wall-clock time; on CUDA each lap waits for the device, so that work is booked where it was asked for."""

    device: torch.device
    start: float = field(default=0.0, init=False)
    last: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.start = self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, self.last = self.last, time.perf_counter()
        return self.last - before

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start
