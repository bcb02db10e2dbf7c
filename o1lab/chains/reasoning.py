"""Chain families of reasoning-gym, through the same interface as the lab's own: problems with a length and a score.

reasoning-gym (https://github.com/open-thought/reasoning-gym) scores final answers only, so an evaluation of these has
no first fault. Where its problems say what lies between, ``states`` has it: after every term of ``chain_sum``, after
every rule that ``string_manipulation`` applies. The package is an extra; problems are the same for the same version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from o1lab.chains.problems import whole
from o1lab.errors import ChainError, UnknownName

EXTRA = "pip install 'o1lab[gym]'"
ASK = "\n\nWork step by step. Give the final answer alone between <answer> and </answer>."
MOST_TRIES = 400
"""Draws per problem wanted, where only problems of exactly the right length are kept."""

SPREAD = 1_000_003
"""Between two seeds: problem i of seed s is drawn from s + i there, so neighbouring seeds would share problems."""


def _both(name: str, shift: int = 0) -> Callable[[int], dict[str, Any]]:
    return lambda steps: {f"min_{name}": steps + shift, f"max_{name}": steps + shift}


def _rewriting(steps: int) -> dict[str, Any]:
    """Rules and letters with which chains of about so many steps are common."""
    rules = min(20, max(3, steps))
    return {**_both("num_rules")(rules), **_both("string_length")(max(10, min(200, steps)))}


TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "chain_sum": lambda steps: {**_both("terms", 1)(steps), "min_digits": 2, "max_digits": 2},
    "string_manipulation": _rewriting,
    "manipulate_matrix": lambda steps: {
        **_both("transforms")(steps), "min_rows": 4, "max_rows": 4, "min_cols": 4, "max_cols": 4, "w_crop": 0,
        "w_remove_every_nth_row": 0, "w_remove_every_nth_col": 0,
    },
    "color_cube_rotation": _both("rotations"),
    "game_of_life": lambda steps: {"simulation_steps": steps, "grid_size_x": 6, "grid_size_y": 6, "filled_cells": 12},
    "ab": lambda steps: {"length": steps},
    "word_sequence_reversal": _both("words"),
}  # fmt: skip
"""What sets the number of steps, by the name of the data set in reasoning-gym."""


@dataclass(frozen=True)
class Puzzle:
    """One problem of reasoning-gym.

    Attributes
    ----------
    id
        ``"chain_sum-16-0-3"``: name, steps, seed, number.
    length
        Steps: terms to add, rules applied, transforms, rotations, generations, tokens or words.
    prompt, answer
        The question with how to mark the answer; the answer expected.
    states
        What the chain is at after every step; empty where reasoning-gym does not tell.
    """

    id: str
    task: str
    length: int
    prompt: str
    answer: str
    states: tuple[str, ...]
    score_answer: Callable[[str], float] = field(repr=False, compare=False)

    def score(self, text: str) -> float:
        """reasoning-gym's score, 0 to 1, of the answer in a model's text; 1 is right, 0 if there is none."""
        found = answer(text)
        return float(self.score_answer(found)) if found else 0.0


def answer(text: str) -> str | None:
    """The answer in ``text``: between the last tags, else after the last ``Answer:``, boxed, or the last line.

    >>> answer("3 + 4 = 7\\n<answer> 7 </answer>"), answer("So\\n**Answer:** 7"), answer("3 + 4 =\\n7"), answer("")
    ('7', '7', '7', None)
    """
    text = re.sub(r"^.*</think>", "", text, flags=re.S)
    for pattern in (
        r"<answer>(.*?)</answer>",
        r"answer\s*(?:is)?\s*:\**(.*)$",
        r"\\boxed\{([^{}]*)\}",
        r"([^\n]+)\s*$",
    ):
        found = re.findall(pattern, text, flags=re.S | re.I)
        if found and found[-1].strip():
            return found[-1].strip().strip("*`").strip()
    return None


def version() -> str:
    """The installed version of reasoning-gym, on which the problems depend; ChainError if it is not there."""
    from importlib.metadata import version as installed

    _gym()
    return installed("reasoning-gym")


def make(task: str, steps: int, n: int, seed: int = 0) -> list[Puzzle]:
    """``n`` problems of ``steps`` steps.

    Parameters
    ----------
    task : str
        A name in :data:`TASKS`.
    steps, n, seed : int
        As :func:`o1lab.chains.make`.

    Raises
    ------
    UnknownName
        No such data set, or none with a length here.
    ChainError
        reasoning-gym is not installed, cannot make that length, or too few problems come out that long.
    """
    if task not in TASKS:
        raise UnknownName("chain family of reasoning-gym", str(task), tuple(TASKS))
    steps, n, seed = whole("steps", steps, 1), whole("n", n, 1), whole("seed", seed, 0)
    exact = task == "string_manipulation"
    size = n * MOST_TRIES if exact else n
    try:
        source = _gym().create_dataset(task, size=size, seed=seed * SPREAD, **TASKS[task](steps))
    except (AssertionError, ValueError, TypeError) as error:
        raise ChainError(f"reasoning-gym makes no {task} of {steps} steps: {error}") from error
    puzzles: list[Puzzle] = []
    for number in range(size):
        entry = source[number]
        states = _states(task, entry["metadata"])
        if not exact or len(states) == steps:
            puzzles.append(_puzzle(f"{task}-{steps}-{seed}-{len(puzzles)}", task, steps, entry, states, source))
        if len(puzzles) == n:
            return puzzles
    raise ChainError(f"only {len(puzzles)} of {n} problems of {task} came out with {steps} steps; ask for fewer steps")


def _puzzle(name: str, task: str, steps: int, entry: dict[str, Any], states: tuple[str, ...], source: Any) -> Puzzle:
    def score(given: str) -> float:
        return source.score_answer(given, entry)

    return Puzzle(name, task, steps, entry["question"].rstrip() + ASK, entry["answer"], states, score)


def _states(task: str, metadata: dict[str, Any]) -> tuple[str, ...]:
    if task == "string_manipulation":
        return tuple(metadata["states"][1:])
    if task != "chain_sum":
        return ()
    first, *signs = metadata["expression"].split()
    total, states = int(first), []
    for sign, term in zip(signs[::2], signs[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        states.append(str(total))
    return tuple(states)


def _gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ChainError(f"reasoning-gym is not installed: {EXTRA}") from error
    return reasoning_gym
