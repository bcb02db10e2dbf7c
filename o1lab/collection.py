"""The notebooks as a collection: which there are, what a person may call them, and which parameters they take."""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from o1lab import paths
from o1lab.errors import RunError, UnknownName

NUMBERED = re.compile(r"\d\d_")
UNKNOWN = object()
"""Default of a parameter that is no literal: any value may replace it."""


def names() -> list[str]:
    """Every notebook in the folder, numbered ones first.

    Raises
    ------
    RunError
        If the folder holds no notebook.
    """
    found = sorted(path.stem for path in paths.notebooks().glob("*.ipynb"))
    if not found:
        raise RunError(f"no notebooks in {paths.notebooks()}; set O1LAB_NOTEBOOKS to the folder that holds them")
    return sorted(found, key=lambda name: (not NUMBERED.match(name), name))


def resolve(asked: Iterable[str]) -> list[str]:
    """Turn what a person typed into notebook names: a name, its number, or a unique beginning; nothing means all.

    ``_template`` and unnumbered notebooks run only when named.

    Raises
    ------
    UnknownName
        If a word fits no notebook, or more than one.
    """
    known = names()
    asked = list(asked)
    if not asked:
        return [name for name in known if NUMBERED.match(name)]
    chosen: list[str] = []
    for word in asked:
        name = word.removesuffix(".ipynb").rsplit("/", 1)[-1]
        fitting = [name] if name in known else [item for item in known if name and item.startswith(name)]
        if len(fitting) > 1:
            raise UnknownName("notebook", word, fitting, "it fits more than one: type more of the name")
        if not fitting:
            raise UnknownName("notebook", word, known, "`python -m o1lab run --list` lists them")
        chosen += [item for item in fitting if item not in chosen]
    return chosen


def parameters(notebook: str) -> dict[str, Any]:
    """Parameters of a notebook with their default values, read without running it.

    papermill's own reader is used, below ``inspect_notebook``, which refuses a notebook stripped of its language.

    Raises
    ------
    RunError
        If the file is no readable notebook.
    """
    defaults: dict[str, Any] = {}
    for parameter in _inspected(notebook):
        try:
            defaults[parameter.name] = ast.literal_eval(parameter.default)
        except (ValueError, SyntaxError):
            defaults[parameter.name] = UNKNOWN
    return defaults


def _inspected(notebook: str) -> list[Any]:
    """papermill's view of each parameter: its name, its default as text, and the comment behind it."""
    import nbformat
    from papermill.translators import PythonTranslator

    path = paths.notebooks() / f"{notebook}.ipynb"
    try:
        book = nbformat.read(path, as_version=4)
        tagged = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", []))
        cell = next(tagged, None)
        return PythonTranslator.inspect(cell) if cell is not None else []
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise RunError(f"{path} is no usable notebook ({type(error).__name__}); restore it from git") from error


def from_here(notebook: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with paths made absolute from the caller's folder, as a kernel runs in the notebooks' folder.

    A path is what the notebook's comment gives the unit ``[path]``, and any other text such as ``./model`` that names
    a folder here.
    """
    texts = {name: value for name, value in values.items() if isinstance(value, str) and value}
    units = {parameter.name: str(parameter.help) for parameter in _inspected(notebook)} if texts else {}
    found = dict(values)
    for name, value in texts.items():
        absolute = os.path.abspath(os.path.expanduser(value))
        looks_like_one = os.path.dirname(value) or value[0] in "~."
        if units.get(name, "").startswith("[path]") or (looks_like_one and os.path.isdir(absolute)):
            found[name] = absolute
    return found


def assign(chosen: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Give each notebook those of the ``given`` parameters that it has, checked against its defaults.

    Parameters
    ----------
    chosen : mapping
        Parameters with defaults by notebook, from :func:`parameters`.
    given : mapping
        Values by parameter name; a text is read as the literal that the default's type asks for.

    Raises
    ------
    UnknownName
        If none of the chosen notebooks has a parameter of that name.
    RunError
        If a value has another type than the default.

    Examples
    --------
    >>> assign({"01_memory_leak": {"requests": 100, "model": "tiny"}}, {"requests": "250"})
    {'01_memory_leak': {'requests': 250}}
    """
    every = list(dict.fromkeys(name for defaults in chosen.values() for name in defaults))
    for name in given:
        if name not in every:
            raise UnknownName(f"parameter of {', '.join(chosen)}", name, every, "nothing was run")
    return {
        notebook: {
            name: _typed(notebook, name, value, defaults[name]) for name, value in given.items() if name in defaults
        }
        for notebook, defaults in chosen.items()
    }


def _typed(notebook: str, name: str, value: Any, default: Any) -> Any:
    """Check one value against the default; an int may stand for a float, nothing else for another type."""
    if isinstance(value, str) and not isinstance(default, str):
        words = {"true": "True", "false": "False", "none": "None"}
        with contextlib.suppress(ValueError, SyntaxError):  # else a text, and the check below says what was wanted
            value = ast.literal_eval(words.get(value.strip().lower(), value.strip()))
    if default is UNKNOWN or default is None or type(value) is type(default):
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    wanted = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a text"}
    kind = wanted.get(type(default).__name__, f"a {type(default).__name__}")
    raise RunError(f"parameter {name}={value!r} of {notebook} must be {kind}, like its default {default!r}")
