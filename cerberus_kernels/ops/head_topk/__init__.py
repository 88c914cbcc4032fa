"""Candidates of the draft heads: vocabulary projection, log-sum-exp and top-k in one pass."""

from .api import Candidates, head_topk

__all__ = ["Candidates", "head_topk"]
