"""Draft heads as files and as a proposer: configuration, checked loading, and one call per step.

A heads folder holds ``config.json`` (every parameter of the method, the base model named and hashed) and
``model.safetensors`` (``weight``, ``bias``, for a trimmed draft vocabulary ``token_map``, and with a sequence layer
its weights as ``sequence.*``). Both kinds of heads project through the base model's own LM head; Medusa heads are the
same tensors without the link.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import cerberus_kernels as ck

from .cache import KVCache
from .sequence_layer import SequenceConfig, SequenceLayer

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
KINDS = ("cerberus", "medusa")
_SEQUENCE = "sequence."


class HeadsMismatch(ValueError):
    """A heads folder that is unreadable, contradicts itself, or does not belong to the base model."""


@dataclass(frozen=True)
class HeadsConfig:
    """Everything that defines a set of draft heads.

    Attributes:
        kind: ``"cerberus"`` (linked blocks, weight ``[L, K, H, 2H]``) or ``"medusa"`` (weight ``[L, K, H, H]``).
        num_heads: K; head i (1-based) proposes the i-th token after the root token.
        num_blocks: L residual blocks per head.
        hidden_size: H of the base model.
        vocab_size: V of the base model.
        root_embedding: whether the link into the first head is the root token's embedding (else the hidden state).
        root_scale: factor that brings the embedding to the hidden state's magnitude.
        draft_vocab_size: rows of the LM head that the heads project to; equal to ``vocab_size`` without trimming.
        num_candidates: candidates k drawn per head.
        base_model: name of the base model.
        base_sha256: fingerprint of the base model's LM head, see :func:`fingerprint`; empty: unchecked.
        tree: draft-tree choices in best-first order: the first n are the best tree with n drafts.
        tree_gains: held-out probability that each node of ``tree`` is accepted, in the same order.
        accuracy: held-out probability ``[K][k]`` that head i's candidate of each rank is right.
        gate: calibration of the entropy gate, see :mod:`cerberus_decode.policy`.
        training: how the heads were trained, for the record.
        sequence: sizes of the sequence layer in front of the heads, or None.
        calibration: ``[K][2]``, offset and factor that turn each head's log-probabilities into those of acceptance,
            given that the drafts before were accepted; empty without one.
    """

    kind: str
    num_heads: int
    num_blocks: int
    hidden_size: int
    vocab_size: int
    root_embedding: bool
    root_scale: float
    draft_vocab_size: int
    num_candidates: int = 10
    base_model: str = ""
    base_sha256: str = ""
    tree: tuple[tuple[int, ...], ...] = ()
    tree_gains: tuple[float, ...] = ()
    accuracy: tuple[tuple[float, ...], ...] = ()
    gate: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    sequence: SequenceConfig | None = None
    calibration: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HeadsMismatch(f"heads: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("num_heads", "num_blocks", "hidden_size", "vocab_size", "draft_vocab_size", "num_candidates"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise HeadsMismatch(f"heads: {name} must be a positive integer, got {value!r}")
        if self.draft_vocab_size > self.vocab_size:
            raise HeadsMismatch(
                f"heads: draft_vocab_size must be at most vocab_size {self.vocab_size}, got {self.draft_vocab_size}"
            )

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Shape of the blocks' weight."""
        width = self.hidden_size * (2 if self.kind == "cerberus" else 1)
        return self.num_blocks, self.num_heads, self.hidden_size, width

    @staticmethod
    def from_json(text: str) -> HeadsConfig:
        """Parse ``config.json``; an unknown or missing key is refused by name."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise HeadsMismatch(f"heads: {CONFIG_NAME} must be JSON, got {error}") from error
        known = {item.name: item for item in dataclasses.fields(HeadsConfig)}
        if not isinstance(values, dict) or set(values) - set(known):
            extra = sorted(set(values) - set(known)) if isinstance(values, dict) else type(values).__name__
            raise HeadsMismatch(f"heads: {CONFIG_NAME} must hold known keys only, got {extra}")
        needed = {
            name
            for name, item in known.items()
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        }
        if needed - set(values):
            raise HeadsMismatch(f"heads: {CONFIG_NAME} must hold {sorted(needed - set(values))}, got none of them")
        for name in ("tree", "accuracy", "calibration"):
            values[name] = tuple(tuple(row) for row in values.get(name, ()))
        values["tree_gains"] = tuple(values.get("tree_gains", ()))
        if values.get("sequence"):
            try:
                values["sequence"] = SequenceConfig(**values["sequence"])
            except TypeError as error:
                raise HeadsMismatch(f"heads: sequence in {CONFIG_NAME} must be a sequence layer's: {error}") from error
        return HeadsConfig(**values)

    def to_json(self) -> str:
        """Text of ``config.json``: one key a line, so that a changed parameter is a changed line."""
        items = dataclasses.asdict(self).items()
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in items) + "\n}\n"


def fingerprint(vocab_weight: torch.Tensor) -> str:
    """SHA-256 over the bfloat16 bytes of an LM head ``[V, H]``: the same for every dtype a model is loaded in."""
    rows = vocab_weight.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().data).hexdigest()


class DraftHeads:
    """Weights and configuration, and after :meth:`bind` a proposer for one base model.

    Args:
        config: the heads' configuration.
        weight: ``[L, K, H, 2H]`` or ``[L, K, H, H]``.
        bias: ``[L, K, H]``.
        token_map: int32 ``[draft_vocab_size]``, token of each projected row, ascending; None without trimming.
        sequence_weights: the sequence layer's tensors by name; empty without one.

    Raises:
        HeadsMismatch: a tensor whose shape contradicts the configuration.
    """

    def __init__(
        self,
        config: HeadsConfig,
        weight: torch.Tensor,
        bias: torch.Tensor,
        token_map: torch.Tensor | None = None,
        sequence_weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        for name, tensor, shape in (("weight", weight, config.weight_shape), ("bias", bias, config.weight_shape[:3])):
            if tuple(tensor.shape) != shape:
                raise HeadsMismatch(f"heads: {name} must be of shape {list(shape)}, got {list(tensor.shape)}")
        rows = config.vocab_size if token_map is None else token_map.numel()
        if rows != config.draft_vocab_size:
            raise HeadsMismatch(f"heads: token_map must hold {config.draft_vocab_size} rows, got {rows}")
        self.sequence_weights = sequence_weights or {}
        shapes = config.sequence.shapes() if config.sequence else {}
        found = {name: tuple(tensor.shape) for name, tensor in self.sequence_weights.items()}
        if found != shapes:
            raise HeadsMismatch(f"heads: the sequence layer's weights must be of shapes {shapes}, got {found}")
        self.config = config
        self.weight = weight
        self.bias = bias
        self.token_map = token_map
        self.sequence: SequenceLayer | None = None
        self.embedding: torch.Tensor | None = None
        self.vocab_weight: torch.Tensor | None = None

    @staticmethod
    def load(folder: str | Path) -> DraftHeads:
        """Read a heads folder.

        Raises:
            HeadsMismatch: a missing, truncated or contradictory file, named.
        """
        folder = Path(folder)
        try:
            config = HeadsConfig.from_json((folder / CONFIG_NAME).read_text())
            tensors = load_file(folder / WEIGHTS_NAME)
        except (OSError, SafetensorError) as error:
            raise HeadsMismatch(f"heads: cannot read {folder}: {error}") from error
        sequence = {
            name.removeprefix(_SEQUENCE): tensors.pop(name) for name in list(tensors) if name.startswith(_SEQUENCE)
        }
        if not {"weight", "bias"} <= set(tensors) <= {"weight", "bias", "token_map"}:
            raise HeadsMismatch(
                f"heads: {WEIGHTS_NAME} must hold weight, bias and at most token_map and {_SEQUENCE}*, "
                f"got {sorted(tensors)}"
            )
        return DraftHeads(config, tensors["weight"], tensors["bias"], tensors.get("token_map"), sequence)

    def save(self, folder: str | Path) -> None:
        """Write the folder's two files, weights in bfloat16; each appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight, "bias": self.bias}
        tensors |= {_SEQUENCE + name: tensor for name, tensor in self.sequence_weights.items()}
        tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        if self.token_map is not None:
            tensors["token_map"] = self.token_map.to(torch.int32)
        partial = folder / (WEIGHTS_NAME + ".partial")
        save_file(tensors, partial)
        partial.rename(folder / WEIGHTS_NAME)
        partial = folder / (CONFIG_NAME + ".partial")
        partial.write_text(self.config.to_json())
        partial.rename(folder / CONFIG_NAME)

    def bind(self, embedding: torch.Tensor, vocab_weight: torch.Tensor) -> DraftHeads:
        """The same heads, ready to propose for a base model; their weights take the base model's dtype.

        Args:
            embedding: ``[V, H]`` token embeddings of the base model.
            vocab_weight: ``[V, H]`` its LM head.

        Raises:
            HeadsMismatch: another hidden size, vocabulary or fingerprint than the heads were trained on.
        """
        rows, width = vocab_weight.shape
        if width != self.config.hidden_size:
            raise HeadsMismatch(
                f"heads: hidden size must be the base model's {width}, got {self.config.hidden_size} in the heads"
            )
        if rows != self.config.vocab_size or embedding.shape[0] != rows:
            raise HeadsMismatch(
                f"heads: vocabulary must be the base model's {rows} rows, got {self.config.vocab_size} in the heads"
            )
        if self.config.base_sha256 and fingerprint(vocab_weight) != self.config.base_sha256:
            raise HeadsMismatch(f"heads: base model must be {self.config.base_model} (its LM head's hash), got another")
        dtype, device = vocab_weight.dtype, vocab_weight.device
        token_map = None if self.token_map is None else self.token_map.to(device)
        sequence = {name: tensor.to(device, dtype) for name, tensor in self.sequence_weights.items()}
        weight, bias = self.weight.to(device, dtype), self.bias.to(device, dtype)
        bound = DraftHeads(self.config, weight, bias, token_map, sequence)
        if self.config.sequence is not None:
            bound.sequence = SequenceLayer(self.config.sequence, sequence)
        bound.embedding = embedding
        bound.vocab_weight = vocab_weight[: self.config.vocab_size]
        if token_map is not None:
            bound.vocab_weight = vocab_weight.index_select(0, token_map.to(torch.int64))
        return bound

    def propose(
        self, hidden: torch.Tensor, root: torch.Tensor, k: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates of all K heads after one position.

        Args:
            hidden: ``[B, H]``, the base model's last hidden state at the last accepted node, or the sequence layer's
                output there.
            root: int ``[B]``, the token that follows it.
            k: candidates per head, by default the configuration's.

        Returns:
            tokens int32 ``[B, K, k]`` and log-probabilities fp32 ``[B, K, k]``, best first.
        """
        if self.embedding is None or self.vocab_weight is None:
            raise RuntimeError("DraftHeads.propose: call bind(embedding, vocab_weight) first")
        root_embedding = None
        if self.config.root_embedding:
            root_embedding = self.embedding.index_select(0, root.to(torch.int64)) * self.config.root_scale
        states = ck.head_states(hidden, self.weight, self.bias, root_embedding=root_embedding)
        tokens, log_probs, _ = ck.head_topk(
            states, self.vocab_weight, k or self.config.num_candidates, token_map=self.token_map
        )
        return tokens, log_probs


class DraftState:
    """What bound heads remember of one generation: the newest position, and the sequence layer's cache.

    Args:
        heads: bound heads.
        capacity: positions of the generation at most.
    """

    def __init__(self, heads: Any, capacity: int) -> None:
        self._heads = heads
        sequence: SequenceLayer | None = getattr(heads, "sequence", None)
        self._sequence = sequence
        self._cache: KVCache | None = sequence.new_cache(capacity) if sequence else None
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._newest: tuple[torch.Tensor, torch.Tensor]

    @property
    def has_heads(self) -> bool:
        """Whether anything can be proposed."""
        return self._heads is not None

    @property
    def needs_all_positions(self) -> bool:
        """Whether every position counts, or only the newest."""
        return self._sequence is not None

    def observe(self, hidden: torch.Tensor, following: torch.Tensor) -> None:
        """Positions were committed; nothing is computed until heads draft.

        Args:
            hidden: ``[B, n, H]``, the base model's states there.
            following: integer ``[B, n]``, the tokens behind them; the last is the next step's root.
        """
        if self._sequence is None:
            self._pending.clear()
        self._pending.append((hidden, following))

    def propose(self, k: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates after the newest position; see :meth:`DraftHeads.propose`."""
        if self._pending:
            self._newest = self._digest()
            self._pending.clear()
        return self._heads.propose(*self._newest, k)

    def _digest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads' input ``[B, H]`` and the root token ``[B]`` at the newest position."""
        hidden = torch.cat([part for part, _ in self._pending], dim=1)
        following = torch.cat([part for _, part in self._pending], dim=1)
        if self._sequence is None or self._cache is None:
            return hidden[:, -1], following[:, -1]
        embedded = torch.nn.functional.embedding(following, self._heads.embedding) * self._heads.config.root_scale
        return self._sequence.extend(hidden, embedded, self._cache), following[:, -1]
