"""Read snapshot pickles without trusting them: a machine that can only build plain values.

A pickle is a program. Python's own unpickler runs all of it and lets a subclass refuse what it imports; memory can
still be had by one opcode that announces a huge memo or byte array. Here the program is run by a loop that knows the
opcodes which ``pickle.dump`` writes for dictionaries, lists, tuples, text, bytes, numbers, booleans and ``None``
(protocols 2 to 5) and nothing else. No name is ever imported, so no code of the file can run.

Source: CPython ``Lib/pickletools.py`` (opcodes), torch ``cuda.memory._dump_snapshot`` (what the files hold).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

from o1lab.errors import ProbeError

MOST_BYTES = 1 << 29
"""Bytes of a file that are read at most, unpacked: a dump of 10⁵ entries with stacks has about 3 × 10⁷."""
MOST_STEPS, MOST_CONTAINERS = 40_000_000, 6_000_000
"""Opcodes and containers (memo entries too) of one file: room for 8 × 10⁵ entries with stacks, 3 GB at worst."""
LONGEST_INTEGER = 16
"""Bytes of an integer: addresses and sizes need 9."""

_DANGEROUS = {
    "c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "o": "OBJ", "i": "INST", "\x81": "NEWOBJ",
    "\x92": "NEWOBJ_EX", "b": "BUILD", "P": "PERSID", "Q": "BINPERSID", "\x82": "EXT1", "\x83": "EXT2",
    "\x84": "EXT4", "\x96": "BYTEARRAY8", "\x97": "NEXT_BUFFER",
}  # fmt: skip


class TraceFileError(ProbeError):
    """A trace file that cannot be read: missing, truncated, too large, or of another form."""


class HostileFile(TraceFileError):
    """A pickle that asks for more than plain values: it would run code or take memory out of proportion."""


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The file's bytes, unpacked if it is gzip; refused beyond ``most`` bytes, also when only unpacking gets there.

    Raises
    ------
    TraceFileError
        No such file, damaged gzip, or too large.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(2)
            file.seek(0)
            data = (gzip.GzipFile(fileobj=file) if head == b"\x1f\x8b" else file).read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceFileError(f"{path}: {error}; give a snapshot that _dump_snapshot or Trace.save wrote") from error
    if len(data) > most:
        raise TraceFileError(f"{path} has more than {most} bytes; record fewer entries (max_entries) or no stacks")
    return data


def plain(data: bytes) -> Any:
    """The value of a pickle made of plain containers and scalars only.

    Parameters
    ----------
    data : bytes
        A pickle of protocol 2 to 5.

    Raises
    ------
    HostileFile
        It names a global, a reduction, a persistent id, an extension or a buffer, or is out of proportion.
    TraceFileError
        It is truncated or no pickle of these protocols.

    Examples
    --------
    >>> import pickle
    >>> plain(pickle.dumps({"segments": [(0, 1)], "device_traces": [[]]}))
    {'segments': [(0, 1)], 'device_traces': [[]]}
    """
    if len(data) < 3 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise TraceFileError("this is no pickle of protocol 2 to 5, which torch.cuda.memory._dump_snapshot writes")
    try:
        return _run(data)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise TraceFileError(f"the pickle is truncated or damaged: {error}") from error
    except KeyError as error:
        raise TraceFileError(f"the pickle is damaged: it reads memo entry {error}, which nothing wrote") from error
    except TypeError as error:  # an opcode met a value of another kind than it works on
        raise TraceFileError(f"the pickle is damaged: {error}") from error


def _run(data: bytes) -> Any:  # one flat loop over opcodes: a call per opcode would double the time
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    unpack, at, steps, containers, length = struct.unpack_from, 0, 0, 0, len(data)
    while True:
        op = data[at]
        at += 1
        steps += 1
        if op == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[unpack("<I", data, at)[0]])
            at += 4
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
            containers += 1
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op == 0x4A:  # BININT
            stack.append(unpack("<i", data, at)[0])
            at += 4
        elif op == 0x4D:  # BININT2
            stack.append(unpack("<H", data, at)[0])
            at += 2
        elif op in (0x8A, 0x8B):  # LONG1, LONG4
            size, wide = (data[at], 1) if op == 0x8A else (unpack("<I", data, at)[0], 4)
            if size > LONGEST_INTEGER:
                raise HostileFile(f"the pickle holds an integer of {size} bytes; addresses and sizes need 9")
            at += wide
            stack.append(int.from_bytes(_take(data, at, size), "little", signed=True))
            at += size
        elif op == 0x28:  # MARK
            marks.append(len(stack))
        elif op == 0x75:  # SETITEMS
            begin = marks.pop()
            _set(stack[begin - 1], stack[begin:])
            del stack[begin:]
        elif op == 0x65:  # APPENDS
            begin = marks.pop()
            _list(stack[begin - 1]).extend(stack[begin:])
            del stack[begin:]
        elif op in (0x7D, 0x5D, 0x29):  # EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE
            containers += 1
            stack.append({} if op == 0x7D else [] if op == 0x5D else ())
        elif op in (0x85, 0x86, 0x87):  # TUPLE1 to TUPLE3
            containers += 1
            count = op - 0x84
            if len(stack) < count:
                raise IndexError("a tuple of more values than there are")
            stack[-count:] = [tuple(stack[-count:])]
        elif op == 0x74:  # TUPLE
            containers += 1
            begin = marks.pop()
            stack[begin:] = [tuple(stack[begin:])]
        elif op in _TEXT:
            code, kind = _TEXT[op]
            size = unpack(code, data, at)[0]
            at += struct.calcsize(code)
            raw = _take(data, at, size)
            stack.append(raw.decode("utf-8", "surrogatepass") if kind == "text" else raw)
            at += size
        elif op == 0x61:  # APPEND
            value = stack.pop()
            _list(stack[-1]).append(value)
        elif op == 0x73:  # SETITEM
            pair = stack[-2:]
            del stack[-2:]
            _set(stack[-1], pair)
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            stack.append(op == 0x88)
        elif op == 0x47:  # BINFLOAT
            stack.append(unpack(">d", data, at)[0])
            at += 8
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x72:  # LONG_BINPUT: an entry of a dictionary here, so a huge index costs nothing
            memo[unpack("<I", data, at)[0]] = stack[-1]
            at += 4
        elif op == 0x95:  # FRAME
            if unpack("<Q", data, at)[0] > length - at - 8:
                raise TraceFileError("the pickle is truncated: a frame is longer than the rest of the file")
            at += 8
        elif op == 0x80:  # PROTO
            at += 1
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise TraceFileError("the pickle is damaged: it does not end with one value")
            return stack[0]
        else:
            name = _DANGEROUS.get(chr(op))
            if name is not None:
                raise HostileFile(f"the pickle holds {name} at byte {at - 1}: it would build objects or run code")
            raise TraceFileError(f"the pickle holds opcode {op:#04x} at byte {at - 1}, which no snapshot has")
        if steps > MOST_STEPS or containers > MOST_CONTAINERS:
            raise HostileFile(f"the pickle builds more than {MOST_CONTAINERS} containers; record fewer entries")


_TEXT = {
    0x8C: ("<B", "text"), 0x58: ("<I", "text"), 0x8D: ("<Q", "text"),
    0x43: ("<B", "bytes"), 0x42: ("<I", "bytes"), 0x8E: ("<Q", "bytes"),
}  # fmt: skip


def _take(data: bytes, at: int, size: int) -> bytes:
    if size > len(data) - at:
        raise TraceFileError("the pickle is truncated: a value is longer than the rest of the file")
    return data[at : at + size]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"it appends to a {type(value).__name__}")
    return value


def _set(target: Any, flat: list[Any]) -> None:
    if type(target) is not dict or len(flat) % 2:
        raise TypeError(f"it sets {len(flat)} values in pairs on a {type(target).__name__}")
    for key in flat[::2]:
        if type(key) is not str:  # text is hashed with a secret: no file can make its keys collide
            raise HostileFile(f"the pickle holds a dictionary keyed by {type(key).__name__}; a snapshot's are text")
    target.update(zip(flat[::2], flat[1::2], strict=True))
