"""What a generation did and where its time went; each figure has one meaning, stated here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metrics:
    """Counters and times of one generation, or of several added up.

    Every forward pass that emits tokens is a step. The prefill is the first step: it emits the first token and can
    hold no drafts. Plain decoding therefore has exactly one token per step. All counts are taken after the output was
    cut at an end token or at the length limit, so a draft behind the cut is not accepted, and
    ``tokens == accepted + own_tokens``.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: tokens emitted.
        steps: forward passes that emitted them, the prefill included.
        own_tokens: emitted tokens that are the model's own choice at the end of a path, at most one a step.
        proposed: drafts that were checked.
        accepted: drafts that were emitted.
        open_steps: steps in which anything was drafted.
        gated_steps: steps in which the policy was free to draft: all but the prefill and those that the limits left
            no room for.
        flagged_steps: steps whose logits held NaN or no finite entry, where a documented fallback token was emitted.
        prefill_s: seconds of the prefill's forward pass, part of ``forward_s``.
        draft_s: seconds of gate, heads and tree building.
        forward_s: seconds in the base model.
        verify_s: seconds of choosing the accepted path.
        commit_s: seconds of compacting the cache.
        total_s: seconds of all steps; time that the consumer of a stream takes in between is not counted.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    own_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    open_steps: int = 0
    gated_steps: int = 0
    flagged_steps: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens emitted per step, the model's own included; None before the first step."""
        return _ratio(self.tokens, self.steps)

    @property
    def accepted_per_step(self) -> float | None:
        """Drafts emitted per step; None before the first step."""
        return _ratio(self.accepted, self.steps)

    @property
    def acceptance(self) -> float | None:
        """Share of the checked drafts that were emitted; None when nothing was drafted."""
        return _ratio(self.accepted, self.proposed)

    @property
    def gate_open_share(self) -> float | None:
        """Share of the steps with room for drafts in which some were drafted; None without such steps."""
        return _ratio(self.open_steps, self.gated_steps)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens emitted per second of all steps, prefill included; None before the first step."""
        return _ratio(self.tokens, self.total_s)

    @property
    def other_s(self) -> float:
        """Seconds in no other part: reading results, cutting, bookkeeping."""
        return self.total_s - self.draft_s - self.forward_s - self.verify_s - self.commit_s

    def __add__(self, other: Metrics) -> Metrics:
        """Sum of every counter and time."""
        return Metrics(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
