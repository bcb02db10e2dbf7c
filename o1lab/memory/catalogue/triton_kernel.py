"""The kernel of ``constexpr_per_value``; Triton wants it at the top of a module, so only that case imports this one."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # CPU builds of torch come without it; the case that needs the kernel runs on CUDA only
    triton = None

if triton is not None:

    @triton.jit
    def scale(x, SIZE: tl.constexpr, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
        """Multiply ``SIZE`` values at ``x`` by ``TIMES``: one kernel per pair of values."""
        at = x + tl.arange(0, SIZE)
        tl.store(at, tl.load(at) * TIMES)
