"""What a compiled kernel takes of a multiprocessor: registers, spills, shared memory, and the warps that then fit."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from o1lab.attention.checks import AttentionError
from o1lab.attention.splits import Blocks, blocks, power_of_two


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor has; the defaults are Hopper's (compute capability 9.0)."""

    registers: int = 65536
    shared_bytes: int = 233472
    threads: int = 2048
    programs: int = 32

    @classmethod
    def of(cls, device: Any) -> Multiprocessor:
        """Read from a CUDA device, where torch tells."""
        import torch

        found = torch.cuda.get_device_properties(device)
        return cls(
            getattr(found, "regs_per_multiprocessor", cls.registers),
            getattr(found, "shared_memory_per_multiprocessor", cls.shared_bytes),
            getattr(found, "max_threads_per_multi_processor", cls.threads),
        )


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one compiled kernel. ``spilled_bytes`` is local memory per thread; anything but 0 costs traffic.

    Examples
    --------
    >>> Resources(registers=128, spilled_bytes=0, shared_bytes=71680, warps=4).warps_per_sm()
    12
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int

    def programs_per_sm(self, sm: Multiprocessor = Multiprocessor()) -> int:
        """Programs that fit by registers (given out by 8 a thread), shared memory (1 KiB lost each) and threads."""
        by_registers = sm.registers // (-(-self.registers // 8) * 8 * 32 * self.warps)
        by_shared = sm.shared_bytes // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, sm.threads // (32 * self.warps), sm.programs)

    def warps_per_sm(self, sm: Multiprocessor = Multiprocessor()) -> int:
        """Warps that fit at once; the article asks for two or more."""
        return self.programs_per_sm(sm) * self.warps


def resources(compiled: Any) -> Resources:
    """Of a kernel that ran: what :func:`o1lab.attention.launch.decode` returned on a CUDA device."""
    registers, spills = getattr(compiled, "n_regs", None), getattr(compiled, "n_spills", None)
    if registers is None or spills is None:
        raise AttentionError("this kernel was not loaded on a device, so its registers are not known; run it first")
    return Resources(registers, 4 * spills, compiled.metadata.shared, compiled.metadata.num_warps)


def compile_for(
    capability: int = 90, *, dtype: str = "bf16", head_dim: int = 128, group: int = 4, page_tokens: int = 64,
    splits: int = 6, bias: bool = False, quantised: bool = False, fused: bool = False, shape: Blocks | None = None,
) -> Resources:  # fmt: skip
    """Compile the kernel for a GPU that need not be here, and read its resources from the machine code.

    Needs triton with its own ``ptxas`` and ``cuobjdump``, and no TRITON_INTERPRET. Strides are taken as multiples of
    16, as they are for the pool's pages.

    Parameters
    ----------
    dtype : {"bf16", "fp16", "fp32"}
        Type of the queries; pages are int8 if ``quantised``.

    Raises
    ------
    AttentionError
        Triton or its ``cuobjdump`` is not installed.
    """
    _triton()
    import triton.language as tl

    from o1lab.attention import kernel

    wide = 4 if dtype == "fp32" else 2
    shape = shape or blocks(1 if quantised else wide, wide, head_dim)
    two = power_of_two(splits)
    product = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype]
    mixed = quantised and dtype != "fp32"
    constants: dict[str, Any] = {
        "GROUP": group, "BLOCK_M": max(16, power_of_two(group)), "D": head_dim, "T": page_tokens,
        "BLOCK_D": power_of_two(max(head_dim, 16)), "BLOCK_N": shape.block_n, "SPLITS": splits, "SPLITS_2": two,
        "CHUNK": min(32, two), "HAS_BIAS": bias, "QUANTISED": quantised, "FUSED": fused, "DOT_K": product,
        "DOT_V": tl.bfloat16 if mixed else product, "PRECISION": "tf32x3" if quantised and not mixed else "ieee",
        "OVERLAP": False,
    }  # fmt: skip
    pointers = dict.fromkeys(("scales", "bias", "partials", "stats"), "fp32") | dict.fromkeys(("q", "out"), dtype)
    pointers |= dict.fromkeys(("table", "lengths", "arrivals"), "i32") | {"pages": "i8" if quantised else dtype}
    aligned = (*pointers, "q_batch", "q_head", "page", "side", "token", "head")
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return compiled(kernel.decode, constants, pointers, aligned, options, capability, qk_scale="fp32")[0]


def compiled(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], aligned: Iterable[str], options: dict[str, Any],
    capability: int = 90, **scalars: str,
) -> tuple[Resources, dict[str, Any]]:  # fmt: skip
    """Compile any Triton kernel for a GPU that need not be here; its resources and the code by stage (``"ptx"``, …).

    Parameters
    ----------
    constants : dict
        Its compile-time constants.
    pointers, **scalars : str
        Types of its pointers and of scalars that are no ``"i32"``, by name.
    aligned : iterable of str
        Arguments that are multiples of 16.

    Raises
    ------
    AttentionError
        Triton or its ``cuobjdump`` is not installed.
    """
    tool = _triton()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: scalars.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr") | {name: f"*{one}" for name, one in pointers.items()}
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, hints)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if not found:
        raise AttentionError(f"cuobjdump named no registers: {said[:200]!r}")
    return Resources(int(found[1]), int(found[2]), built.metadata.shared, options["num_warps"]), dict(built.asm)


def _triton() -> Path:
    """Where Triton's ``cuobjdump`` is."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise AttentionError("compiling needs the package triton, which is not installed")
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        raise AttentionError(f"registers are read with cuobjdump, which this triton ({triton.__version__}) lacks")
    return tool
