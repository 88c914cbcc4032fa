"""Whether drafting is worth it at this step, per request."""

from .api import GateDecision, GateWeights, gate

__all__ = ["GateDecision", "GateWeights", "gate"]
