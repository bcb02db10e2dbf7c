"""Train the lab's own models: ``python -m o1lab train --size small --seconds 60 --out runs/reasoner``.

Problems are made on the device and never repeated. Chains grow from a few steps to ``longest``, and the kinds of steps
come in one after the other. A run stopped by Ctrl-C, by the clock of
another program or by an error goes on with ``--resume``; on a CPU with a budget of steps (not of seconds), to the bit.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from o1lab.errors import O1labError, TrainingError
from o1lab.models import TRAINED, WEIGHTS, checkpoint, reasoner
from o1lab.models.operating import EarlyStop, Point
from o1lab.models.training import Config, Run, plain, preset
from o1lab.storage import RunLock, check_writable

if TYPE_CHECKING:
    import plotly.graph_objects as go

LOG, MODEL = "log.jsonl", "model"
LINES = (
    ("#332288", "solid", "circle"),
    ("#117733", "dash", "square"),
    ("#882255", "dot", "diamond"),
    ("#6F4E00", "dashdot", "triangle-up"),
)
"""Colour, dash and symbol by variant."""
SAVE_SECONDS = 60.0
"""A checkpoint is written at each mark, and when this much time has passed since the last."""


@dataclass(frozen=True)
class Trained:
    """How a run ended: ``stopped`` is "done" or "interrupted"; accuracy by variant and N as last measured."""

    folder: Path
    step: int
    tokens: int
    seconds: float
    loss: float
    accuracy: dict[str, dict[str, float]]
    stopped: str


def train(
    config: Config, out: str | Path, *, resume: bool = False, start: str | Path | None = None,
    device: str | torch.device | None = None, say: Callable[[str], Any] = print,
    watch: Callable[[Run], bool] | None = None,
) -> Trained:  # fmt: skip
    """Train until the budget is used; weights, notes, log and checkpoint go to ``out``.

    Parameters
    ----------
    resume : bool
        Go on from the checkpoint in ``out``.
    start : path, optional
        Earlier run, or folder of its model, whose weights to begin from; the notes name it.
    device
        Default: ``"cuda"`` if there is one, else ``"cpu"``.
    say : callable
        Takes a line of progress at each mark.
    watch : callable, optional
        Called after each step; true ends the run there, as done.

    Raises
    ------
    TrainingError
        ``out`` holds another run, its checkpoint is damaged or of other settings, or the loss is not finite: then the
        last good checkpoint is still there.
    """
    from o1lab import models

    folder, device = Path(out), models._device(device)
    if not resume and (folder / checkpoint.FILE).exists():
        raise TrainingError(f"{folder} holds a run already: resume it (--resume), or give another folder")
    if resume and start is not None:
        raise TrainingError("resume goes on from the run's own checkpoint: leave start away, or give another folder")
    run = Run(config, device)
    if resume:
        checkpoint.read(folder, plain(config))  # what is refused is refused before anything is written
    elif start is not None:
        run.begin_from(Path(start))
    check_writable(folder)
    with RunLock(folder), _interruptible() as stop:
        if resume:
            run.restore(folder)
        _trim(folder / LOG, run.step)
        return _loop(run, folder, say, watch or (lambda run: False), stop)


def _loop(
    run: Run, folder: Path, say: Callable[[str], Any], watch: Callable[[Run], bool], stop: threading.Event
) -> Trained:
    before, begin, saved = run.seconds, time.monotonic(), time.monotonic()
    last_step, last_tokens, last_seconds = run.step, run.tokens, run.seconds
    total, marks = torch.zeros(len(run.kinds), device=run.device), run.config.marks
    mark, done = math.floor(run.share * marks) + 1, run.share >= 1
    while not done and not stop.is_set():
        total += run.advance()
        run.seconds = before + time.monotonic() - begin
        done = run.share >= 1 or watch(run)
        at_mark = done or stop.is_set() or run.share * marks >= mark
        if not at_mark and time.monotonic() - saved < SAVE_SECONDS:
            continue
        losses = dict(zip(run.kinds, (total / (run.step - last_step)).tolist(), strict=True))
        if not (all(map(math.isfinite, losses.values())) and run.finite):
            raise TrainingError(
                f"the loss or a weight is not finite between steps {last_step} and {run.step}: take a lower rate than "
                f"{run.config.rate}; the last good checkpoint, if there was one, is in {folder}"
            )
        run.save(folder)
        saved = time.monotonic()
        if not at_mark:
            continue
        speed = (run.tokens - last_tokens) / max(run.seconds - last_seconds, 1e-9)
        row = {
            "step": run.step, "seconds": round(run.seconds, 2), "tokens": run.tokens,
            "loss": round(statistics.fmean(losses.values()), 6),
            "losses": {kind: round(loss, 6) for kind, loss in losses.items()}, "tokens_per_second": round(speed),
            "longest": {kind: run.longest(kind) for kind in run.kinds},
            "difficulty": {kind: round(run.difficulty(kind), 3) for kind in run.kinds},
            "accuracy": run.accuracy(),
        }  # fmt: skip
        with (folder / LOG).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        say(line(row, run.share))
        mark, run.seconds = math.floor(run.share * marks) + 1, before + time.monotonic() - begin
        last_step, last_tokens, last_seconds = run.step, run.tokens, run.seconds
        total.zero_()
    rows = history(folder)
    notes = {
        "config": plain(run.config), "start": run.start, "step": run.step, "tokens": run.tokens,
        "seconds": round(run.seconds, 1), "torch": torch.__version__, "device": _device_name(run.device), "curve": rows,
    }  # fmt: skip
    if not stop.is_set():
        reasoner.save(run.model, folder / MODEL, notes)
    last = rows[-1] if rows else {"loss": math.nan, "accuracy": {}}
    ended = "interrupted" if stop.is_set() else "done"
    return Trained(folder, run.step, run.tokens, run.seconds, last["loss"], last["accuracy"], ended)


def line(row: dict[str, Any], share: float) -> str:
    """A row of the log for a person."""
    by_kind = row["accuracy"].items()
    parts = [
        f"{kind} (N ≤ {row['longest'][kind]}) " + " ".join(f"{n}: {value:.0%}" for n, value in by.items())
        for kind, by in by_kind
    ]
    return (
        f"{share:4.0%} · step {row['step']} · {row['seconds']:.0f} s · loss {row['loss']:.4f} · "
        f"{row['tokens_per_second']:,} tokens/s · whole chains: {', '.join(parts)}"
    )


def history(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's log; a line torn by a crash is left out."""
    path, rows = Path(folder) / LOG, []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(text))
        except ValueError:
            continue
    return rows


