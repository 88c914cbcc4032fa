"""Moving the accepted nodes' keys and values to where the committed text continues."""

from .api import commit_kv

__all__ = ["commit_kv"]
