"""Start a notebook from the template: ``python -m o1lab new 05_my_question``."""

from __future__ import annotations

import argparse
import re
import secrets
from pathlib import Path

from o1lab import paths
from o1lab.errors import NotebookError
from o1lab.records import atomic_write

NAME = re.compile(r"[0-9]{2}(_[a-z0-9]+)+")
TEMPLATE = "_template"


def new(name: str, title: str | None = None, folder: Path | None = None) -> Path:
    """Copy the template under a new name: number, title and cell ids are new, nothing else is.

    Parameters
    ----------
    name : str
        ``NN_snake_case``: two digits, then lower-case words; the number must be free.
    title : str, optional
        What follows the number in the first heading, beginning with a verb; default: ``Measure`` and the name's words.
    folder : Path, optional
        Folder of the notebooks; default: the lab's.

    Returns
    -------
    Path
        The notebook that was written.

    Raises
    ------
    NotebookError
        The name does not follow the pattern or is taken, the title is no single line, or the template is missing.

    Examples
    --------
    >>> new("My Question")
    Traceback (most recent call last):
    ...
    o1lab.errors.NotebookError: 'My Question' is no notebook name; use two digits and lower-case words: 05_my_question
    """
    folder = folder or paths.notebooks()
    name = name.removesuffix(".ipynb")
    if not NAME.fullmatch(name):
        raise NotebookError(f"{name!r} is no notebook name; use two digits and lower-case words: 05_my_question")
    number, _, words = name.partition("_")
    taken = sorted(path.stem for path in folder.glob(f"{number}_*.ipynb"))
    if taken:
        raise NotebookError(f"the number {number} is taken by {taken[0]}; free numbers: {_free(folder)}")
    if title is not None and (not title.strip() or len(title.splitlines()) != 1):
        raise NotebookError(f"the title {title!r} must be one line of text that begins with a verb")
    text = _filled(folder / f"{TEMPLATE}.ipynb", name, number, (title or f"Measure {words.replace('_', ' ')}").strip())
    path = folder / f"{name}.ipynb"
    atomic_write(path, text)
    return path


def _free(folder: Path) -> str:
    used = {path.stem[:2] for path in folder.glob("*.ipynb")}
    return ", ".join([f"{number:02}" for number in range(100) if f"{number:02}" not in used][:5])


def _filled(template: Path, name: str, number: str, title: str) -> str:
    import nbformat

    try:
        notebook = nbformat.read(template, as_version=4)
    except (OSError, ValueError) as error:
        raise NotebookError(
            f"the template {template.name} is missing or damaged ({error}); restore it from git"
        ) from error
    first = notebook.cells[0]
    first.source = "\n".join([f"# {number} · {title}", *first.source.splitlines()[1:]])
    for cell in notebook.cells:
        cell.id = secrets.token_hex(4)
        if cell.cell_type == "code":
            cell.source = cell.source.replace(f'o1lab.start("{TEMPLATE}"', f'o1lab.start("{name}"')
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="the new notebook's name, e.g. 05_my_question")
    parser.add_argument("--title", help="its title after the number, beginning with a verb")


def command(options: argparse.Namespace) -> int:
    """Write the notebook and say what comes next."""
    path = new(options.name, options.title)
    print(f"wrote {path.parent.name}/{path.name}")
    print(
        f'next: give its claims rows in o1lab/claims.toml, notebook = "{path.stem}", and use their ids for "template";'
    )
    print("write the story, and run `make test ARGS=tests/structure`")
    return 0
