"""The command line: ``python -m o1lab doctor | claims | run | report | watch | bench | train | new``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from o1lab import __version__
from o1lab.errors import O1labError

COMMANDS = {
    "doctor": ("o1lab.doctor", "what this machine has, and which claims it can decide"),
    "claims": ("o1lab.claims", "every claim of the article with its decision rule and notebook"),
    "run": ("o1lab.runner", "run one, some or all notebooks headless and write the report"),
    "report": ("o1lab.report", "write a run's report, or compare two runs"),
    "watch": ("o1lab.memory.attach", "sample a running process from outside and say whether its memory trends upwards"),
    "bench": ("o1lab.bench", "measure the parts on this machine: attention, page pool, decode steps, leak probe"),
    "train": ("o1lab.models.train", "train the lab's own models"),
    "new": ("o1lab.new", "start a notebook from the template"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (0 good, 1 a run or check failed, 2 bad input, 130 interrupted)."""
    parser = argparse.ArgumentParser(prog="o1lab", description="A lab for reasoning-inference bottlenecks.")
    parser.add_argument("--version", action="version", version=f"o1lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == asked:  # import only the module that is needed: --help stays instant
            loaded = importlib.import_module(module)
            loaded.configure(command)
            command.set_defaults(call=loaded.command)
    options = parser.parse_args(arguments)
    try:
        return int(options.call(options))
    except O1labError as error:
        print(f"o1lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("o1lab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
