"""Accuracy of a model over LTC-Bench: ``python -m o1lab bench chains [--model reasoner] [--device cuda] [--n 512]``.

Every problem is decoded greedily and replayed; the table has whole chains right by family and length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from o1lab.chains import bench
from o1lab.chains.evaluate import evaluate
from o1lab.chains.report import ChainReport
from o1lab.chains.samples import TASKS
from o1lab.options import ended, new_file, whole
from o1lab.stats import Estimate
from o1lab.storage import write_json


def cells(report: ChainReport) -> dict[tuple[str, int], Estimate]:
    """Share of whole chains right (Wilson) by (family, N), of those that could be scored.

    Examples
    --------
    >>> from o1lab import models
    >>> model = models.load("tiny", device="cpu")
    >>> report = evaluate(model, list(bench.problems(lengths=(8,), n=2)), style="tokens", cap=2, progress=False)
    >>> {cell: share.n for cell, share in cells(report).items()}
    {('arithmetic', 8): 2, ('symbols', 8): 2, ('hops', 8): 2}
    """
    by_task = report.by("task")
    parts = [(task, by_task[task].by_length()) for task in TASKS if task in by_task]
    return {(task, steps): one.accuracy for task, part in parts for steps, one in part.items() if one.scored}


@ended
def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    from o1lab import models

    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m o1lab bench chains", description=about)
    parser.add_argument("--model", default="reasoner", help="name, folder, Hugging Face id or http://…/v1 (reasoner)")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--n", type=whole(1), default=bench.PER_CELL, help="problems of each family and length (512)")
    parser.add_argument("--lengths", type=whole(1), nargs="+", default=bench.LENGTHS, help="N (8 … 256)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--out", help="JSON lines of the results; a run that was stopped goes on from them")
    parser.add_argument("--json", type=new_file, help="also write the figures into this file")
    options = parser.parse_args(argv)
    model = models.load(options.model, device=options.device, dtype=options.dtype)
    asked = [one for task in options.tasks for one in bench.problems(task, lengths=options.lengths, n=options.n)]
    report = evaluate(model, asked, out=options.out)
    found = cells(report)
    print(f"{report}\n\n{'N':>5}" + "".join(f"  {task:<32}" for task in options.tasks))
    for steps in options.lengths:
        print(f"{steps:>5}" + "".join(f"  {found.get((task, steps), '–')!s:<32}" for task in options.tasks))
    if options.json:
        content: dict[str, Any] = {"model": options.model, "seconds": report.seconds, "problems": len(asked)}
        content["right"] = {f"{task} {steps}": share.to_dict() for (task, steps), share in found.items()}
        write_json(options.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
