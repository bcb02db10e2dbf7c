"""Typed errors. Each message names the thing that is wrong and the way out; nothing else prints for the user."""

from __future__ import annotations


class O1labError(Exception):
    """Base of every error that o1lab raises on purpose; the command line prints it in one line and exits with 2."""


class UnknownName(O1labError):
    """A notebook, preset, parameter, claim or model name that does not exist; the message lists the near ones."""

    def __init__(self, kind: str, name: str, known: list[str] | tuple[str, ...] = (), hint: str = "") -> None:
        import difflib

        self.kind, self.name, self.known = kind, name, list(known)
        near = difflib.get_close_matches(name, self.known, n=3, cutoff=0.5) or self.known[:12]
        parts = [f"unknown {kind} {name!r}"]
        if near:
            parts.append(
                "did you mean " + " or ".join(near)
                if len(near) <= 3
                else "known: " + ", ".join(near) + self._more(near)
            )
        if hint:
            parts.append(hint)
        super().__init__("; ".join(parts))

    def _more(self, shown: list[str]) -> str:
        rest = len(self.known) - len(shown)
        return f" and {rest} more" if rest > 0 else ""


class ClaimsError(O1labError):
    """``claims.toml`` cannot be used: unknown metric or key, a rule that cannot be decided, a duplicate id."""


class EstimateError(O1labError, ValueError):
    """A number that is no estimate: bounds out of order, not finite, no sample size, a unit that does not fit."""


class ResultsError(O1labError):
    """The results folder cannot be used: not writable, disk full, or another run is writing to it."""


class RecordError(O1labError):
    """A record is missing, truncated, altered, of another run, or of a newer schema."""


class RunError(O1labError):
    """A notebook did not finish: exception, timeout, dead kernel, interrupted, or no whole record at its end."""


class ModelError(O1labError):
    """A model cannot be loaded: unknown id offline, gated, wrong format, no room, or a missing extra."""


class ProbeError(O1labError):
    """A leak probe cannot judge what it was given; the message says what to change."""


class NotebookError(O1labError):
    """A new notebook cannot be made: its name or number does not fit or is taken, or the template is damaged."""


class ChainError(O1labError, ValueError):
    """A chain problem cannot be made, read or continued as asked; the message names the value."""


class DecodingError(O1labError):
    """An intervention does not fit this model or cache; the message says what it needs."""


class EndpointError(ModelError):
    """An endpoint refused, timed out or answered nonsense; the message says which and what was tried."""


class TrainingError(O1labError):
    """A training run cannot start, go on or be resumed; the message says why."""


class CacheError(O1labError):
    """A paged cache cannot be made for this model and pool, or used as asked; the message names the value."""
