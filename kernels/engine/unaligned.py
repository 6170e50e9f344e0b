"""Reads rows that begin at no multiple of 16 bytes. Each element goes to the lane that would hold it in an aligned row:
the terms of a row's sum, and their order, then do not depend on where the row begins.

A thread reads its VEC elements as 32-bit words, two at a time, from the multiple of 8 bytes before them. The last two
words are the first two of the next thread, and come from the cache. The row's shift then selects whole words and, for
elements of less than 4 bytes, parts of two words.
"""

import triton
import triton.language as tl


@triton.jit
def funnel(low, high, bits, PART: tl.constexpr):
    """The 32-bit word that begins `bits` bits into the two words (low, high); `low` itself without PART."""
    word = low
    if PART:
        word = (((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> bits).to(tl.uint32)
    return word


@triton.jit
def load_two(pointer, w, end, EDGE: tl.constexpr, BM: tl.constexpr, K: tl.constexpr):
    """Loads the words at w and w + 1 of each of K accesses: two tensors (BM, K), undefined beyond the row's end."""
    if EDGE:
        words = tl.load(pointer + w, mask=w < end)
    else:
        words = tl.load(pointer + w)
    return tl.split(tl.reshape(words, (BM, K, 2)))


@triton.jit
def elements(words, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The elements (BM, BN) of type DTYPE that 32-bit words hold: bf16 in fp32, a mask as bool."""
    SIZE: tl.constexpr = (DTYPE.primitive_bitwidth + 7) // 8
    if SIZE == 8:
        low, high = tl.split(tl.reshape(words, (BM, BN, 2)))
        result = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(DTYPE, bitcast=True)
    elif SIZE == 4:
        result = words.to(DTYPE, bitcast=True)
    elif DTYPE == tl.bfloat16:
        both = tl.join(words << 16, words & 0xFFFF0000)
        result = tl.reshape(both, (BM, BN)).to(tl.float32, bitcast=True)
    elif SIZE == 2:
        both = tl.join((words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16))
        result = tl.reshape(both, (BM, BN)).to(DTYPE, bitcast=True)
    else:  # a mask
        even, odd = tl.join(words & 0xFF, (words >> 16) & 0xFF), tl.join((words >> 8) & 0xFF, words >> 24)
        result = tl.reshape(tl.join(even, odd), (BM, BN)) != 0
    return result


@triton.jit
def fetch_unaligned(start, n0, N, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, EDGE: tl.constexpr):
    """Columns n0, ..., n0 + BN - 1 of the rows that begin at `start` (BM,): (BM, BN), undefined beyond column N. n0 is
    a multiple of VEC, and VEC elements take 8 or 16 bytes. EDGE: the tile reaches beyond column N."""
    DTYPE: tl.constexpr = start.dtype.element_ty
    SIZE: tl.constexpr = (DTYPE.primitive_bitwidth + 7) // 8
    PART: tl.constexpr = SIZE < 4
    W: tl.constexpr = VEC * SIZE // 4
    K: tl.constexpr = BN // VEC
    PAIR: tl.constexpr = 8 // SIZE  # elements of two words
    shift = start.to(tl.int64, bitcast=True) % 8  # bytes
    skipped = shift // SIZE
    pointer = tl.multiple_of((start - skipped).to(tl.pointer_type(tl.uint32), bitcast=True), 8)[:, None]
    i = tl.arange(0, 2 * K)
    w = tl.multiple_of(tl.max_contiguous((i // 2 + n0 // VEC) * W + i % 2, 2), 2)[None, :]
    shift = shift.to(tl.int32)[:, None]
    # (computed from elements: a 32-bit index that can count the elements may not count their bytes)
    end = ((N + skipped.to(tl.int32)[:, None] + PAIR - 1) // PAIR * 2).to(w.dtype)  # (BM, 1)
    second, bits = shift >= 4, (shift % 4 * 8).to(tl.uint64)
    w0, w1 = load_two(pointer, w, end, EDGE, BM, K)
    w2, w3 = load_two(pointer, w + 2, end, EDGE or W == 2, BM, K)
    if SIZE < 8:
        w0, w1 = tl.where(second, w1, w0), tl.where(second, w2, w1)
    if SIZE == 8:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    elif W == 2:
        w2 = tl.where(second, w3, w2)
        words = tl.join(funnel(w0, w1, bits, PART), funnel(w1, w2, bits, PART))
    else:
        w4, w5 = load_two(pointer, w + 4, end, True, BM, K)
        w2, w3, w4 = tl.where(second, w3, w2), tl.where(second, w4, w3), tl.where(second, w5, w4)
        even = tl.join(funnel(w0, w1, bits, PART), funnel(w2, w3, bits, PART))
        odd = tl.join(funnel(w1, w2, bits, PART), funnel(w3, w4, bits, PART))
        words = tl.join(even, odd)
    return elements(tl.reshape(words, (BM, K * W)), DTYPE, BM, BN)
