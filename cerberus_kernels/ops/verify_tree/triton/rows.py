"""How verify_tree's Triton kernel reads rows of logits: the greatest entry, sums, filters' cuts, draws."""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import UPPER_BYTES, greatest_noise, gumbel, natural_log, philox4x32, token_words, upper_bytes

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
LEAST_SCORE = tl.constexpr(-87.0)
LEAST_SCORE_BITS = tl.constexpr(0x42AE0000)  # of 87.0
NAN_ROW = tl.constexpr(1)
NO_FINITE_ENTRY = tl.constexpr(2)


@triton.jit
def entries(row, token, vocab_size):
    """Entries of a row as fp32, -inf past the vocabulary."""
    return tl.load(row + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit
def best_entry(row, vocab_size, CHUNK: tl.constexpr):
    """Greatest entry that is not NaN, its id (the lowest of equals, 0 where all are -inf), and the row's status."""
    lane = tl.arange(0, CHUNK)
    best = tl.full([CHUNK], -float("inf"), tl.float32)
    token_of = tl.zeros([CHUNK], tl.int32)
    nan = tl.zeros([CHUNK], tl.int32)
    finite = tl.zeros([CHUNK], tl.int32)
    for first in range(0, vocab_size, CHUNK):
        token = first + lane
        entry = entries(row, token, vocab_size)
        nan |= (entry != entry).to(tl.int32)
        finite |= (tl.abs(entry) < float("inf")).to(tl.int32)
        better = entry > best  # never for NaN; of equals the first stays
        best = tl.where(better, entry, best)
        token_of = tl.where(better, token, token_of)
    greatest = tl.max(best, 0)
    token = tl.min(tl.where(best == greatest, token_of, NO_TOKEN), 0)
    flags = tl.max(nan, 0) * NAN_ROW + (1 - tl.max(finite, 0)) * NO_FINITE_ENTRY
    return greatest, token, flags


@triton.jit
def scores(entry, greatest, temperature):
    """(entry - greatest) / T, 0 for the greatest also at +inf, -inf below LEAST_SCORE."""
    score = tl.where(entry == greatest, 0.0, tl.math.div_rn(entry - greatest, temperature))
    return tl.where(score >= LEAST_SCORE, score, -float("inf"))


@triton.jit
def passes_cut(score, token, cut_score, cut_token):
    """Whether top_k and top_p keep a token."""
    return (score > cut_score) | ((score == cut_score) & (token <= cut_token))


@triton.jit
def weights(entry, token, greatest, temperature, cut_score, cut_token, min_p):
    """Scores and weights exp(score), 0 where filters drop the token."""
    score = scores(entry, greatest, temperature)
    weight = tl.exp(score)
    kept = passes_cut(score, token, cut_score, cut_token) & (weight >= min_p)
    return score, tl.where(kept, weight, 0.0)


@triton.jit
def sums(row, vocab_size, greatest, temperature, cut_score, cut_token, min_p, CHUNK: tl.constexpr):
    """Sum of the kept weights and their entropy in nats, float64."""
    lane = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    weighted = tl.zeros([CHUNK], tl.float32)
    for first in range(0, vocab_size, CHUNK):
        token = first + lane
        entry = entries(row, token, vocab_size)
        score, weight = weights(entry, token, greatest, temperature, cut_score, cut_token, min_p)
        total += weight
        weighted += tl.where(weight > 0.0, weight * score, 0.0)
    whole = tl.sum(total, 0).to(tl.float64)
    return whole, tl.log(whole) - tl.sum(weighted, 0).to(tl.float64) / whole


@triton.jit
def _masses(row, token, vocab_size, greatest, temperature, cut_score, cut_token, BY_COUNT: tl.constexpr):
    """Keys that rise as scores fall, and what each token counts: 1 or its weight, 0 if an earlier filter drops it."""
    score = scores(entries(row, token, vocab_size), greatest, temperature)
    kept = passes_cut(score, token, cut_score, cut_token) & (score > -float("inf"))
    mass = tl.where(kept, 1.0, 0.0) if BY_COUNT else tl.where(kept, tl.exp(score), 0.0)
    return tl.where(kept, (-score).to(tl.int32, bitcast=True) & 0x7FFFFFFF, NO_TOKEN), mass


@triton.jit
def _select(
    row, vocab_size, greatest, temperature, cut_score, cut_token, target, BY_COUNT: tl.constexpr, CHUNK: tl.constexpr
):
    """The smallest set of the likeliest tokens, the lowest id of equals first, whose mass reaches ``target``: a cut.

    A search for the score at which the mass is reached, by its bits: a pass tries three of them and leaves a quarter
    of the range, so 16 passes over a row that the cache holds find it, without sorting or a list.
    """
    lane = tl.arange(0, CHUNK)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), LEAST_SCORE_BITS, tl.int32)
    while low < high:
        quarter = (high - low) // 4
        first_key = low + quarter
        middle_key = low + (high - low) // 2
        last_key = middle_key + quarter
        a = tl.zeros([CHUNK], tl.float32)
        b = tl.zeros([CHUNK], tl.float32)
        c = tl.zeros([CHUNK], tl.float32)
        for first in range(0, vocab_size, CHUNK):
            token = first + lane
            key, mass = _masses(row, token, vocab_size, greatest, temperature, cut_score, cut_token, BY_COUNT)
            a += tl.where(key <= first_key, mass, 0.0)
            b += tl.where(key <= middle_key, mass, 0.0)
            c += tl.where(key <= last_key, mass, 0.0)
        in_first = tl.sum(a, 0).to(tl.float64) >= target
        in_second = tl.sum(b, 0).to(tl.float64) >= target
        in_third = tl.sum(c, 0).to(tl.float64) >= target
        low_of_upper = tl.where(in_third, middle_key + 1, last_key + 1)
        low = tl.where(in_first, low, tl.where(in_second, first_key + 1, low_of_upper))
        high = tl.where(in_first, first_key, tl.where(in_second, middle_key, tl.where(in_third, last_key, high)))
    before = tl.zeros([CHUNK], tl.float32)
    upto = tl.zeros([CHUNK], tl.float32)
    ties = tl.zeros([CHUNK], tl.int32)
    for first in range(0, vocab_size, CHUNK):
        token = first + lane
        key, mass = _masses(row, token, vocab_size, greatest, temperature, cut_score, cut_token, BY_COUNT)
        before += tl.where(key < low, mass, 0.0)
        upto += tl.where(key <= low, mass, 0.0)
        ties += (key == low).to(tl.int32)
    score = -low.to(tl.float32, bitcast=True)
    mass_of_one = score * 0.0 + 1.0 if BY_COUNT else tl.exp(score)
    missing = target - tl.sum(before, 0).to(tl.float64)
    num_kept = tl.ceil(missing / mass_of_one.to(tl.float64))
    num_kept = tl.minimum(tl.maximum(num_kept, 1.0), 2147483647.0).to(tl.int32)
    last_token = tl.full((), NO_TOKEN, tl.int32)
    if num_kept < tl.sum(ties, 0):
        seen = tl.full((), 0, tl.int32)
        for first in range(0, vocab_size, CHUNK):
            token = first + lane
            key, _mass = _masses(row, token, vocab_size, greatest, temperature, cut_score, cut_token, BY_COUNT)
            tie = (key == low).to(tl.int32)
            place = tl.cumsum(tie, 0) + seen
            hit = tl.where((tie > 0) & (place == num_kept), token, NO_TOKEN)
            last_token = tl.minimum(last_token, tl.min(hit, 0))
            seen += tl.sum(tie, 0)
    reached = tl.sum(upto, 0).to(tl.float64) >= target
    return tl.where(reached, score, cut_score), tl.where(reached, last_token, cut_token)


