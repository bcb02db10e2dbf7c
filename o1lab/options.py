"""Options of the benches: each value is looked at before anything runs, and what is wrong ends in one line and a 2."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from o1lab.errors import O1labError

Main = Callable[[Sequence[str] | None], int]


def ended(main: Main) -> Main:
    """Let ``main`` print a typed error in one line and return 2, as the command line does."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except O1labError as error:
            print(f"o1lab: {error}", file=sys.stderr)
            return 2

    return run


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Whole numbers from ``least`` to ``most``.

    Examples
    --------
    >>> whole(1)("8")
    8
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            end = "" if most is None else f", at most {most:,}"
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least {least}{end}")
        return value

    return read


def seconds(text: str) -> float:
    """A time above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds, above 0")
    return value


def device(text: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:1``, if this machine has it."""
    import torch

    kind, _, number = text.partition(":")
    if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdecimal())):
        raise argparse.ArgumentTypeError(f"{text!r}: give cpu, cuda or cuda:1")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no CUDA device here; give cpu")
    if number and int(number) >= (count := torch.cuda.device_count()):
        raise argparse.ArgumentTypeError(f"{text!r}: there are {count} CUDA devices here, cuda:0 to cuda:{count - 1}")
    return text


def new_file(text: str) -> Path:
    """A file that can be written when the figures are there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file that can")
    return path


def settings(text: str) -> dict[str, Any]:
    """A JSON object.

    Examples
    --------
    >>> settings('{"max_autotune_gemm": true}')
    {'max_autotune_gemm': True}
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: give a JSON object, such as '{{\"max_autotune_gemm\": true}}'")
    return found
