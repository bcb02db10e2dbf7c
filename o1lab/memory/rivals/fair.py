"""Two cases in the form in which a tool that is made for them can see them.

``native_new`` stands in for the catalogue's native leak, whose plant calls the ``malloc`` that ``dlsym`` finds. memray
redirects calls between libraries and does not see that one; it sees ``operator new`` calling ``malloc``, which is how
the real leak took its memory. ``device_cycle`` is a reference cycle on the device, for torch's finder of such cycles.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
from collections.abc import Iterator

from o1lab.errors import ProbeError
from o1lab.memory.catalogue import Step, load


def _native_new(leak: bool) -> Iterator[Step]:
    """An operator in C++ makes a 48-byte string per call and never deletes it. Cure: delete it."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError as error:
        raise ProbeError(f"this case needs libstdc++ ({error})") from error
    new, delete = library._Znwm, library._ZdlPv
    new.restype, new.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    delete.restype, delete.argtypes = None, [ctypes.c_void_p]
    last = 0

    def step(number: int) -> None:
        nonlocal last
        block = new(48)
        ctypes.memset(block, 1, 48)
        if leak:  # the block's first word links to the one before, so that the end can free them all
            ctypes.c_size_t.from_address(block).value, last = last, block
        else:
            delete(block)

    yield step
    while last:
        block, last = last, ctypes.c_size_t.from_address(last).value
        delete(block)


native_new = dataclasses.replace(load("native_string"), name="native_new", build=_native_new, note="")


def _device_cycle(leak: bool) -> Iterator[Step]:
    """A module that refers to itself waits for the collector with its weight on the device. Cure: no such cycle."""
    import torch

    class Block:
        def __init__(self) -> None:
            self.weight = torch.ones(64, 1024, device="cuda")
            self.me = self if leak else None

    yield lambda number: None if Block().weight is None else None


device_cycle = dataclasses.replace(
    load("reference_cycle"), name="device_cycle", what=str(_device_cycle.__doc__), where="cuda", build=_device_cycle
)