@triton.jit
def cut_of(row, vocab_size, greatest, temperature, top_k, top_p, SELECTS: tl.constexpr, CHUNK: tl.constexpr):
    """The cut of top_k, then of top_p among what it leaves: a score, and the last id that is kept at that score."""
    cut_score = tl.full((), -float("inf"), tl.float32)
    cut_token = tl.full((), NO_TOKEN, tl.int32)
    if SELECTS:
        if (top_k > 0) & (top_k < vocab_size):
            cut_score, cut_token = _select(
                row, vocab_size, greatest, temperature, cut_score, cut_token, top_k.to(tl.float64), True, CHUNK
            )
        if top_p < 1.0:
            total, _nats = sums(row, vocab_size, greatest, temperature, cut_score, cut_token, 0.0, CHUNK)
            cut_score, cut_token = _select(
                row, vocab_size, greatest, temperature, cut_score, cut_token, top_p.to(tl.float64) * total, False, CHUNK
            )
    return cut_score, cut_token


@triton.jit
def _may_win(
    row, first, vocab_size, greatest, temperature, cut_score, seed, position, best, FROM_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Whether a token of a chunk may reach ``best``, by the upper bytes of the noise: mostly none may.

    A thread holds a block of the noise and goes through its 16 tokens, so a block is worked out once.
    """
    block = tl.arange(0, CHUNK // 16)
    w0, w1, w2, w3 = philox4x32((first // 16 + block).to(tl.uint32), UPPER_BYTES, seed, position)
    token = first + block // 16 * 256 + block % 16
    bound = tl.full([CHUNK // 16], -float("inf"), tl.float32)
    for digit in tl.static_range(16):
        word = (w0, w1, w2, w3)[digit // 4]
        byte = ((word >> (digit % 4 * 8)) & 0xFF).to(tl.int32)
        if FROM_MASS:
            left = tl.load(row + token + digit * 16, mask=token + digit * 16 < vocab_size, other=0.0)
            score = _log_of_mass(left)
        else:
            score = scores(entries(row, token + digit * 16, vocab_size), greatest, temperature)
            score = tl.where(score >= cut_score, score, -float("inf"))
        bound = tl.maximum(bound, score + greatest_noise(byte))
    return tl.max(bound, 0) >= best


@triton.jit
def _log_of_mass(left):
    return tl.where(left > 0.0, natural_log(tl.where(left > 0.0, left, 1.0)), -float("inf"))


@triton.jit
def _better_draw(score, token, first, seed, position, best, best_token, CHUNK: tl.constexpr):
    """The greatest perturbed score so far, the lowest id of equals. score, token [CHUNK / 16, 16]."""
    byte = upper_bytes(first, seed, position, CHUNK // 16)
    perturbed = score + gumbel(token_words(token, byte, seed, position))
    greatest = tl.max(perturbed)
    at = tl.min(tl.where(perturbed == greatest, token, NO_TOKEN))
    wins = (greatest > best) | ((greatest == best) & (greatest > -float("inf")) & (at < best_token))
    return tl.where(wins, greatest, best), tl.where(wins, at, best_token)


@triton.jit
def _tokens_of_chunk(first, CHUNK: tl.constexpr):
    """Ids in the order of :func:`upper_bytes`."""
    row = tl.arange(0, CHUNK // 16)
    return first + (row // 16 * 256 + row % 16)[:, None] + (tl.arange(0, 16) * 16)[None, :]


@triton.jit
def draw(
    row, vocab_size, greatest, fallback, temperature, cut_score, cut_token, min_p, limit, seed, position,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Gumbel-argmax over the kept tokens with a weight above ``limit``; ``fallback``, the greatest entry's id, if none.

    Begins with the chunk of the greatest entry, after which most other chunks cannot win.
    """
    best = tl.full((), -float("inf"), tl.float32)
    best_token = fallback
    chunks = (vocab_size + CHUNK - 1) // CHUNK
    for i in range(0, chunks):
        first = (fallback // CHUNK + i) % chunks * CHUNK
        hopeful = best == -float("inf")
        if best > -float("inf"):
            hopeful = _may_win(
                row, first, vocab_size, greatest, temperature, cut_score, seed, position, best, False, CHUNK
            )
        if hopeful:
            token = _tokens_of_chunk(first, CHUNK)
            entry = entries(row, token, vocab_size)
            score, weight = weights(entry, token, greatest, temperature, cut_score, cut_token, min_p)
            score = tl.where((weight > limit) & (weight > 0.0), score, -float("inf"))
            best, best_token = _better_draw(score, token, first, seed, position, best, best_token, CHUNK)
    return best_token


@triton.jit
def draw_from_mass(mass, vocab_size, fallback, seed, position, CHUNK: tl.constexpr):
    """Gumbel-argmax of ln(mass), fp32 [V]."""
    best = tl.full((), -float("inf"), tl.float32)
    best_token = fallback
    chunks = (vocab_size + CHUNK - 1) // CHUNK
    for i in range(0, chunks):
        first = i * CHUNK
        hopeful = best == -float("inf")
        if best > -float("inf"):
            hopeful = _may_win(mass, first, vocab_size, 0.0, 1.0, 0.0, seed, position, best, True, CHUNK)
        if hopeful:
            token = _tokens_of_chunk(first, CHUNK)
            score = _log_of_mass(tl.load(mass + token, mask=token < vocab_size, other=0.0))
            best, best_token = _better_draw(score, token, first, seed, position, best, best_token, CHUNK)
    return best_token
