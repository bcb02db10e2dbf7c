"""The checksum of :mod:`o1lab.kv.checksum` as a Triton kernel: reads each word once, writes a few sums a page."""

import triton
import triton.language as tl


@triton.jit
def sum_words(words, keys, sums, n_words, parts, BLOCK: tl.constexpr):
    """Program (page, part) adds every ``parts``-th block of the page's products into ``sums[page, part]``."""
    page, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(part * BLOCK, n_words, parts * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < n_words
        word = tl.load(words + page * n_words + place, mask=inside, other=0).to(tl.int64)
        total += word * tl.load(keys + place, mask=inside, other=0)
    tl.store(sums + page * parts + part, tl.sum(total, 0))
