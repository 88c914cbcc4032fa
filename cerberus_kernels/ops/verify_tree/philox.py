"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), and the noise drawn from it."""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def _multiply(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 x 32 bit product, in int64 without overflow."""
    low_part = words * (factor & 0xFFFF)
    high_part = words * (factor >> 16) + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox4x32(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Ten rounds. counter int64 [.., 4] of 32-bit words, key two 32-bit words -> int64 [.., 4] of 32-bit words."""
    x0, x1, x2, x3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(x0, _MULTIPLIERS[0])
        high1, low1 = _multiply(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack([x0, x1, x2, x3], dim=-1)


def token_words(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """The random word of each token id.

    Key: low and high word of ``seed``. Counter: ``(token // 4, 0, low and high word of position)``. Token ``v`` takes
    word ``v % 4`` of the four, so a word depends on the seed, the absolute position and the id, and on nothing else.

    Args:
        seed: taken modulo 2**64.
        position: absolute index, in the text, of the token that is drawn.
        tokens: int64 ``[n]``, ids.

    Returns:
        int64 ``[n]`` of 32-bit words.
    """
    counter = torch.stack(
        [
            tokens >> 2,
            torch.zeros_like(tokens),
            torch.full_like(tokens, position & _WORD),
            torch.full_like(tokens, (position >> 32) & _WORD),
        ],
        dim=-1,
    )
    words = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return words.gather(-1, (tokens & 3).unsqueeze(-1)).squeeze(-1)


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64: ``-ln(-ln(1 - u))`` with ``u = (word + 1/2) / 2**32``.

    The largest noise comes from the smallest u, where floating point is finest; it never exceeds 33 ln 2 = 22.9.
    """
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))
