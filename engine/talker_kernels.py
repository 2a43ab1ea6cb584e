"""The talker's Triton kernels: what lies between the products, paged attention, the fused sampler.

Each output row is a function of its own inputs alone, summed in an order that its neighbours don't change. Plain
PyTorch says the same in engine/talker.py and engine/sampler.py; tests/engine/test_talker_kernels.py compares.
Letters: N rows, K the inner width, Q query heads, G key/value heads, D head width, B lanes, V speech ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine import sampler
from engine.sampler import NUM_CONTROLS, Field, LaneDraws
from engine.talker import PAGE_ROWS

PAGE = tl.constexpr(PAGE_ROWS)
CONTROLS = tl.constexpr(NUM_CONTROLS)
GOLDEN = tl.constexpr(sampler.GOLDEN)
MIX_1 = tl.constexpr(sampler.MIX_1)
MIX_2 = tl.constexpr(sampler.MIX_2)
RING = tl.constexpr(LaneDraws.RING)
FIELDS = tl.constexpr(len(Field))
STEP = tl.constexpr(int(Field.STEP))
LAST = tl.constexpr(int(Field.LAST))
MIN_LEN = tl.constexpr(int(Field.MIN_LEN))
KEY = tl.constexpr(int(Field.KEY))
TOP_K = tl.constexpr(int(Field.TOP_K))
STRIKES = tl.constexpr(int(Field.STRIKES))
WINDOW = tl.constexpr(int(Field.WINDOW))
IS_RAS = tl.constexpr(int(Field.IS_RAS))
TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
TOP_P = tl.constexpr(int(Field.TOP_P))
PENALTY = tl.constexpr(int(Field.PENALTY))


# Between the products


@triton.jit
def add_norm(x, y, gain, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """x += y, both [N, K]; out = norm(x) * gain. One row a program."""
    row = tl.program_id(0)
    ks = tl.arange(0, BLOCK)
    is_k = ks < WIDTH
    value = tl.load(x + row * WIDTH + ks, mask=is_k, other=0.0)
    if ADDS:
        value += tl.load(y + row * WIDTH + ks, mask=is_k, other=0.0).to(tl.float32)
        tl.store(x + row * WIDTH + ks, value, mask=is_k)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value = value * scale * tl.load(gain + ks, mask=is_k, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + ks, value.to(out.dtype.element_ty), mask=is_k)


@triton.jit
def gate(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """both [N, 2 K] -> out [N, K] = silu(first half) * second half. One block of one row a program."""
    row = tl.program_id(0)
    ks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_k = ks < WIDTH
    first = tl.load(both + row * 2 * WIDTH + ks, mask=is_k, other=0.0).to(tl.float32)
    second = tl.load(both + row * 2 * WIDTH + WIDTH + ks, mask=is_k, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + ks, (first * tl.sigmoid(first) * second).to(out.dtype.element_ty), mask=is_k)


@triton.jit
def embed(ids, speech, text, x, num_speech, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Row ids [N] -> x [N, K] float32, from the speech table or, past its end, from the text table."""
    row = tl.program_id(0)
    ks = tl.arange(0, BLOCK)
    is_k = ks < WIDTH
    number = tl.load(ids + row)
    if number < num_speech:
        tl.store(x + row * WIDTH + ks, tl.load(speech + number * WIDTH + ks, mask=is_k).to(tl.float32), mask=is_k)
    else:
        place = text + (number - num_speech) * WIDTH
        tl.store(x + row * WIDTH + ks, tl.load(place + ks, mask=is_k).to(tl.float32), mask=is_k)


