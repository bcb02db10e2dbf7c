"""The Triton kernels of paged decode: append of the newest token, one pass over a split's pages, merge of the splits.

One program serves all query heads of one KV head (GQA packing), so each byte of K and V is read once; it walks its
share of one sequence in blocks of ``BLOCK_N`` tokens. In a page ``(2, T, Hkv, D)``, as it is stored by default, a
token's row for one head is ``D`` contiguous elements (256 B at 128 × bf16: two whole cache lines), and rows of one head
lie ``Hkv · D`` apart. The KV head is the fastest grid axis, so neighbouring programs read the gaps at the same time
and DRAM rows are read whole. All strides but the last are arguments: pages stored head by head, ``(P, 2, Hkv, T, D)``,
run unchanged as a permuted view, with longer contiguous runs per program but an append that scatters.

Softmax statistics and sums are fp32, exponents base 2 (log2 e is folded into the scale and into the bias). A page's
number is read one block ahead: read in the block itself, it halves the depth of Triton's software pipeline, which
counts an indirect load as a stage. The bias is read one block ahead too, into registers: left to the pipeline, it is
made of asynchronous copies of four bytes, which cost up to 20 % on an H200. Only what Triton 3.6 knows is used.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # CPU builds of torch come without it; then no one asks for this body
    triton = None

if triton is not None:

    @triton.jit
    def merged_row(stats, partials, row, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
                   SPLITS_2: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
        """One row's partial outputs, weighted by their log-sum-exp; a split without tokens is never read."""
        column = tl.arange(0, BLOCK_D)
        every = tl.arange(0, SPLITS_2)
        lse = tl.load(stats + row * SPLITS + every, mask=every < SPLITS, other=float("-inf"))
        top = tl.max(lse, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(lse - top), 0)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, SPLITS, CHUNK):
            split = first + tl.arange(0, CHUNK)
            some = tl.load(stats + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
            used = (some != float("-inf"))[:, None] & (column < D)[None, :]
            part = tl.load(partials + (row * SPLITS + split)[:, None] * D + column[None, :], mask=used, other=0.0)
            acc += tl.sum(part * tl.exp2(some - top)[:, None], 0)
        return acc / tl.where(total == 0.0, 1.0, total)

    @triton.jit
    def merge(stats, partials, out, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
              SPLITS_2: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
        """Second stage: one program for each (sequence, query head)."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK_D)
        acc = merged_row(stats, partials, row, D, BLOCK_D, SPLITS, SPLITS_2, CHUNK)
        tl.store(out + row * D + column, acc.to(out.dtype.element_ty), mask=column < D)

    @triton.jit
    def append(pages, table, lengths, keys, values, page, side, token, head, table_batch, k_batch, k_head, v_batch,
               v_head, T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
        """One (KV head, sequence): its newest token, which ``lengths`` counts already, into its slot of its page."""
        kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
        at = tl.load(lengths + sequence) - 1
        number = tl.load(table + sequence * table_batch + at // T).to(tl.int64)
        column = tl.arange(0, BLOCK_D)
        slot = pages + number * page + (at % T) * token + kv_head * head + column
        key = tl.load(keys + sequence * k_batch + kv_head * k_head + column, mask=column < D)
        value = tl.load(values + sequence * v_batch + kv_head * v_head + column, mask=column < D)
        tl.store(slot, key, mask=column < D)
        tl.store(slot + side, value, mask=column < D)

    @triton.jit
    def decode(
        q, pages, table, lengths, scales, bias, out, partials, stats, arrivals, qk_scale,
        q_batch, q_head, page, side, token, head, table_batch, bias_batch, s_page, s_side, s_token, s_head,
        GROUP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
        BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPLITS_2: tl.constexpr, CHUNK: tl.constexpr,
        HAS_BIAS: tl.constexpr, QUANTISED: tl.constexpr, FUSED: tl.constexpr, DOT_K: tl.constexpr, DOT_V: tl.constexpr,
        PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One (KV head, split, sequence). ``page, side, token, head`` and ``s_…`` are strides in elements.

        ``DOT_K`` and ``DOT_V`` are the types in which scores and outputs are multiplied (and summed in fp32).
        ``OVERLAP``: launched while the kernel before it runs, which is waited for here (programmatic dependent launch).
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        length = tl.load(lengths + sequence)
        share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
        start = split * share
        end = tl.minimum(start + share, length)
        member, column, place = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        filled = (member < GROUP)[:, None] & (column < D)[None, :]
        q_at = q + sequence * q_batch + (kv_head * GROUP + member)[:, None] * q_head + column[None, :]
        queries = tl.load(q_at, mask=filled, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        one_page: tl.constexpr = T % BLOCK_N == 0  # a block never crosses a page: its number is one scalar
        numbers = table + sequence * table_batch
        ahead = start + (0 if one_page else place)
        coming = tl.load(numbers + ahead // T, mask=ahead < end, other=0)
        if HAS_BIAS:
            added = tl.load(bias + sequence * bias_batch + start + place, mask=start + place < end, other=0.0)
        for at in tl.range(start, end, BLOCK_N):
            tokens = at + place
            inside = tokens < end
            live = inside[:, None] if D == BLOCK_D else inside[:, None] & (column < D)[None, :]
            number = coming.to(tl.int64)
            ahead = at + BLOCK_N + (0 if one_page else place)
            coming = tl.load(numbers + ahead // T, mask=ahead < end, other=0)
            slot = place if T == BLOCK_N else tokens % T
            if one_page:
                at_k = pages + number * page + kv_head * head + slot[:, None] * token + column[None, :]
            else:
                at_k = pages + kv_head * head + (number * page + slot * token)[:, None] + column[None, :]
            keys = tl.load(at_k, mask=live, other=0)
            values = tl.load(at_k + side, mask=live, other=0)
            scores = tl.dot(queries.to(DOT_K), tl.trans(keys.to(DOT_K)), input_precision=PRECISION) * qk_scale
            if QUANTISED:
                at_s = scales + number * s_page + slot * s_token + kv_head * s_head
                scores *= tl.load(at_s, mask=inside, other=0.0).to(tl.float32)[None, :]
            if HAS_BIAS:
                scores += added[None, :] * 1.4426950408889634
                after = tokens + BLOCK_N
                added = tl.load(bias + sequence * bias_batch + after, mask=after < end, other=0.0)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)  # a bias of -inf may hide a whole block
            weights = tl.exp2(scores - safe[:, None])
            keep = tl.exp2(top - safe)
            total = total * keep + tl.sum(weights, 1)
            acc = acc * keep[:, None]
            top = new
            if QUANTISED:
                weights *= tl.load(at_s + s_side, mask=inside, other=0.0).to(tl.float32)[None, :]
            acc = tl.dot(weights.to(DOT_V), values.to(DOT_V), acc, input_precision=PRECISION)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        row = (sequence * tl.num_programs(0) + kv_head) * GROUP + member
        if SPLITS == 1:
            tl.store(out + row[:, None] * D + column[None, :], acc.to(out.dtype.element_ty), mask=filled)
        else:
            at_p = (row * SPLITS + split)[:, None] * D + column[None, :]
            tl.store(partials + at_p, acc, mask=filled & (top != float("-inf"))[:, None])
            lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))
            tl.store(stats + row * SPLITS + split, lse, mask=member < GROUP)
            if FUSED:
                tl.debug_barrier()  # every thread has stored before one of them tells the others
                group = sequence * tl.num_programs(0) + kv_head
                if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == SPLITS - 1:
                    tl.debug_barrier()
                    for one in range(GROUP):
                        mine = group * GROUP + one
                        whole = merged_row(stats, partials, mine, D, BLOCK_D, SPLITS, SPLITS_2, CHUNK)
                        tl.store(out + mine * D + column, whole.to(out.dtype.element_ty), mask=column < D)
                    tl.store(arrivals + group, 0)  # ready for the next launch: a replayed graph resets nothing
