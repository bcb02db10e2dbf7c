"""Triton kernels of a decode step beside attention: products of few rows with large weights, and rotation with append.

A product reads each weight once; how fast it reads is all that counts. A program takes ``BLOCK_N`` rows of the weight
(and as many of its second half when ``GATED``) and one of ``SPLITS`` shares of the inner dimension. With one split it
writes the result; with more, the last program of a column to arrive adds up the parts in their order, so that the
result does not hang on who came first. The root-mean-square norm of the input is folded in: the inputs are multiplied
by its gains, their squares are summed on the way, and the sum is divided at the end; nothing is read twice.

``OVERLAP``: the kernel is launched while the one before it still runs (programmatic dependent launch, compute
capability 9.0), asks the second-level cache for its weights, which no kernel writes, and waits before it reads anything
else. Only what Triton 3.6 knows is used.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # CPU builds of torch come without it; then no one asks for this body
    triton = None

if triton is not None:

    @triton.jit
    def ask(address):
        """Bring the 128 bytes at each address into the second-level cache."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip

    @triton.jit
    def finish(acc, up, total, bias, residual, out, batch, column, live, K, N: tl.constexpr, epsilon,
               NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
        """Norm, bias, gate and sum, and the result (batch, column) into ``out``."""
        if NORM:
            scale = tl.rsqrt(total / K + epsilon)[:, None]
            acc *= scale
            if GATED:
                up *= scale
        if BIAS:
            within = column < N
            acc += tl.load(bias + column, mask=within, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias + N + column, mask=within, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = acc * tl.sigmoid(acc) * up
        at = batch[:, None] * N + column[None, :]
        if ADD:
            acc += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=live)

    @triton.jit
    def product(
        x, weight, gain, bias, residual, out, partials, squares, arrivals, epsilon, rows, x_row,
        N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
        BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        DOT: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One (block of columns, split) of ``x`` (rows, K) times ``weight`` (N or 2 N, K), transposed.

        ``partials`` is (SPLITS, 1 or 2, rows, N), ``squares`` (blocks, SPLITS, BLOCK_B), ``arrivals`` (blocks,) zeros.
        ``LINE`` is the number of elements in 128 bytes; ``LINES``, a power of two, says how many of a row are asked for
        early.
        """
        block, split = tl.program_id(0), tl.program_id(1)
        column, batch, inner = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
        share: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
        start = split * share
        end = tl.minimum(start + share, K)
        clean: tl.constexpr = N % BLOCK_N == 0 and K % (BLOCK_K * SPLITS) == 0
        row = column if clean else tl.minimum(column, N - 1)
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            line = tl.minimum(start + tl.arange(0, LINES) * LINE, K - 1)
            place = row[:, None].to(tl.int64) * K + line[None, :]
            ask(weight + place)
            if GATED:
                ask(weight + place + N * K)
            tl.extra.cuda.gdc_wait()
        w_at = weight + row[:, None].to(tl.int64) * K + inner[None, :]
        x_at = x + batch[:, None] * x_row + inner[None, :]
        present = (batch < rows)[:, None]
        acc = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
        total = tl.zeros([BLOCK_B], tl.float32)
        for at in tl.range(start, end, BLOCK_K):
            if clean:
                given = tl.load(x_at + at, mask=present, other=0.0)
                part = tl.load(w_at + at)
            else:
                inside = (at + inner < end)[None, :]
                given = tl.load(x_at + at, mask=present & inside, other=0.0)
                part = tl.load(w_at + at, mask=inside, other=0.0)
            if NORM:
                exact = given.to(tl.float32)
                total += tl.sum(exact * exact, 1)
                if clean:
                    gains = tl.load(gain + at + inner)
                else:
                    gains = tl.load(gain + at + inner, mask=at + inner < end, other=0.0)
                given = (exact * gains.to(tl.float32)[None, :]).to(DOT)
            else:
                given = given.to(DOT)
            acc = tl.dot(given, tl.trans(part.to(DOT)), acc, input_precision="ieee")
            if GATED:
                if clean:
                    second = tl.load(w_at + N * K + at)
                else:
                    second = tl.load(w_at + N * K + at, mask=inside, other=0.0)
                up = tl.dot(given, tl.trans(second.to(DOT)), up, input_precision="ieee")
        live = present & (column < N)[None, :]
        if SPLITS == 1:
            finish(acc, up, total, bias, residual, out, batch, column, live, K, N, epsilon, NORM, GATED, ADD, BIAS)
        else:
            kinds: tl.constexpr = 2 if GATED else 1
            at_p = batch[:, None] * N + column[None, :]
            tl.store(partials + (split * kinds * rows) * N + at_p, acc, mask=live)
            if GATED:
                tl.store(partials + (split * kinds + 1) * rows * N + at_p, up, mask=live)
            if NORM:
                tl.store(squares + (block * SPLITS + split) * BLOCK_B + batch, total)
            tl.debug_barrier()  # every thread has stored before one of them tells the others
            if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLITS - 1:
                tl.debug_barrier()
                acc = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
                up = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
                total = tl.zeros([BLOCK_B], tl.float32)
                for one in range(SPLITS):
                    acc += tl.load(partials + (one * kinds * rows) * N + at_p, mask=live, other=0.0,
                                   cache_modifier=".cg")  # fmt: skip
                    if GATED:
                        up += tl.load(partials + (one * kinds + 1) * rows * N + at_p, mask=live, other=0.0,
                                      cache_modifier=".cg")  # fmt: skip
                    if NORM:
                        total += tl.load(squares + (block * SPLITS + one) * BLOCK_B + batch, cache_modifier=".cg")
                finish(acc, up, total, bias, residual, out, batch, column, live, K, N, epsilon, NORM, GATED, ADD, BIAS)
                tl.store(arrivals + block, 0)  # ready for the next launch: a replayed graph resets nothing

    @triton.jit
    def rotate(qkv, cosines, sines, pages, table, lengths, out, page, side, token, head, table_batch,
               Q: tl.constexpr, KV: tl.constexpr, T: tl.constexpr, D: tl.constexpr, HALF_2: tl.constexpr,
               OVERLAP: tl.constexpr):  # fmt: skip
        """One head of one sequence's newest token, from ``qkv`` (B, (Q + 2 KV) · D).

        Queries are rotated into ``out`` (B, Q, D), keys are rotated into their page, values go there as they are. The
        token's position is ``lengths − 1``; ``cosines`` and ``sines`` are (positions, D).
        """
        number, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        column = tl.arange(0, HALF_2)
        half: tl.constexpr = D // 2
        there = column < half
        at = tl.load(lengths + sequence) - 1
        given = qkv + (sequence * (Q + 2 * KV) + number) * D + column
        left = tl.load(given, mask=there, other=0.0).to(tl.float32)
        right = tl.load(given + half, mask=there, other=0.0).to(tl.float32)
        if number < Q + KV:
            turn = at.to(tl.int64) * D + column
            first_cos = tl.load(cosines + turn, mask=there, other=0.0).to(tl.float32)
            second_cos = tl.load(cosines + turn + half, mask=there, other=0.0).to(tl.float32)
            first_sin = tl.load(sines + turn, mask=there, other=0.0).to(tl.float32)
            second_sin = tl.load(sines + turn + half, mask=there, other=0.0).to(tl.float32)
            turned = left * first_cos - right * first_sin
            right = right * second_cos + left * second_sin
            left = turned
        if number < Q:
            target = out + (sequence * Q + number) * D + column
        else:
            own = tl.load(table + sequence * table_batch + at // T).to(tl.int64)
            member = number - Q
            target = pages + own * page + (at % T) * token + (member % KV) * head + (member // KV) * side + column
        tl.store(target, left.to(out.dtype.element_ty), mask=there)
        tl.store(target + half, right.to(out.dtype.element_ty), mask=there)
