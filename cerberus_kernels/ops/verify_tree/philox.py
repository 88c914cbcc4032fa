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


def _block_words(seed: int, position: int, kind: int, index: torch.Tensor) -> torch.Tensor:
    """int64 ``[n, 4]``: the words at counter (index, kind, low and high word of position), key: the seed's words."""
    counter = torch.stack(
        [
            index,
            torch.full_like(index, kind),
            torch.full_like(index, position & _WORD),
            torch.full_like(index, (position >> 32) & _WORD),
        ],
        dim=-1,
    )
    return philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))


def token_words(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """The random word of each token id, which depends on the seed, the absolute position and the id alone.

    Its upper byte and its lower 24 bits come from different blocks: a token has a chance to win a draw only if its
    noise is great, which its upper byte nearly always rules out, so code that draws from a whole vocabulary works out
    one block per 16 tokens and few others. Key: low and high word of ``seed``. Counter: ``(index, kind, low and high
    word of position)``. Upper byte of token ``v``: kind 0, index ``v // 256 * 16 + v % 16``, the byte ``v % 256 // 16``
    of the block, counted from the lowest of its first word. Lower bits: kind 1, index ``v // 4``, the upper 24 bits of
    word ``v % 4``.

    Args:
        seed: taken modulo 2**64.
        position: absolute index, in the text, of the token that is drawn.
        tokens: int64 ``[n]``, ids.

    Returns:
        int64 ``[n]`` of 32-bit words.
    """
    digit = tokens % 256 // 16
    upper = _block_words(seed, position, 0, tokens // 256 * 16 + tokens % 16)
    upper = upper.gather(-1, (digit // 4).unsqueeze(-1)).squeeze(-1) >> (digit % 4 * 8) & 0xFF
    lower = _block_words(seed, position, 1, tokens // 4)
    lower = lower.gather(-1, (tokens % 4).unsqueeze(-1)).squeeze(-1) >> 8
    return upper << 24 | lower


def coin(seed: int, position: int, trial: int) -> float:
    """A uniform number in [0, 1), a multiple of 2**-53, for one trial at one absolute position: kind 2, index trial."""
    high, low, _, _ = _block_words(seed, position, 2, torch.tensor([trial]))[0].tolist()
    return ((high << 32 | low) >> 11) * 2.0**-53


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64: ``-ln(-ln(1 - u))`` with ``u = (word + 1/2) / 2**32``.

    The largest noise comes from the smallest u, where floating point is finest; it never exceeds 33 ln 2 = 22.9.
    """
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))
