"""`cerberus train`."""


def train() -> None:
    """Train heads."""
