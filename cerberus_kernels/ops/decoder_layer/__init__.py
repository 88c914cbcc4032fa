"""A Llama decoder layer over the nodes of draft trees, in one call."""

from .api import DecoderWeights, decoder_layer

__all__ = ["DecoderWeights", "decoder_layer"]
