"""The draft heads: residual blocks on the last hidden state."""

from .api import head_states

__all__ = ["head_states"]
