"""Making data from the base model alone, and training draft heads on it."""
