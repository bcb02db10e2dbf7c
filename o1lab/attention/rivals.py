"""One decode workload and every way to answer it, each as a function without arguments that can be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from o1lab.attention import flex, launch, reference, splits
from o1lab.attention.checks import Problem, problem
from o1lab.attention.dispatch import paged_decode, workspace
from o1lab.attention.traffic import Workload

if TYPE_CHECKING:
    from torch import Tensor

Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Random pages in shuffled order, every sequence at full length, and the same keys and values contiguous."""

    work: Workload
    q: Tensor
    pages: Tensor
    table: Tensor
    lengths: Tensor
    bias: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def make(cls, work: Workload, dtype: Any, device: Any, page_tokens: int = 64, seed: int = 0) -> Case:
        """Draw a case; ``tokens`` must be a multiple of ``page_tokens``."""
        import torch

        random = torch.Generator(device=device).manual_seed(seed)
        each = work.tokens // page_tokens
        count = work.batch * each
        shape = (count, 2, page_tokens, work.kv_heads, work.head_dim)
        pages = torch.empty(shape, dtype=dtype, device=device).normal_(generator=random)
        order = torch.randperm(count, device=device, generator=random)
        q = torch.empty((work.batch, work.q_heads, work.head_dim), dtype=dtype, device=device).normal_(generator=random)
        bias = -0.3 * torch.arange(work.tokens, 0, -1, device=device).float().log().expand(work.batch, -1).contiguous()
        flat = pages[order].unflatten(0, (work.batch, each)).movedim(2, 0)  # (2, B, n, T, Hkv, D)
        keys, values = flat.flatten(2, 3).transpose(2, 3).contiguous()
        lengths = torch.full((work.batch,), work.tokens, dtype=torch.int32, device=device)
        return cls(work, q, pages, order.view(work.batch, each).int(), lengths, bias, keys, values)

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What :func:`o1lab.attention.paged_decode` takes first."""
        return self.q, self.pages, self.table, self.lengths

    @property
    def sizes(self) -> Problem:
        """The sizes of the call."""
        return problem(*self.given)

    def exact(self, bias: bool = False) -> Tensor:
        """The float64 answer (B, Hq, D), one sequence at a time."""
        import torch

        out = []
        for row in range(self.work.batch):
            one = slice(row, row + 1)
            given = (self.q[one].double()[:, :, None], self.pages, self.table[one], self.lengths[one])
            added = self.bias[one] if bias else None
            out.append(reference.exact(*given, replace(self.sizes, batch=1), self.work.head_dim**-0.5, added)[:, :, 0])
        return torch.cat(out)


def three_stages(case: Case) -> Tensor:
    """Q·Kᵀ, softmax, ·V as three kernels: what the article's fused kernel replaces."""
    import torch

    work = case.work
    q = case.q.view(work.batch, work.kv_heads, -1, work.head_dim)
    scores = (q @ case.keys.transpose(-1, -2)) * work.head_dim**-0.5
    return (torch.softmax(scores, -1) @ case.values).reshape(case.q.shape)


def sdpa(case: Case, backend: str | None = None, *, bias: bool = False) -> Step:
    """SDPA on the contiguous copy; ``backend`` as a name of ``torch.nn.attention.SDPBackend``."""
    from contextlib import nullcontext

    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q = case.q[:, :, None]
    mask = case.bias[:, None, None].to(q.dtype) if bias else None

    def step() -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
            return scaled_dot_product_attention(q, case.keys, case.values, attn_mask=mask, enable_gqa=True)[:, :, 0]

    return step


def kernel_step(case: Case, *, bias: bool = False, fused: bool = False, number: int | None = None,
                shape: splits.Blocks | None = None, head_major: bool = False) -> Step:  # fmt: skip
    """The Triton kernel with its buffers made beforehand; ``head_major`` stores pages as (P, 2, Hkv, T, D)."""
    import torch

    work, out, sizes = workspace(case.q, case.pages, case.table, splits=number), torch.empty_like(case.q), case.sizes
    pages = case.pages.transpose(2, 3).contiguous().transpose(2, 3) if head_major else case.pages
    added, scale = case.bias if bias else None, case.work.head_dim**-0.5

    def step() -> Tensor:
        given = (case.q, pages, case.table, case.lengths, sizes, scale, added, None, out, work)
        launch.decode(*given, shape=shape, fused=fused)
        return out

    return step


def flex_step(case: Case) -> Step:
    """Compiled FlexAttention over the pages, its mask made beforehand."""
    scale, (mask, logical) = case.work.head_dim**-0.5, flex.block_mask(case.table, case.lengths, case.sizes)
    q = case.q[:, :, None]
    return lambda: flex.masked(q, case.pages, case.lengths, case.sizes, scale, None, mask, logical)[:, :, 0]


def rivals(case: Case) -> dict[str, Step]:
    """Name → step, ours first. On a CPU, what a CPU has."""
    found: dict[str, Step] = {}
    cuda = case.q.device.type == "cuda"
    if cuda and not launch.missing(case.q.device):
        found["paged kernel"] = kernel_step(case)
        found["paged kernel, bias"] = kernel_step(case, bias=True)
        found["paged kernel, merged within"] = kernel_step(case, fused=True)
        found["paged kernel, head-major pages"] = kernel_step(case, head_major=True)
    found["gather + SDPA"] = lambda: paged_decode(*case.given, body="gather", check=False)
    found["gather + SDPA, bias"] = lambda: paged_decode(*case.given, bias=case.bias, body="gather", check=False)
    if cuda:
        found["SDPA flash, contiguous"] = sdpa(case, "FLASH_ATTENTION")
        found["SDPA cuDNN, contiguous"] = sdpa(case, "CUDNN_ATTENTION")
        if not flex.unsupported(case.sizes, case.pages):
            found["FlexAttention over pages"] = flex_step(case)
    else:
        found["SDPA, contiguous"] = sdpa(case)
    found["three stages, contiguous"] = lambda: three_stages(case)
    return found