def curve(folder: str | Path) -> go.Figure:
    """The learning curve of a run: whole-chain accuracy at the longest trained N, over the tokens seen.

    Raises
    ------
    TrainingError
        The run has not come to its first mark.
    """
    import plotly.graph_objects as go

    from o1lab import plots

    rows = history(folder)
    if not rows:
        raise TrainingError(f"{folder} holds no log of a run that came to its first mark")
    figure, x, last = go.Figure(), [row["tokens"] / 1e6 for row in rows], rows[-1]
    longest = max((int(n) for by in last["accuracy"].values() for n in by), default=0)
    for kind, (colour, dash, symbol) in zip(last["accuracy"], LINES, strict=False):
        y = [100 * row["accuracy"].get(kind, {}).get(str(longest), math.nan) for row in rows]
        figure.add_scatter(
            x=x, y=y, name=kind, mode="lines+markers+text", text=[""] * (len(y) - 1) + [kind],
            textposition="middle right", textfont={"color": colour}, line={"color": colour, "dash": dash, "width": 3},
            marker={"symbol": symbol, "size": 7}, cliponaxis=False,
        )  # fmt: skip
    reached = ", ".join(f"{kind} {by[str(longest)]:.0%}" for kind, by in last["accuracy"].items())
    figure.update_layout(template=plots.TEMPLATE, title_text=f"Chains of {longest} steps right<br>{reached}")
    figure.update_xaxes(title_text="tokens seen (millions)")
    figure.update_yaxes(title_text="whole chains right (%)", range=[-3, 103])
    return figure


def _trim(path: Path, step: int) -> None:
    """Keep the rows of the log up to ``step``; a fresh run starts an empty one."""
    kept = [row for row in history(path.parent) if row["step"] <= step]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual. Only the main thread gets signals."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def first(*_: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def helps() -> dict[str, str]:
    """What the docstring of :class:`Config` says of each setting, in one line.

    >>> helps()["longest"]
    'N_max, the longest trained program.'
    """
    found = {}
    for names, text in re.findall(r"^([\w, ]+) : [^\n]*\n((?:    [^\n]*\n?)+)", inspect.getdoc(Config) or "", re.M):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    told = {name: text.replace("%", "%%").replace("``", "") for name, text in helps().items()}
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--start", metavar="MODEL", help="begin from the weights in this folder, or 'reasoner'")
    parser.add_argument("--device", help="cpu or cuda; default: cuda if there is one")
    parser.add_argument("--until", type=float, metavar="SHARE", help="stop where this share of modular chains is right")
    parser.add_argument("--until-steps", type=int, default=Point.steps, help="N of those chains (default 32)")
    for field in fields(Config):
        option = "--" + field.name.replace("_", "-")
        if field.name == "compiled":
            parser.add_argument(option, action="store_true", default=None, help=told.get(field.name))
        elif field.name == "variants":
            parser.add_argument(option, nargs="+", help=told.get(field.name))
        else:
            parser.add_argument(option, type=type(field.default), help=told.get(field.name))


def command(options: argparse.Namespace) -> int:
    """Train; 0 when the budget is used, 130 when interrupted."""
    asked = (*(field.name for field in fields(Config)), "out", "resume", "start", "device", "until", "until_steps")
    given = {name: getattr(options, name) for name in asked if getattr(options, name) is not None}
    out, resume, device = given.pop("out"), given.pop("resume"), given.pop("device", None)
    start = given.pop("start", None)
    start = WEIGHTS / start if start in TRAINED else start
    until, length = given.pop("until", None), given.pop("until_steps")
    if "variants" in given:
        given["variants"] = tuple(given["variants"])
    config = preset(given.pop("kind", "reasoner"), given.pop("size", "small"), **given)
    watch = EarlyStop(Point(until, steps=length)) if until is not None else None
    say = functools.partial(print, flush=True)
    made = train(config, out, resume=resume, start=start, device=device, say=say, watch=watch)
    if made.stopped == "interrupted":
        print(f"interrupted at step {made.step}; the same command with --resume goes on from {made.folder}")
        return 130
    print(f"done: {made.tokens:,} tokens in {made.seconds:.0f} s; the model is in {made.folder / MODEL}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 when the budget is used, 130 when interrupted, 2 after an error."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m o1lab.models.train", description=about)
    configure(parser)
    try:
        return command(parser.parse_args(arguments))
    except O1labError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
