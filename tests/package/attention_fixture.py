"""Paged calls with poison where nothing may be read, an oracle in plain loops, and a process that interprets Triton."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context

import pytest
import torch

from o1lab.attention import Workspace, paged_decode, quantise

SPARE = 3  # pages that belong to no sequence


@dataclass(frozen=True)
class Call:
    """One call: ``clean`` are the values that the pages stand for, before rounding to ``pages``' type and poisoning."""

    q: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.pages, self.table, self.lengths

    @property
    def options(self) -> dict[str, torch.Tensor | None]:
        return {"bias": self.bias, "scales": self.scales}

    def to(self, device: str) -> Call:
        moved = {name: getattr(self, name) for name in ("q", "pages", "table", "lengths", "bias", "scales")}
        moved = {name: None if value is None else value.to(device) for name, value in moved.items()}
        return replace(
            self, **moved, keys=[x.to(device) for x in self.keys], values=[x.to(device) for x in self.values]
        )


def make(
    lengths=(5, 0, 16, 33), heads=(4, 2), head_dim=64, page_tokens=16, dtype=torch.float32, *, queries=None, bias=False,
    per=None, seed=0, spare_columns=1,
) -> Call:  # fmt: skip
    """Draw a call. Pages of no sequence, slots behind a sequence's end and unused table entries are poison."""
    random = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    batch, columns = len(lengths), max(1, -(-max(lengths) // page_tokens)) + spare_columns
    count = sum(-(-length // page_tokens) for length in lengths) + SPARE
    shape = (count, 2, page_tokens, kv_heads, head_dim)
    pages = torch.randn(shape, generator=random).to(dtype)
    scales = None
    if per is not None:
        pages, scales = quantise(pages, per)
    order = torch.randperm(count, generator=random)
    table = torch.randint(-(2**31), 2**31 - 1, (batch, columns), generator=random).to(torch.int32)
    live = torch.zeros(count, page_tokens, dtype=torch.bool)
    keys, values, at = [], [], 0
    exact = pages.double() if scales is None else pages.double() * scales.double().unsqueeze(-1)
    for row, length in enumerate(lengths):
        own = order[at : at + -(-length // page_tokens)]
        at += len(own)
        table[row, : len(own)] = own.to(torch.int32)
        for place in range(length):
            live[own[place // page_tokens], place % page_tokens] = True
        both = exact[own].transpose(0, 1).reshape(2, -1, kv_heads, head_dim)[:, :length]
        keys.append(both[0])
        values.append(both[1])
    dead = ~live[:, None, :, None].expand(-1, 2, -1, kv_heads)
    if scales is None:
        pages = pages.masked_fill(dead.unsqueeze(-1), math.nan)
    elif per == "token":
        scales = scales.masked_fill(dead, math.nan)
    else:
        scales[order[at:]] = math.nan
    form = (batch, q_heads, head_dim) if queries is None else (batch, q_heads, queries, head_dim)
    q = torch.randn(form, generator=random).to(dtype if dtype.is_floating_point else torch.float32)
    added = None
    if bias:
        added = torch.randn(batch, columns * page_tokens, generator=random)
        for row, length in enumerate(lengths):
            added[row, length:] = math.nan
    return Call(q, pages, table, torch.tensor(lengths, dtype=torch.int32), added, scales, keys, values)


def oracle(call: Call, weight: Callable[[int, torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """float64 answer, one sequence and head at a time. ``weight(i, j)`` is added to the scores besides the bias."""
    decode = call.q.dim() == 3
    q = (call.q[:, :, None] if decode else call.q).double()
    out = torch.zeros_like(q)
    group = q.shape[1] // call.pages.shape[3]
    for row, length in enumerate(call.lengths.tolist()):
        for head in range(q.shape[1]):
            for query in range(q.shape[2]):
                last = length - q.shape[2] + query
                if last < 0:
                    continue
                keys, values = (part[row][: last + 1, head // group] for part in (call.keys, call.values))
                scores = keys @ q[row, head, query] * q.shape[-1] ** -0.5
                if call.bias is not None:
                    scores = scores + call.bias[row, : last + 1].double()
                if weight is not None:
                    scores = scores + weight(row, torch.arange(last + 1), last)
                out[row, head, query] = torch.softmax(scores, 0) @ values
    return out[:, :, 0] if decode else out


def rms(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).pow(2).mean().sqrt())


def sdpa(call: Call) -> torch.Tensor:
    """SDPA in the call's type on contiguous keys and values, one sequence at a time, with the bias as its mask."""
    dtype, out = call.q.dtype, torch.zeros_like(call.q)
    for row, length in enumerate(call.lengths.tolist()):
        if length:
            keys, values = (part[row].to(dtype).transpose(0, 1)[None] for part in (call.keys, call.values))
            mask = None if call.bias is None else call.bias[row : row + 1, None, None, :length].to(dtype)
            answer = torch.nn.functional.scaled_dot_product_attention(
                call.q[row : row + 1, :, None], keys, values, attn_mask=mask, enable_gqa=True
            )
            out[row] = answer[0, :, 0]
    return out


def interpret(given: tuple, options: dict, splits: int = 1, fused: bool = False, times: int = 1) -> torch.Tensor:
    """Run in the interpreting process: the kernel with poisoned buffers, ``times`` times on the same ones."""
    torch.set_num_threads(1)
    from o1lab.attention import workspace

    work = workspace(*given[:3], splits=splits)
    assert isinstance(work, Workspace)
    work.partials.fill_(math.nan)
    work.stats.fill_(math.nan)
    for _ in range(times):
        out = torch.full_like(given[0], math.nan)
        answer = paged_decode(*given, **options, body="triton", workspace=work, fused=fused, out=out)
    return answer


def appended(pages: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Run in the interpreting process: the kernel that appends, or plain indexing where there is none."""
    from o1lab.attention import ops

    ops.append(pages, *rest)
    return pages


@contextmanager
def interpreter() -> Iterator[Callable[..., torch.Tensor]]:
    """A function like :func:`interpret` that runs in a process of its own: Triton decides when it is imported.

    Another ``body`` of this module may be named, to be called with a tuple in place of a call.
    """
    pytest.importorskip("triton", reason="needs the package triton (3.7.1 or later beside numpy 2.4)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        pool.submit(os.getpid).result()  # the child keeps the environment in which it was started
    with pool:
        try:
            pool.submit(interpret, (call := make((1,))).given, call.options).result()
        except Exception as error:
            if "0-dimensional" in str(error):
                pytest.skip(f"this triton's interpreter does not know this numpy: {error}")
            raise

        def run(call: Call | tuple, body: Callable[..., torch.Tensor] | None = None, **how) -> torch.Tensor:
            if body is not None:
                return pool.submit(body, *call, **how).result()
            return pool.submit(interpret, call.given, call.options, **how).result()

        yield run