@triton.jit
def embed_last(lanes, record, speech, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """lanes [B] -> x [B, K] float32, the row of each lane's last id."""
    row = tl.program_id(0)
    ks = tl.arange(0, BLOCK)
    is_k = ks < WIDTH
    number = tl.load(record + tl.load(lanes + row) * FIELDS + LAST)
    tl.store(x + row * WIDTH + ks, tl.load(speech + number * WIDTH + ks, mask=is_k).to(tl.float32), mask=is_k)


# Attention


@triton.jit
def turned(x, places, halves, cos, sin):
    """Rows at `places` under the rotary embedding; `halves` are the places of each number's other half."""
    return tl.load(x + places).to(tl.float32) * cos + tl.load(x + halves).to(tl.float32) * sin


@triton.jit
def decode_attention(
    qkv,  # [B, (Q + 2 G) D]
    lanes,  # [B]
    table,  # [lanes + 1, 1 + pages]: rows held, then the pages
    rotary,  # [2, S, D] float32: cos and signed sin
    keys,  # [cache rows, G, D]
    values,
    partial,  # [B, G, SPLITS, HEADS, D + 2] float32 scratch
    arrived,  # [B, G] int32 scratch, zero between launches
    out,  # [B, Q D]
    scale,  # of the scores, times log2(e)
    table_width,
    rotary_rows,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # Q / G, padded to what tl.dot takes
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One new row a lane: turned, written to the cache, and attended over all rows of the lane.

    Blocks of keys go to the splits in turn; how many there are depends on the lane's length alone.
    """
    b, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = table + tl.load(lanes + b) * table_width
    length = tl.load(entry)
    ds = tl.arange(0, D)
    cos, sin = tl.load(rotary + length * D + ds), tl.load(rotary + (rotary_rows + length) * D + ds)
    half = (ds + D // 2) % D
    heads = tl.arange(0, HEADS)
    is_head = heads < Q // G
    first = qkv + b * (Q + 2 * G) * D
    head_places = (g * (Q // G) + tl.where(is_head, heads, 0))[:, None] * D
    q = turned(first, head_places + ds[None, :], head_places + half[None, :], cos[None, :], sin[None, :])
    q = (q * scale).to(keys.dtype.element_ty)
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, D), tl.float32)
    if split == 0:
        k = turned(first, (Q + g) * D + ds, (Q + g) * D + half, cos, sin).to(keys.dtype.element_ty)
        v = tl.load(first + (Q + G + g) * D + ds).to(values.dtype.element_ty)
        place = (tl.load(entry + 1 + length // PAGE) * PAGE + length % PAGE) * G * D + g * D + ds
        tl.store(keys + place, k)
        tl.store(values + place, v)
        best = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
        weight += 1.0
        total += v.to(tl.float32)[None, :]
    for block in range(split, tl.cdiv(length, BLOCK), SPLITS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        is_row = at < length
        rows = tl.load(entry + 1 + at // PAGE, mask=is_row, other=0) * PAGE + at % PAGE
        places = rows[:, None] * (G * D) + g * D + ds[None, :]
        k = tl.load(keys + places, mask=is_row[:, None], other=0.0)
        v = tl.load(values + places, mask=is_row[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(is_row[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        fade = tl.exp2(best - new)
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = new
    mine = (b * G + g) * SPLITS
    to = out + (b * Q + g * (Q // G) + heads)[:, None] * D + ds[None, :]
    if SPLITS == 1:
        tl.store(to, (total / weight[:, None]).to(out.dtype.element_ty), mask=is_head[:, None])
    else:
        own = partial + (mine + split) * HEADS * (D + 2) + heads * (D + 2)
        tl.store(own[:, None] + ds[None, :], total)
        tl.store(own + D, best)
        tl.store(own + D + 1, weight)
        tl.debug_barrier()
        if tl.atomic_add(arrived + b * G + g, 1, sem="acq_rel") == SPLITS - 1:
            best = tl.full((HEADS,), float("-inf"), tl.float32)
            for part in tl.static_range(SPLITS):
                theirs = partial + (mine + part) * HEADS * (D + 2) + heads * (D + 2)
                best = tl.maximum(best, tl.load(theirs + D, cache_modifier=".cg"))
            weight = tl.zeros((HEADS,), tl.float32)
            total = tl.zeros((HEADS, D), tl.float32)
            for part in tl.static_range(SPLITS):
                theirs = partial + (mine + part) * HEADS * (D + 2) + heads * (D + 2)
                fade = tl.exp2(tl.load(theirs + D, cache_modifier=".cg") - best)
                weight += fade * tl.load(theirs + D + 1, cache_modifier=".cg")
                total += fade[:, None] * tl.load(theirs[:, None] + ds[None, :], cache_modifier=".cg")
            tl.store(to, (total / weight[:, None]).to(out.dtype.element_ty), mask=is_head[:, None])
            tl.store(arrived + b * G + g, 0)


@triton.jit
def write_rows(
    qkv,  # [N, (Q + 2 G) D]; its queries are turned in place
    lanes,  # [N]
    positions,  # [N]
    table,
    rotary,
    keys,
    values,
    table_width,
    rotary_rows,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # Q + 2 G, padded to a power of two
):
    """New rows of prompts: queries and keys turned, keys and values written to the cache. One row a program."""
    row = tl.program_id(0)
    entry = table + tl.load(lanes + row) * table_width
    at = tl.load(positions + row)
    ds, heads = tl.arange(0, D), tl.arange(0, HEADS)
    half = (ds + D // 2) % D
    cos, sin = tl.load(rotary + at * D + ds), tl.load(rotary + (rotary_rows + at) * D + ds)
    first = qkv + row * (Q + 2 * G) * D
    known = tl.where(heads < Q + G, heads, 0)[:, None] * D
    new = turned(first, known + ds[None, :], known + half[None, :], cos[None, :], sin[None, :])
    place = (tl.load(entry + 1 + at // PAGE) * PAGE + at % PAGE) * G * D
    is_key = (heads >= Q) & (heads < Q + G)
    tl.store(keys + place + (heads - Q)[:, None] * D + ds[None, :], new.to(keys.dtype.element_ty), mask=is_key[:, None])
    is_value = (heads >= Q + G) & (heads < Q + 2 * G)
    v = tl.load(first + heads[:, None] * D + ds[None, :], mask=is_value[:, None])
    to = values + place + (heads - Q - G)[:, None] * D + ds[None, :]
    tl.store(to, v.to(values.dtype.element_ty), mask=is_value[:, None])
    tl.debug_barrier()  # both halves are read before either is written
    tl.store(first + heads[:, None] * D + ds[None, :], new.to(qkv.dtype.element_ty), mask=(heads < Q)[:, None])


@triton.jit
def prefill_attention(
    qkv,  # [N, (Q + 2 G) D], queries turned
    lanes,  # [N]; all rows of a block are of one lane
    positions,  # [N], rising within a block
    table,
    keys,
    values,
    out,  # [N, Q D]
    scale,
    table_width,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # Q / G, padded to a power of two
    ROWS: tl.constexpr,  # of a block
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Prompt rows over the rows of their lane up to themselves. One block of rows and one key head a program."""
    block, g = tl.program_id(0), tl.program_id(1)
    entry = table + tl.load(lanes + block * ROWS) * table_width
    each = tl.arange(0, ROWS * HEADS)
    heads, rows = each % HEADS, block * ROWS + each // HEADS
    at = tl.load(positions + rows)
    last = tl.load(positions + block * ROWS + ROWS - 1)
    is_head = heads < Q // G
    ds = tl.arange(0, D)
    head = g * (Q // G) + tl.where(is_head, heads, 0)
    q = tl.load(qkv + rows[:, None] * (Q + 2 * G) * D + head[:, None] * D + ds[None, :])
    q = (q.to(tl.float32) * scale).to(keys.dtype.element_ty)
    best = tl.full((ROWS * HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS * HEADS,), tl.float32)
    total = tl.zeros((ROWS * HEADS, D), tl.float32)
    for start in range(0, last + 1, BLOCK):
        seen = start + tl.arange(0, BLOCK)
        is_seen = seen <= last
        places = tl.load(entry + 1 + seen // PAGE, mask=is_seen, other=0) * PAGE + seen % PAGE
        places = places[:, None] * (G * D) + g * D + ds[None, :]
        k = tl.load(keys + places, mask=is_seen[:, None], other=0.0)
        v = tl.load(values + places, mask=is_seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(seen[None, :] <= at[:, None], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        fade = tl.exp2(best - new)
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = new
    to = out + rows[:, None] * Q * D + head[:, None] * D + ds[None, :]
    tl.store(to, (total / weight[:, None]).to(out.dtype.element_ty), mask=is_head[:, None])


# Drawing


@triton.jit
def shifted(x, count: tl.constexpr):
    return (x >> count) & ((1 << (64 - count)) - 1)


@triton.jit
def mixed(x):
    x = (x ^ shifted(x, 30)) * MIX_1
    x = (x ^ shifted(x, 27)) * MIX_2
    return x ^ shifted(x, 31)


@triton.jit
def gumbel(key, ids):
    bits = shifted(mixed(key + ids.to(tl.int64) * GOLDEN), 41)
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    # In float64: the quick logarithm of float32 has no good digit near 1, where the winners lie.
    return -tl.log(-tl.log(uniform.to(tl.float64))).to(tl.float32)


@triton.jit(do_not_specialize=["grows"])  # one build for prompts and steps
def draw(
    logits,  # [B, V] float32
    lanes,  # [B]
    record,  # [lanes + 1, FIELDS]
    recent,  # [lanes + 1, RING]
    seen,  # [lanes + 1, V]
    table,  # [lanes + 1, 1 + pages]
    out,  # [B] ids, -1 for faulty scores
    padding,  # the lane that is none
    num_ids,  # V
    table_width,
    grows,  # rows that the lane has more now, 0 or 1
    BLOCK: tl.constexpr,
):
    """The next id of each lane, as engine.sampler.drawn draws it, taken up as its last. One lane a program."""
    b = tl.program_id(0)
    lane = tl.load(lanes + b)
    if lane != padding:
        mine = record + lane * FIELDS
        ids = tl.arange(0, BLOCK)
        scores = tl.load(logits + b * num_ids + ids, mask=ids < num_ids, other=float("-inf")).to(tl.float32)
        is_faulty = tl.sum((scores != scores).to(tl.int32), 0) > 0
        is_faulty = is_faulty | (tl.max(scores, 0) == float("inf"))
        step = tl.load(mine + STEP)
        is_control = ids >= num_ids - CONTROLS
        scores = tl.where(is_control & (step < tl.load(mine + MIN_LEN)), float("-inf"), scores)
        is_faulty = is_faulty | (tl.max(scores, 0) == float("-inf"))
        scores = tl.where(is_faulty & (ids < num_ids), 0.0, scores)
        penalty = tl.load(mine + PENALTY).to(tl.float64, bitcast=True).to(tl.float32)
        if penalty != 1.0:
            lowered = tl.where(scores > 0, tl.div_rn(scores, tl.zeros_like(scores) + penalty), scores * penalty)
            is_seen = tl.load(seen + lane * num_ids + ids, mask=ids < num_ids, other=0) != 0
            scores = tl.where(is_seen & (ids < num_ids - CONTROLS), lowered, scores)
        temperature = tl.load(mine + TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
        is_ras = tl.load(mine + IS_RAS) > 0
        is_kept = nucleus(scores, ids, num_ids, tl.load(mine + TOP_K), mine, is_ras)
        key = mixed((tl.load(mine + KEY) ^ step) + GOLDEN)
        picked = tl.argmax(tl.where(is_kept, scores + gumbel(mixed(key + GOLDEN), ids), float("-inf")), 0)
        if is_ras:
            rest = tl.where(ids == picked, float("-inf"), scores)
            if is_repeated(picked, recent + lane * RING, mine, step) & (tl.max(rest, 0) > float("-inf")):
                picked = tl.argmax(rest + gumbel(mixed((key ^ 1) + GOLDEN), ids), 0)
        tl.store(out + b, tl.where(is_faulty, -1, picked).to(tl.int64))
        tl.store(mine + STEP, step + 1)
        tl.store(mine + LAST, picked.to(tl.int64))
        tl.store(recent + lane * RING + step % RING, picked.to(tl.int64))
        tl.store(seen + lane * num_ids + picked, 1)
        tl.store(table + lane * table_width, tl.load(table + lane * table_width) + grows)


@triton.jit
def is_repeated(picked, recent, mine, step):
    """Whether the repetition rule strikes."""
    back = tl.arange(0, RING)
    at = step - 1 - back
    is_within = (back < tl.load(mine + WINDOW)) & (at >= 0)
    last = tl.load(recent + (at + RING) % RING, mask=is_within, other=-1)
    return tl.sum((last == picked).to(tl.int64), 0) >= tl.load(mine + STRIKES)


@triton.jit
def nucleus(scores, ids, num_ids, top_k, mine, is_ras):
    """Which ids may be drawn, [BLOCK]. Found by halving an interval of places in the order: score, then lower id."""
    top_p = tl.load(mine + TOP_P).to(tl.float64, bitcast=True).to(tl.float32)
    bits = scores.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) * 8192 + (8191 - ids)
    order = tl.where(ids < num_ids, order, -(1 << 62))
    highest = tl.max(order, 0)
    lowest = tl.min(tl.where(ids < num_ids, order, highest), 0)
    bound = lowest
    if top_k < num_ids:
        low, high = lowest, highest
        while low < high:
            middle = low + ((high - low) >> 1)
            is_inside = tl.sum((order > middle).to(tl.int64), 0) < top_k
            low, high = tl.where(is_inside, low, middle + 1), tl.where(is_inside, middle, high)
        bound = high
    if top_p < 1.0:
        p = tl.exp(scores - tl.max(scores, 0))
        p = p / tl.sum(tl.where(is_ras | (order >= bound), p, 0.0), 0)
        low, high = bound, highest
        while low < high:
            middle = low + ((high - low) >> 1)
            is_inside = tl.sum(tl.where(order > middle, p, 0.0), 0) < top_p
            low, high = tl.where(is_inside, low, middle + 1), tl.where(is_inside, middle, high)
        bound = high
    is_kept = order >= bound
    joins = (ids >= num_ids - CONTROLS) & (ids < num_ids) & (is_ras == 0) & (top_k > 1)
    return is_kept | joins
