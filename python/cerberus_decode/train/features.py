"""Hidden states for answers that were made elsewhere: one forward pass of the base model over each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ..adapter import Adapter
from .shards import Sequence, shard_path, text_key, write_shard

SEQUENCES_PER_SHARD = 256


@torch.inference_mode()
def sequence_features(adapter: Adapter, tokens: torch.Tensor) -> torch.Tensor:
    """Last hidden states at all tokens of ``tokens`` ``[L]`` but the last, bfloat16 ``[L - 1, H]``."""
    rows = tokens[:-1].to(adapter.device, torch.int64).unsqueeze(0)
    hidden, _ = adapter.prefill(rows, adapter.new_cache(rows.shape[1]), keep_hidden=True)
    return hidden[0].to(torch.bfloat16)


def write_shards(adapter: Adapter, answers: dict[str, torch.Tensor], folder: Path) -> Iterator[Path]:
    """Write the shards of ``answers`` that ``folder`` does not hold yet.

    Args:
        adapter: the base model.
        answers: flat ``tokens``, ``offsets`` ``[n + 1]``, ``answer_start`` ``[n]`` and, if known, ``temperature``.
        folder: destination; a shard appears there only when it is whole.

    Yields:
        The path of each shard in turn, those that were there already included.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens, offsets = answers["tokens"].to(torch.int64), answers["offsets"].tolist()
    starts = answers["answer_start"].tolist()
    temperatures = answers["temperature"].tolist() if "temperature" in answers else [0.0] * len(starts)
    for index, first in enumerate(range(0, len(starts), SEQUENCES_PER_SHARD)):
        path = shard_path(folder, index)
        if not path.exists():
            sequences = []
            for number in range(first, min(first + SEQUENCES_PER_SHARD, len(starts))):
                ids = tokens[offsets[number] : offsets[number + 1]]
                prompt = ids[: starts[number]].tolist()
                key = text_key(" ".join(map(str, prompt)))
                hidden = sequence_features(adapter, ids)
                sequences.append(Sequence(ids.tolist(), starts[number], temperatures[number], hidden, number, key))
            write_shard(path, sequences, adapter.vocab_size)
        yield path
