"""What heads and the text so far are worth on held-out text: calibration and agreement, on text with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from cerberus_decode.train.evaluate import HeldOut, calibrate, context_agreement
from cerberus_decode.train.shards import Sequence, write_shard


def found(log_probs, ranks):
    count = len(ranks)
    return HeldOut(ranks, log_probs, torch.zeros(count), torch.ones(count, dtype=torch.bool))


def test_calibration_finds_the_line_that_made_the_hits():
    """Hits drawn with exp(0.3 + 0.8 log p) give that line back; a second head is judged where the first was right."""
    generator = torch.Generator().manual_seed(0)
    count = 60_000
    shares = torch.rand(count, 2, generator=generator) * 0.25  # two chances that sum to less than 1
    log_probs = shares.clamp_min(1e-3).log().unsqueeze(1).repeat(1, 2, 1)  # [T, 2, 2]
    chance = (0.3 + 0.8 * log_probs[:, 0]).exp()
    draw = torch.rand(count, 1, generator=generator)
    bounds = chance.cumsum(1)
    ranks = torch.where(draw < bounds[:, :1], 0, torch.where(draw < bounds[:, 1:], 1, -1)).expand(-1, 2).clone()
    ranks[:, 1] = ranks[:, 1].where(ranks[:, 0] >= 0, 0)  # where the first was wrong, the second's hits must not count
    (offset, factor), (later_offset, later_factor) = calibrate(found(log_probs, ranks))
    assert offset == pytest.approx(0.3, abs=0.05)
    assert factor == pytest.approx(0.8, abs=0.05)
    # Behind an accepted draft one of the two is always right, so the same probabilities are hits far more often.
    typical = float(log_probs.mean())
    assert math.exp(later_offset + later_factor * typical) > 1.3 * math.exp(offset + factor * typical)


def test_agreement_by_hand(tmp_path):
    def sequence(tokens, start, temperature=0.0):
        hidden = torch.zeros(len(tokens) - 1, 2, dtype=torch.bfloat16)
        return Sequence(tokens, start, temperature, hidden, 0, 1)

    path = tmp_path / "text-00000.safetensors"
    # Behind the answer's 7: the prompt's 7 was followed by 8 and 9; 8 comes, 9 comes, then 5 instead of 6.
    write_shard(path, [sequence([1, 7, 8, 9, 6, 7, 8, 9, 5], 5), sequence([3, 3, 3, 3], 1, 0.7)], 16)
    table = context_agreement([path], longest=4)
    # From 7: lengths 1, 2 right, 3 wrong. From 8: length 2 right, 3 wrong. From 9: length 3 wrong.
    assert table == [(1.0, 1), (1.0, 2), (0.0, 3), (0.0, 0)]
