"""Fused operators for tree-based parallel decoding of language models.

Every operator takes plain tensors and belongs to no engine. ``backend="auto"`` picks the fastest implementation for
the tensors' device; see docs/design.md for how, and ``cerberus info`` for what this machine has.
"""

from ._dispatch import BackendUnavailable
from .ops.commit_kv import commit_kv
from .ops.decoder_layer import DecoderWeights, decoder_layer
from .ops.gate import GateDecision, GateWeights, gate
from .ops.grow_tree import GrownTree, grow_tree
from .ops.head_loss import head_loss
from .ops.head_states import head_states
from .ops.head_topk import Candidates, head_topk
from .ops.packed_linear import PackedWeight, pack_linear, packed_linear, unpack_linear
from .ops.tree_attention import tree_attention
from .ops.tree_mask import tree_mask, unpack_mask
from .ops.verify_tree import Verdict, VerifyStatus, verify_tree
from .tree import Tree
from .version import __version__

__all__ = [
    "BackendUnavailable",
    "Candidates",
    "DecoderWeights",
    "GateDecision",
    "GateWeights",
    "GrownTree",
    "PackedWeight",
    "Tree",
    "Verdict",
    "VerifyStatus",
    "__version__",
    "commit_kv",
    "decoder_layer",
    "gate",
    "grow_tree",
    "head_loss",
    "head_states",
    "head_topk",
    "pack_linear",
    "packed_linear",
    "tree_attention",
    "tree_mask",
    "unpack_linear",
    "unpack_mask",
    "verify_tree",
]
