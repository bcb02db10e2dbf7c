"""Bytes of device memory that each way to attend must move, by arithmetic: what a profiler's counters are held against.

Every tensor counts once for each kernel that reads or writes it. What the L2 cache keeps from one kernel to the next is
not subtracted; what several programs of one kernel read together is taken to come from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Attention of ``queries`` new tokens for each of ``batch`` sequences of ``tokens``; 1 query is decode.

    Examples
    --------
    >>> decode, prefill = Workload(8, 16384), Workload(1, 8192, queries=8192)
    >>> decode.kv_bytes
    536870912
    >>> [f"{1 - work.fused() / work.three_stage():.1%}" for work in (decode, prefill)]  # what fusing saves
    ['5.9%', '99.0%']
    """

    batch: int
    tokens: int
    queries: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """Keys and values, once."""
        return 2 * self.batch * self.tokens * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def io_bytes(self) -> int:
        """Queries in, outputs out."""
        return 2 * self.batch * self.queries * self.q_heads * self.head_dim * self.element_bytes

    @property
    def score_bytes(self) -> int:
        """One score matrix of every head, in the tensors' type."""
        return self.batch * self.q_heads * self.queries * self.tokens * self.element_bytes

    def fused(self, splits: int = 1, bias: bool = False, page_tokens: int = 64) -> int:
        """One pass over pages: K, V, the block table, a bias; with several splits their partial results twice."""
        table = self.batch * -(-self.tokens // page_tokens) * 4
        added = self.batch * self.tokens * 4 * bias
        rows = self.batch * self.q_heads * self.queries
        between = 2 * rows * splits * (self.head_dim + 1) * 4 if splits > 1 else 0
        return self.kv_bytes + self.io_bytes + table + added + between

    def gathered(self) -> int:
        """Pages copied together (read, written), then a fused kernel on the copy (read)."""
        return 3 * self.kv_bytes + self.io_bytes

    def three_stage(self) -> int:
        """Q·Kᵀ, softmax and ·V as three kernels on contiguous K and V: scores and weights written and read."""
        return self.kv_bytes + self.io_bytes + 4 * self.score_bytes


def passes(works: dict[str, Workload]) -> str:
    """A table of the bytes that each way moves, in passes over keys and values.

    Examples
    --------
    >>> print(passes({"8x16384": Workload(8, 16384)}).splitlines()[1])
    8x16384                        512     1.000         1.063          3.000
    """
    lines = [f"{'sequences x tokens':<20}{'K and V, MiB':>14}{'one pass':>10}{'three stages':>14}{'gather + SDPA':>15}"]
    for text, work in works.items():
        moved = (work.fused(), work.three_stage(), work.gathered())
        one, three, gather = (f"{count / work.kv_bytes:.3f}" for count in moved)
        lines.append(f"{text:<20}{work.kv_bytes / 2**20:>14,.0f}{one:>10}{three:>14}{gather:>15}")
    return "\n".join(lines)
