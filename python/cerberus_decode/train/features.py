"""Last hidden states of the base model over its own answers, in shards that a trainer can read while more are made.

One forward of the frozen base model per sequence is the dearest part of training heads, and its result never
changes, so it is done once and kept. A shard holds, for ``n`` sequences with ``P`` positions altogether:

- ``hidden`` bfloat16 ``[P, H]``: output of the final norm, the LM head's input, from the last prompt token on;
- ``tokens`` int32 ``[P]``: the token that follows each position, the root token of a step taken there;
- ``offsets`` int64 ``[n + 1]``: where each sequence begins and ends in the two above.

Head i (1-based) at position p learns ``tokens[p + i]``, and the teacher's distribution for it is the LM head applied
to ``hidden[p + i]``: targets and soft targets alike come from the same rows, a shift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SEQUENCES_PER_SHARD = 256
TOKENS_PER_BATCH = 2048


def shard_path(folder: Path, index: int) -> Path:
    """File of shard ``index`` in ``folder``."""
    return folder / f"features-{index:05d}.safetensors"


def batches_by_length(lengths: torch.Tensor, tokens_per_batch: int) -> Iterator[list[int]]:
    """Group sequence indices so that a padded batch holds at most ``tokens_per_batch`` tokens and little padding."""
    batch: list[int] = []
    for index in lengths.argsort(descending=True).tolist():
        longest = int(lengths[batch[0]]) if batch else 0
        if batch and longest * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def answer_features(model, sequences: list[torch.Tensor], starts: list[int]) -> dict[str, torch.Tensor]:
    """Run the base model over ``sequences`` and keep the rows that predict answer tokens.

    Args:
        model: a transformers causal LM.
        sequences: int64 ``[length]`` token ids each, prompt and answer.
        starts: index of the first answer token in each sequence, at least 1.

    Returns:
        The three tensors of a shard, see the module's docstring.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    hidden: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for batch in batches_by_length(lengths, TOKENS_PER_BATCH):
        padded = torch.nn.utils.rnn.pad_sequence([sequences[i] for i in batch], batch_first=True)
        states = model.model(input_ids=padded, use_cache=False).last_hidden_state
        for row, i in enumerate(batch):
            hidden[i] = states[row, starts[i] - 1 : len(sequences[i]) - 1].to(torch.bfloat16)
    kept = torch.tensor([0] + [len(rows) for rows in hidden])
    following = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
    return {
        "hidden": torch.cat(hidden),
        "tokens": torch.cat(following).to(torch.int32),
        "offsets": kept.cumsum(0),
    }


def write_shards(model, answers: dict[str, torch.Tensor], order: list[int], folder: Path) -> Iterator[Path]:
    """Write the shards of ``answers`` (format of :mod:`.answers`) that ``folder`` does not hold yet.

    Args:
        model: the base model.
        answers: flat ``tokens``, ``offsets`` and ``answer_start``.
        order: sequence indices; shard s holds entries ``s * 256`` to ``s * 256 + 255``.
        folder: destination; a shard appears there only when it is whole.

    Yields:
        The path of each shard in turn, those that were there already included.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens, offsets = answers["tokens"].to(torch.int64), answers["offsets"].tolist()
    starts = answers["answer_start"].tolist()
    for index, first in enumerate(range(0, len(order), SEQUENCES_PER_SHARD)):
        path = shard_path(folder, index)
        if not path.exists():
            chosen = order[first : first + SEQUENCES_PER_SHARD]
            sequences = [tokens[offsets[i] : offsets[i + 1]] for i in chosen]
            shard = answer_features(model, sequences, [starts[i] for i in chosen])
            partial = path.with_suffix(".partial")
            save_file(shard, partial)
            partial.rename(path)
        yield path


def read_shard(path: Path) -> dict[str, torch.Tensor]:
    """Load one shard."""
    return load_file(path)
