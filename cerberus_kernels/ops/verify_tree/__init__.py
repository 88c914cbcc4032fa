"""Which drafts of a tree the model agrees with, and the token that follows them."""

from .api import Verdict, VerifyStatus, verify_tree

__all__ = ["Verdict", "VerifyStatus", "verify_tree"]
