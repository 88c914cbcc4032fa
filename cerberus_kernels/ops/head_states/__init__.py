"""The draft heads: residual blocks on the last hidden state."""
