"""verify_tree's Triton kernel: one program walks one request's tree and reads the rows on its way."""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import coin
from .rows import NO_TOKEN, best_entry, cut_of, draw, draw_from_mass, entries, sums, weights

GREEDY = tl.constexpr(0)
TYPICAL = tl.constexpr(1)
SAMPLE = tl.constexpr(2)
REJECTION = tl.constexpr(3)
PER_REQUEST = tl.constexpr(-1)
WITHOUT_REPLACEMENT = tl.constexpr(2)
TOKEN_OUT_OF_RANGE = tl.constexpr(4)
MALFORMED_TREE = tl.constexpr(8)
NO_DRAFT_MASS = tl.constexpr(16)
LEAST_RESIDUAL = tl.constexpr(1e-35)


@triton.jit
def _integer(value, rows, stride, b):
    """A request's parameter, int64: the tensor's entry if there is one, else the number for all."""
    if rows is None:
        found = tl.full((), 0, tl.int64) + value
    else:
        found = tl.load(rows + b * stride).to(tl.int64)
    return found


@triton.jit
def _number(value, rows, stride, b):
    if rows is None:
        found = tl.full((), 0.0, tl.float32) + value
    else:
        found = tl.load(rows + b * stride)
    return found


@triton.jit
def _tree_flaws(parents, drafts, count, vocab_size, NODE_BLOCK: tl.constexpr):
    """Number of nodes that break the encoding, and of nodes with a token that is neither an id nor -1."""
    malformed = tl.full((), 0, tl.int32)
    foreign = tl.full((), 0, tl.int32)
    for first in range(0, count, NODE_BLOCK):
        node = first + tl.arange(0, NODE_BLOCK)
        used = node < count
        parent = tl.load(parents + node, mask=used, other=-1)
        token = tl.load(drafts + node, mask=used, other=-1)
        broken = tl.where(node == 0, parent != -1, (parent < 0) | (parent >= node))
        malformed += tl.sum((used & broken).to(tl.int32), 0)
        foreign += tl.sum((used & (node > 0) & ((token < -1) | (token >= vocab_size))).to(tl.int32), 0)
    return malformed, foreign


@triton.jit
def _next_child(parents, drafts, node, first, token, count, ANY_TOKEN: tl.constexpr, NODE_BLOCK: tl.constexpr):
    """First child of ``node`` from ``first`` on, that holds ``token`` unless any will do; count if there is none."""
    found = tl.full((), NO_TOKEN, tl.int32)
    while (first < count) & (found == NO_TOKEN):
        child = first + tl.arange(0, NODE_BLOCK)
        hit = (child < count) & (tl.load(parents + child, mask=child < count, other=-2) == node)
        if not ANY_TOKEN:
            hit = hit & (tl.load(drafts + child, mask=hit, other=-1) == token)
        found = tl.min(tl.where(hit, child, NO_TOKEN), 0)
        first += NODE_BLOCK
    return tl.minimum(found, count)


