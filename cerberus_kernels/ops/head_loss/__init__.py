"""Training loss of the draft heads."""
