"""Philox4x32-10 and what is drawn from it, in Triton: the layout of docs/verify.md to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

UPPER_BYTES = tl.constexpr(0)
LOWER_BITS = tl.constexpr(1)
COINS = tl.constexpr(2)


@triton.jit
def philox4x32(index, kind, seed, position):
    """Four words of the block at counter (index, kind, position), key: the seed. index uint32, seed int64."""
    c0 = index
    c1 = index * 0 + kind
    c2 = index * 0 + (position & 0xFFFFFFFF).to(tl.uint32)
    c3 = index * 0 + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    factor0 = tl.full((), 0xD2511F53, tl.uint32)
    factor1 = tl.full((), 0xCD9E8D57, tl.uint32)
    weyl0 = tl.full((), 0x9E3779B9, tl.uint32)
    weyl1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):  # wraps at 32 bits, which is no overflow to report
        high0 = tl.umulhi(c0, factor0)
        low0 = tl.mul(c0, factor0, sanitize_overflow=False)
        high1 = tl.umulhi(c2, factor1)
        low1 = tl.mul(c2, factor1, sanitize_overflow=False)
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 = tl.add(key0, weyl0, sanitize_overflow=False)
        key1 = tl.add(key1, weyl1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def chosen_word(place, w0, w1, w2, w3):
    """The word at a place in 0..3."""
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def upper_bytes(first, seed, position, BLOCKS: tl.constexpr):
    """Upper byte of the word of token ``first + r // 16 * 256 + d * 16 + r % 16``, at [r, d] of int32 [BLOCKS, 16].

    ``first`` is a multiple of 256. A block serves the 16 tokens of its row, so none is worked out twice.
    """
    index = (first // 16 + tl.arange(0, BLOCKS)).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(index, UPPER_BYTES, seed, position)
    digit = tl.arange(0, 16)[None, :]
    word = chosen_word(digit // 4, w0[:, None], w1[:, None], w2[:, None], w3[:, None])
    return ((word >> (digit % 4 * 8).to(tl.uint32)) & 0xFF).to(tl.int32)


@triton.jit
def token_words(token, byte, seed, position):
    """The whole words of tokens whose upper bytes are known. token, byte int32 -> uint32."""
    w0, w1, w2, w3 = philox4x32((token // 4).to(tl.uint32), LOWER_BITS, seed, position)
    return (byte.to(tl.uint32) << 24) | (chosen_word(token % 4, w0, w1, w2, w3) >> 8)


@triton.jit
def coin(trial, seed, position):
    """Uniform float64 in [0, 1), a multiple of 2**-53. trial int32, a scalar."""
    w0, w1, _w2, _w3 = philox4x32(trial.to(tl.uint32), COINS, seed, position)
    bits = (w0.to(tl.uint64) << 32) | w1.to(tl.uint64)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _log_one_plus(f):
    """ln(1 + f) for f in [-0.3, 0.42], within two units in the last place: as in csrc/include/cerberus/philox.h."""
    series = 7.0376836292e-2 * f - 1.1514610310e-1
    series = series * f + 1.1676998740e-1
    series = series * f - 1.2420140846e-1
    series = series * f + 1.4249322787e-1
    series = series * f - 1.6668057665e-1
    series = series * f + 2.0000714765e-1
    series = series * f - 2.4999993993e-1
    series = series * f + 3.3333331174e-1
    square = f * f
    return f + (series * f * square - 0.5 * square)


@triton.jit
def natural_log(x):
    """ln(x) for positive normal fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # brings the mantissa to [sqrt(1/2), sqrt(2))
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    scale = exponent.to(tl.float32)
    return (scale * -2.12194440e-4 + _log_one_plus(mantissa - 1.0)) + scale * 0.693359375


@triton.jit
def gumbel(word):
    """Standard Gumbel noise -ln(-ln(1 - u)), u = (word + 1/2) / 2**32, within 1e-5; word uint32."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(word < 0x40000000, -_log_one_plus(-tl.minimum(u, 0.25)), -natural_log(rest))
    return -natural_log(exponential)


@triton.jit
def greatest_noise(byte):
    """No less than the noise of any word with this upper byte: gumbel(u) <= -ln(u), and never more than 33 ln 2."""
    return tl.where(byte == 0, 22.8750, 5.5462 - tl.log(tl.maximum(byte, 1).to(tl.float32)))