@triton.jit
def _walk_matching(
    rows, row_stride, vocab_size, parents, drafts, count, max_depth, draws, temperature, top_k, top_p, min_p, seed,
    position, tokens, path, SAMPLES: tl.constexpr, SELECTS: tl.constexpr, CHUNK: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Step to the first child that holds the row's best token or, if ``draws``, one drawn from it."""
    node = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    status = tl.full((), 0, tl.int32)
    bonus = tl.full((), 0, tl.int32)
    greatest = tl.full((), 0.0, tl.float32)
    flags = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    while going > 0:
        row = rows + node.to(tl.int64) * row_stride
        greatest, bonus, flags = best_entry(row, vocab_size, CHUNK)
        status = status | flags
        if SAMPLES:
            if draws & (flags == 0):
                cut_score, cut_token = cut_of(row, vocab_size, greatest, temperature, top_k, top_p, SELECTS, CHUNK)
                bonus = draw(
                    row, vocab_size, greatest, bonus, temperature, cut_score, cut_token, min_p, -1.0, seed,
                    position + depth, CHUNK,
                )  # fmt: skip
        child = count
        if (flags == 0) & (depth < max_depth):
            child = _next_child(parents, drafts, node, node + 1, bonus, count, False, NODE_BLOCK)
        if child < count:
            tl.store(tokens + depth, bonus)
            depth += 1
            tl.store(path + depth, child)
            node = child
        else:
            going = going * 0
    return node, depth, status, bonus, greatest, flags


@triton.jit
def _judge_children(
    row, vocab_size, parents, drafts, node, count, greatest, temperature, cut_score, cut_token, min_p, total, limit,
    depth, log_prob, merit_depth, merit_log, NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Depth and sum of ln p for the children of an accepted node that pass at its row."""
    log_total = tl.log(total)
    for first in range(node + 1, count, NODE_BLOCK):
        child = first + tl.arange(0, NODE_BLOCK)
        used = child < count
        token = tl.load(drafts + child, mask=used, other=-1)
        hit = used & (tl.load(parents + child, mask=used, other=-2) == node) & (token >= 0) & (token < vocab_size)
        token = tl.where(hit, token, 0).to(tl.int32)
        entry = tl.load(row + token, mask=hit, other=-float("inf")).to(tl.float32)
        score, weight = weights(entry, token, greatest, temperature, cut_score, cut_token, min_p)
        hit = hit & (weight > 0.0) & (weight.to(tl.float64) > limit)
        tl.store(merit_depth + child, depth + 1 + child * 0, mask=hit)
        tl.store(merit_log + child, log_prob + (score.to(tl.float64) - log_total), mask=hit)


@triton.jit
def _best_merit(merit_depth, merit_log, count, NODE_BLOCK: tl.constexpr):
    """The deepest accepted node, of these the likeliest, of these the first."""
    best = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    likelihood = tl.full((), 0.0, tl.float64)
    for first in range(0, count, NODE_BLOCK):
        node = first + tl.arange(0, NODE_BLOCK)
        used = node < count
        deep = tl.load(merit_depth + node, mask=used, other=-1)
        deepest = tl.max(deep, 0)
        log_prob = tl.load(merit_log + node, mask=used & (deep == deepest), other=-float("inf"))
        likeliest = tl.max(log_prob, 0)
        here = tl.min(tl.where((deep == deepest) & (log_prob == likeliest), node, NO_TOKEN), 0)
        wins = (deepest > depth) | ((deepest == depth) & (likeliest > likelihood))
        best = tl.where(wins, here, best)
        likelihood = tl.where(wins, likeliest, likelihood)
        depth = tl.where(wins, deepest, depth)
    return best, depth


@triton.jit
def _walk_typical(
    rows, row_stride, vocab_size, parents, drafts, count, max_depth, temperature, top_k, top_p, min_p, epsilon, delta,
    seed, position, tokens, path, merit_depth, merit_log, SELECTS: tl.constexpr, CHUNK: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Accept children that pass at their accepted parent's row; end in the deepest, then likeliest, then first."""
    status = tl.full((), 0, tl.int32)
    for first in range(0, count, NODE_BLOCK):
        node = first + tl.arange(0, NODE_BLOCK)
        tl.store(merit_depth + node, tl.where(node == 0, 0, -1), mask=node < count)
        tl.store(merit_log + node, (node * 0).to(tl.float64), mask=node < count)
    tl.debug_barrier()
    for i in range(0, count):
        node = tl.full((), 0, tl.int32) + i
        depth = tl.load(merit_depth + node)
        if (depth >= 0) & (depth < max_depth):
            child = node + 1
            judges = tl.full((), 0, tl.int32)  # whether there is a child with an id to judge
            while (child < count) & (judges == 0):
                child = _next_child(parents, drafts, node, child, 0, count, True, NODE_BLOCK)
                token = tl.load(drafts + child, mask=child < count, other=-1)
                judges = ((token >= 0) & (token < vocab_size)).to(tl.int32)
                child += 1
            if judges > 0:
                row = rows + node.to(tl.int64) * row_stride
                greatest, _best, flags = best_entry(row, vocab_size, CHUNK)
                status = status | flags
                if flags == 0:
                    cut_score, cut_token = cut_of(row, vocab_size, greatest, temperature, top_k, top_p, SELECTS, CHUNK)
                    total, nats = sums(row, vocab_size, greatest, temperature, cut_score, cut_token, min_p, CHUNK)
                    limit = tl.minimum(epsilon.to(tl.float64), delta.to(tl.float64) * tl.exp(-nats)) * total
                    _judge_children(
                        row, vocab_size, parents, drafts, node, count, greatest, temperature, cut_score, cut_token,
                        min_p, total, limit, depth, tl.load(merit_log + node), merit_depth, merit_log, NODE_BLOCK,
                    )  # fmt: skip
                    tl.debug_barrier()
    last, depth = _best_merit(merit_depth, merit_log, count, NODE_BLOCK)
    node = last
    place = depth
    while place > 0:
        tl.store(path + place, node)
        tl.store(tokens + place - 1, tl.load(drafts + node).to(tl.int32))
        node = tl.load(parents + node)
        place -= 1
    row = rows + last.to(tl.int64) * row_stride
    greatest, bonus, flags = best_entry(row, vocab_size, CHUNK)
    if flags == 0:
        cut_score, cut_token = cut_of(row, vocab_size, greatest, temperature, top_k, top_p, SELECTS, CHUNK)
        total, nats = sums(row, vocab_size, greatest, temperature, cut_score, cut_token, min_p, CHUNK)
        limit = tl.minimum(epsilon.to(tl.float64), delta.to(tl.float64) * tl.exp(-nats)) * total
        if limit < 1.0:
            bonus = draw(
                row, vocab_size, greatest, bonus, temperature, cut_score, cut_token, min_p, limit.to(tl.float32), seed,
                position + depth, CHUNK,
            )  # fmt: skip
    return last, depth, status | flags, bonus, greatest, flags


@triton.jit
def _drafted(draft_row, token, vocab_size, tried, num_tried):
    """A draft row's entries in float64, 0 past the vocabulary and where a sibling before held the token."""
    mass = tl.load(draft_row + token, mask=token < vocab_size, other=0.0).to(tl.float32).to(tl.float64)
    for i in range(0, num_tried):
        mass = tl.where(token == tl.load(tried + i), 0.0, mass)
    return mass


@triton.jit
def _draft_total(draft_row, vocab_size, tried, num_tried, CHUNK: tl.constexpr):
    """Sum of a draft row, 0 if an entry is no probability."""
    total = tl.zeros([CHUNK], tl.float64)
    flaws = tl.zeros([CHUNK], tl.int32)
    for first in range(0, vocab_size, CHUNK):
        token = first + tl.arange(0, CHUNK)
        entry = tl.load(draft_row + token, mask=token < vocab_size, other=0.0).to(tl.float32)
        flaws |= 1 - ((entry >= 0.0) & (entry < float("inf"))).to(tl.int32)
        total += _drafted(draft_row, token, vocab_size, tried, num_tried)
    return tl.where(tl.max(flaws, 0) > 0, 0.0, tl.sum(total, 0))


@triton.jit
def _residual(
    row, draft_row, mass, has_mass, token, vocab_size, greatest, temperature, cut_score, cut_token, min_p, total,
    draft_total, tried, num_tried,
):  # fmt: skip
    """max(p - q, 0) of some tokens, fp32; p is what is left of the row in ``mass``, or the row itself."""
    if has_mass > 0:
        target = tl.load(mass + token, mask=token < vocab_size, other=0.0)
    else:
        entry = entries(row, token, vocab_size)
        _score, target = weights(entry, token, greatest, temperature, cut_score, cut_token, min_p)
    drafted = _drafted(draft_row, token, vocab_size, tried, num_tried)
    left = (target.to(tl.float64) * (1.0 / total) - drafted * (1.0 / draft_total)).to(tl.float32)
    return tl.where(left >= LEAST_RESIDUAL, left, 0.0)


@triton.jit
def _subtract(
    row, draft_row, mass, has_mass, vocab_size, greatest, temperature, cut_score, cut_token, min_p, total, draft_total,
    tried, num_tried, CHUNK: tl.constexpr,
):  # fmt: skip
    """Leave max(p - q, 0) in ``mass`` and give its sum; where that is 0, as it can be by rounding, nothing changes."""
    lane = tl.arange(0, CHUNK)
    left = tl.zeros([CHUNK], tl.float32)
    for first in range(0, vocab_size, CHUNK):
        left += _residual(
            row, draft_row, mass, has_mass, first + lane, vocab_size, greatest, temperature, cut_score, cut_token,
            min_p, total, draft_total, tried, num_tried,
        )  # fmt: skip
    sum_left = tl.sum(left, 0).to(tl.float64)
    if sum_left > 0.0:
        for first in range(0, vocab_size, CHUNK):
            token = first + lane
            kept = _residual(
                row, draft_row, mass, has_mass, token, vocab_size, greatest, temperature, cut_score, cut_token, min_p,
                total, draft_total, tried, num_tried,
            )  # fmt: skip
            tl.store(mass + token, kept, mask=token < vocab_size)
        tl.debug_barrier()
    return sum_left


@triton.jit
def _walk_rejection(
    rows, row_stride, draft_rows, draft_stride, vocab_size, parents, drafts, count, max_depth, temperature, top_k,
    top_p, min_p, seed, position, tokens, path, tried, mass, DRAFTING: tl.constexpr, SELECTS: tl.constexpr,
    CHUNK: tl.constexpr, NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Try the children of each accepted node in order, each rejection leaving what its draft row did not cover."""
    node = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    status = tl.full((), 0, tl.int32)
    bonus = tl.full((), 0, tl.int32)
    greatest = tl.full((), 0.0, tl.float32)
    flags = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    while going > 0:
        row = rows + node.to(tl.int64) * row_stride
        greatest, bonus, flags = best_entry(row, vocab_size, CHUNK)
        status = status | flags
        accepted = tl.full((), 0, tl.int32)
        if flags == 0:
            cut_score, cut_token = cut_of(row, vocab_size, greatest, temperature, top_k, top_p, SELECTS, CHUNK)
            total, _nats = sums(row, vocab_size, greatest, temperature, cut_score, cut_token, min_p, CHUNK)
            has_mass = tl.full((), 0, tl.int32)
            num_tried = tl.full((), 0, tl.int32)
            trial = tl.full((), 0, tl.int32)
            child = tl.where(depth < max_depth, node, count) + 1
            while (child < count) & (accepted == 0):
                child = _next_child(parents, drafts, node, child, 0, count, True, NODE_BLOCK)
                token = tl.load(drafts + child, mask=child < count, other=-1)
                if (token >= 0) & (token < vocab_size):
                    token = token.to(tl.int32)
                    draft_row = draft_rows + child.to(tl.int64) * draft_stride
                    draft_total = _draft_total(draft_row, vocab_size, tried, num_tried, CHUNK)
                    q = _drafted(draft_row, token, vocab_size, tried, num_tried)
                    if (draft_total > 0.0) & (q > 0.0):
                        _score, weight = weights(
                            tl.load(row + token).to(tl.float32), token, greatest, temperature, cut_score, cut_token,
                            min_p,
                        )  # fmt: skip
                        p = tl.where(has_mass > 0, tl.load(mass + token, mask=has_mass > 0, other=0.0), weight)
                        toss = coin(trial, seed, position + depth)
                        if toss * (q / draft_total) < p.to(tl.float64) / total:
                            accepted = child
                        else:
                            left = _subtract(
                                row, draft_row, mass, has_mass, vocab_size, greatest, temperature, cut_score,
                                cut_token, min_p, total, draft_total, tried, num_tried, CHUNK,
                            )  # fmt: skip
                            has_mass = tl.where(left > 0.0, 1, has_mass)
                            total = tl.where(left > 0.0, left, total)
                            if DRAFTING == WITHOUT_REPLACEMENT:
                                tl.store(tried + num_tried, token)
                                tl.debug_barrier()
                                num_tried += 1
                    else:
                        status = status | NO_DRAFT_MASS
                trial += 1
                child += 1
            if accepted == 0:
                if has_mass > 0:
                    bonus = draw_from_mass(mass, vocab_size, bonus, seed, position + depth, CHUNK)
                else:
                    bonus = draw(
                        row, vocab_size, greatest, bonus, temperature, cut_score, cut_token, min_p, -1.0, seed,
                        position + depth, CHUNK,
                    )  # fmt: skip
        if accepted > 0:
            tl.store(tokens + depth, tl.load(drafts + accepted).to(tl.int32))
            depth += 1
            tl.store(path + depth, accepted)
            node = accepted
            tl.debug_barrier()
        else:
            going = going * 0
    return node, depth, status, bonus, greatest, flags


@triton.jit(do_not_specialize=["top_k_value", "seed_value", "position_value", "max_depth", "nodes"])
def verify_tree_kernel(
    logits, draft_tokens, parents, num_nodes, cu_nodes, draft_probs,
    mode_rows, mode_stride,
    temperature_value, temperature_rows, temperature_stride,
    top_k_value, top_k_rows, top_k_stride,
    top_p_value, top_p_rows, top_p_stride,
    min_p_value, min_p_rows, min_p_stride,
    epsilon_value, epsilon_rows, epsilon_stride,
    delta_value, delta_rows, delta_stride,
    seed_value, seed_rows, seed_stride,
    position_value, position_rows, position_stride,
    tokens, num_accepted, path, entropy, status_of,  # int32 [B, D + 1], [B], [B, D + 1], fp32 [B], uint8 [B]
    merit_depth, merit_log,  # int32, float64 [B, N] or None
    tried,  # int32 [B, N] or None
    mass,  # fp32 [B, V] or None
    nodes, vocab_size, max_depth, batch_stride, row_stride, token_stride, parents_stride, draft_batch_stride,
    draft_row_stride,
    MODE: tl.constexpr, DRAFTING: tl.constexpr, SELECTS: tl.constexpr, CHUNK: tl.constexpr, NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One request. MODE is its mode, or PER_REQUEST; SELECTS whether any request may have top_k or top_p."""
    b = tl.program_id(0).to(tl.int64)
    if cu_nodes is None:
        first_node = tl.full((), 0, tl.int64)
        count = tl.load(num_nodes + b) if num_nodes is not None else tl.full((), 0, tl.int32) + nodes
        sound = (count >= 1) & (count <= nodes)
        draft_tokens += b * token_stride
        parents += b * parents_stride
        logits += b * batch_stride
        workspace = b * nodes
    else:
        first_node = tl.load(cu_nodes + b).to(tl.int64)
        end = tl.load(cu_nodes + b + 1).to(tl.int64)
        sound = (first_node >= 0) & (end > first_node) & (end <= nodes)
        first_node = tl.where(sound, first_node, 0)
        count = (end - first_node).to(tl.int32)
        draft_tokens += first_node
        parents += first_node
        workspace = first_node
    rows = logits + first_node * row_stride
    count = tl.where(sound, count, 1)
    malformed, foreign = _tree_flaws(parents, draft_tokens, count, vocab_size, NODE_BLOCK)
    sound = sound & (malformed == 0)
    count = tl.where(sound, count, 1)
    flaws = tl.where(sound, tl.where(foreign > 0, TOKEN_OUT_OF_RANGE, 0), MALFORMED_TREE)
    temperature = _number(temperature_value, temperature_rows, temperature_stride, b)
    top_k = _integer(top_k_value, top_k_rows, top_k_stride, b)
    top_p = _number(top_p_value, top_p_rows, top_p_stride, b)
    min_p = _number(min_p_value, min_p_rows, min_p_stride, b)
    seed = _integer(seed_value, seed_rows, seed_stride, b)
    position = _integer(position_value, position_rows, position_stride, b)
    mode = tl.load(mode_rows + b * mode_stride).to(tl.int32) if MODE == PER_REQUEST else tl.full((), MODE, tl.int32)
    mode = tl.where(temperature == 0.0, GREEDY, mode)
    width = max_depth + 1
    tokens += b * width
    path += b * width
    tl.store(path, 0)
    node = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    status = tl.full((), 0, tl.int32)
    bonus = tl.full((), 0, tl.int32)
    greatest = tl.full((), 0.0, tl.float32)
    flags = tl.full((), 0, tl.int32)
    if (mode == GREEDY) | (mode == SAMPLE):
        node, depth, status, bonus, greatest, flags = _walk_matching(
            rows, row_stride, vocab_size, parents, draft_tokens, count, max_depth, mode == SAMPLE, temperature, top_k,
            top_p, min_p, seed, position, tokens, path, (MODE == SAMPLE) | (MODE == PER_REQUEST), SELECTS, CHUNK,
            NODE_BLOCK,
        )  # fmt: skip
    if (MODE == TYPICAL) | (MODE == PER_REQUEST):
        if mode == TYPICAL:
            epsilon = _number(epsilon_value, epsilon_rows, epsilon_stride, b)
            delta = _number(delta_value, delta_rows, delta_stride, b)
            node, depth, status, bonus, greatest, flags = _walk_typical(
                rows, row_stride, vocab_size, parents, draft_tokens, count, max_depth, temperature, top_k, top_p, min_p,
                epsilon, delta, seed, position, tokens, path, merit_depth + workspace, merit_log + workspace, SELECTS,
                CHUNK, NODE_BLOCK,
            )  # fmt: skip
    if draft_probs is not None:
        if mode == REJECTION:
            draft_rows = draft_probs + b * draft_batch_stride + first_node * draft_row_stride
            node, depth, status, bonus, greatest, flags = _walk_rejection(
                rows, row_stride, draft_rows, draft_row_stride, vocab_size, parents, draft_tokens, count, max_depth,
                temperature, top_k, top_p, min_p, seed, position, tokens, path, tried + workspace,
                mass + b * vocab_size, DRAFTING, SELECTS, CHUNK, NODE_BLOCK,
            )  # fmt: skip
    nats = tl.full((), float("nan"), tl.float32)
    if flags == 0:
        row = rows + node.to(tl.int64) * row_stride
        _total, whole = sums(row, vocab_size, greatest, 1.0, -float("inf"), NO_TOKEN, 0.0, CHUNK)
        nats = whole.to(tl.float32)
    tl.store(tokens + depth, bonus)
    tl.store(num_accepted + b, depth)
    tl.store(entropy + b, nats)
    tl.store(status_of + b, (status | flaws).to(tl.uint8))
    for first in range(0, width, NODE_BLOCK):
        place = first + tl.arange(0, NODE_BLOCK)
        past = (place > depth) & (place < width)
        tl.store(tokens + place, place * 0 - 1, mask=past)
        tl.store(path + place, place * 0 - 1, mask=past)
