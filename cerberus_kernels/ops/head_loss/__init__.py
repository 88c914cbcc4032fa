"""Training loss of the draft heads."""

from .api import head_loss

__all__ = ["head_loss"]
