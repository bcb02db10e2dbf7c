"""Every notebook keeps every rule, and every rule is held against a notebook that breaks just it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from structure import rules

from o1lab import claims, paths

FOLDER = paths.PACKAGE.parent / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))
LEDGER = {claim.id: claim.notebook for claim in claims.load().values()}
TEMPLATE = FOLDER / "_template.ipynb"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", rules.RULES)
def test_rule(path: Path, name: str):
    broken = rules.RULES[name](rules.read(path, LEDGER))
    assert not broken, f"{path.name}: " + "; ".join(broken)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_format_is_valid(path: Path):
    nbformat.validate(nbformat.read(path, as_version=4))


def test_nbstripout_has_nothing_to_do():
    keys = "metadata.papermill cell.metadata.papermill metadata.widgets"
    command = [sys.executable, "-m", "nbstripout", "--verify", "--keep-id", "--extra-keys", keys, *map(str, FILES)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_runner_sees_the_parameters():
    from papermill import inspect_notebook

    names = list(inspect_notebook(str(TEMPLATE)))
    assert names == ["preset", "seed", "rounds", "requests", "reply_bytes"]


# --- planted violations ----------------------------------------------------------------------------------------------

Edit = Callable[[dict], None]


def cell_with(notebook: dict, text: str, kind: str | None = None) -> dict:
    """Return the one cell whose source holds ``text``."""
    [found] = [
        cell for cell in notebook["cells"] if text in "".join(cell["source"]) and kind in (None, cell["cell_type"])
    ]
    return found


def swap(old: str, new: str) -> Edit:
    """Replace ``old``, which must be there, in the one cell that holds it."""

    def edit(notebook: dict) -> None:
        cell = cell_with(notebook, old)
        cell["source"] = "".join(cell["source"]).replace(old, new, 1)

    return edit


def append(kind: str, source: str, place: int | None = None, **metadata: list[str]) -> Edit:
    """Insert a cell at ``place``, by default before the last one."""

    def edit(notebook: dict) -> None:
        cell = {"id": "planted", "cell_type": kind, "metadata": dict(metadata), "source": source}
        cell |= {"outputs": [], "execution_count": None} if kind == "code" else {}
        notebook["cells"].insert(len(notebook["cells"]) - 1 if place is None else place, cell)

    return edit


def change(**values: object) -> Edit:
    """Set top-level keys of the notebook."""
    return lambda notebook: notebook.update(values)


def on_cell(text: str, **values: object) -> Edit:
    """Set keys of the one cell that holds ``text``."""
    return lambda notebook: cell_with(notebook, text, "code").update(values)


def drop(text: str) -> Edit:
    """Remove the one cell that holds ``text``."""
    return lambda notebook: notebook["cells"].remove(cell_with(notebook, text))


def same_ids(notebook: dict) -> None:
    notebook["cells"][1]["id"] = notebook["cells"][0]["id"]


def prose_gone(notebook: dict) -> None:
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def no_ratio(notebook: dict) -> None:
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"]).replace("ratio", "share")


LONG = "\n".join(f"a{number} = {number}" for number in range(31))
FUNCTION = "def helper():\n    return 1"
PLANTED: list[tuple[str, Edit]] = [
    ("title_and_claim", swap("# NN · Measure what", "# 07 · Measure what")),
    ("title_and_claim", swap("# NN · Measure what", "# NN · Memory what")),
    ("title_and_claim", swap("# NN · Measure", "# Measure")),
    ("title_and_claim", swap("**Claim.** A loop", "A loop")),
    ("at_a_glance", swap("| Control | Fix |", "| Fix | Control |")),
    ("at_a_glance", swap("a history list holds every reply", "")),
    ("prerequisites", swap("| Concept | Necessary or helpful | Link |", "| Concept | Link |")),
    ("prerequisites", swap("| necessary |", "| maybe |")),
    ("prerequisites", swap("You can skip", "Do not skip")),
    ("cost_line", swap("**Cost.** ", "Cost: ")),
    ("cost_line", swap("recorded 2026-11-30", "recorded lately")),
    ("cost_line", swap("3 s, 0.4 GiB", "quick")),
    ("cost_line", swap("not yet recorded", "soon")),
    ("parameters_cell", on_cell("requests: int", metadata={})),
    ("parameters_cell", swap("# [requests] served", "# served")),
    ("parameters_cell", swap("seed: int = 0", "seed: int | None = None")),
    ("parameters_cell", swap("seed: int = 0", 'seed: Literal["a"] = "a"')),
    ("parameters_cell", swap("seed: int = 0", "seed: int = 0.5")),
    ("parameters_cell", swap("seed: int = 0", "seed = 0")),
    ("parameters_cell", swap("seed: int", "seeds: int")),
    ("parameters_cell", swap("# [B] size of one reply", "# [B] size = of one reply")),
    ("parameters_cell", swap("rounds: int = 12", "rounds: int = 6 * 2")),
    (
        "parameters_cell",
        swap("preset: str", "\n".join(f"p{n}: int = {n}  # [1] extra" for n in range(4)) + "\npreset: str"),
    ),
    ("parameters_cell", append("code", "x = 1", place=1)),
    ("start_cell", swap('o1lab.start("_template"', 'o1lab.start("01_memory_leak"')),
    ("start_cell", swap("preset=preset, ", "")),
    ("start_cell", swap("lab = o1lab.start", "session = o1lab.start")),
    ("section_order", swap("## Explain", "## Why")),
    ("section_order", swap("## Control", "### Control")),
    ("section_order", append("markdown", "## Another section")),
    ("section_contents", drop("claims.decide(")),
    ("section_contents", swap("lab.verdict(", "print(")),
    ("section_contents", no_ratio),
    ("section_contents", swap("**Next.** ", "Next: ")),
    ("exercises", swap("(easy, 3 min)", "")),
    ("exercises", on_cell("no answer yet", metadata={})),
    ("exercises", swap("<details>", "<div>")),
    ("exercises", swap("### Exercise 1", "#### Exercise 1")),
    ("one_signature_figure", swap("signature=True", "signature=False")),
    ("one_signature_figure", append("code", 'lab.figure("again", figure, caption, signature=True)')),
    ("figures_are_announced", drop("Look at the slopes")),
    ("finish_is_last", swap("lab.finish()", "print(1)")),
    ("claims_are_its_own", swap('lab.estimate("template"', 'lab.estimate("no-such-claim"')),
    ("claims_are_its_own", swap('lab.estimate("template"', 'lab.estimate("leak-rate"')),
    ("cell_sizes", append("code", LONG)),
    ("cell_sizes", lambda notebook: [append("code", LONG[: LONG.index("a19")])(notebook) for _ in range(4)]),
    ("cell_sizes", lambda notebook: [append("code", LONG[: LONG.index("a7")])(notebook) for _ in range(20)]),
    ("prose_matches_code", prose_gone),
    ("definitions", append("code", FUNCTION)),
    ("definitions", append("code", "class Helper:\n    pass")),
    ("file_size", append("markdown", "word " * 40_000)),
    ("plain_python", append("code", "%timeit 1")),
    ("plain_python", append("code", "!ls")),
    ("no_figure_shown_twice", append("code", "lab.estimate('a', 1)")),
    ("no_figure_shown_twice", append("code", "x = 1\nlab.record('a', 1, low=0, high=2, n=3, unit='')")),
    ("comments_are_not_narrative", append("code", "# First we add\nx = 1")),
    ("comments_are_not_narrative", append("code", "x = 1\n# first\n# second\ny = 2")),
    ("no_machine_paths", append("code", "import sys\nsys.path.append('x')")),
    ("no_machine_paths", append("code", "open('/home/someone/file')")),
    ("no_machine_paths", append("code", "open('C:\\\\file')")),
    ("no_machine_paths", append("code", "1 / 0", tags=["raises-exception"])),
    ("links_resolve", swap("(00_start_here.ipynb)", "(00_start.ipynb)")),
    ("one_sentence_a_line", append("markdown", "This is one. This is two.")),
    ("one_sentence_a_line", append("markdown", "This sentence is broken\nover two lines.")),
    ("one_sentence_a_line", append("markdown", "- An item. And a second sentence.")),
    ("stripped", on_cell("kept with a bound", execution_count=3)),
    ("stripped", on_cell("kept with a bound", outputs=[{"output_type": "stream", "name": "stdout", "text": "x"}])),
    ("stripped", on_cell("kept with a bound", metadata={"papermill": {}})),
    ("stripped", lambda notebook: notebook["metadata"].update(widgets={})),
    ("kernel_and_format", lambda notebook: notebook["metadata"]["kernelspec"].update(name="my-env")),
    ("kernel_and_format", lambda notebook: notebook["metadata"]["language_info"].update(version="3.12.1")),
    ("kernel_and_format", change(nbformat_minor=4)),
    ("cell_ids", same_ids),
    ("cell_ids", lambda notebook: notebook["cells"][0].update(id="not valid!")),
]


def planted(edit: Edit) -> rules.Page:
    notebook = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    edit(notebook)
    text = json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    return rules.Page("_template", notebook, text, FOLDER, LEDGER)


@pytest.mark.parametrize(("name", "edit"), PLANTED, ids=[f"{i}-{name}" for i, (name, _) in enumerate(PLANTED)])
def test_planted_violation_is_found(name: str, edit: Edit):
    assert rules.RULES[name](planted(edit)), f"{name} did not notice"


def test_every_rule_has_a_planted_violation():
    assert {name for name, _ in PLANTED} == set(rules.RULES)


def test_layout_of_the_file_is_noticed():
    page = rules.read(TEMPLATE, LEDGER)
    compact = rules.Page(page.stem, page.notebook, json.dumps(page.notebook), FOLDER, LEDGER)
    assert rules.kernel_and_format(compact)


def test_a_claim_of_the_ledger_that_its_notebook_forgets_is_noticed():
    page = rules.read(TEMPLATE, {**LEDGER, "template/half": "_template"})
    assert rules.claims_are_its_own(page) == ["claim 'template/half' names this notebook, which never mentions it"]


def test_code_under_study_may_be_defined_in_the_notebook():
    assert not rules.definitions(planted(append("code", FUNCTION, tags=["object-of-study"])))


def test_abbreviations_and_code_end_no_sentence():
    text = "Use a counter, e.g. Python's own, cf. Section 2, and call `a.b(). C` then stop."
    assert not rules.one_sentence_a_line(planted(append("markdown", text)))


def test_the_numbered_notebooks_share_the_full_form():
    assert [stem for stem, form in rules.FORMS.items() if form.headings != rules.FULL_FORM] == ["00_start_here"]
