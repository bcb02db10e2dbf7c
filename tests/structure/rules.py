"""The rules of a notebook as pure functions: each takes a :class:`Page` and returns the sentences it breaks.

A rule joins the collection with the decorator ``@rule``; ``test_notebooks.py`` runs all of them on every notebook and
holds each against a notebook with one planted violation.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

GLANCE = "| Question | What goes wrong | What we measure | Decided when | Control | Fix |"
NEEDED = "| Concept | Necessary or helpful | Link |"
VERBS = set(
    "Start Find Measure Trace Follow Stop Locate Recover Compare Predict Size Pack Pool Share Watch Serve Soak Judge "
    "Decide Check Extend Keep Catch Cure Weigh Run Show Test Read Fuse Split".split()
)
OPENING_HEADINGS = ("At a glance", "Prerequisites")
FULL_FORM = ("Reproduce", "Explain", "Predict", "Fix", "Control", "Verdict", "Try it yourself", "Limits", "Summary")
ORIENTATION = ("Check", "Measure", "Verdict", "Try it yourself", "Limits", "Summary")


@dataclass(frozen=True)
class Form:
    """Which H2 headings a notebook has, in order, and how few exercises are enough."""

    headings: tuple[str, ...] = FULL_FORM
    exercises: tuple[int, int] = (2, 3)


# The one table of exceptions: the orientation notebook has another body, the template shows one exercise.
FORMS = {"00_start_here": Form(ORIENTATION, (1, 3)), "_template": Form(exercises=(1, 3))}
WITH_CODE = {"Reproduce", "Predict", "Fix", "Control", "Verdict", "Check", "Measure"}
CLAIM_CALLS = {"record", "estimate", "verdict", "can_decide"}

MOST_KIB = 150
MOST_LINES, MEDIAN_LINES, P90_LINES = 30, 6, 18
DEFINING_SHARE = 0.05


@dataclass(frozen=True)
class Cell:
    """One cell: its place (counted from 1), kind, source and metadata."""

    place: int
    kind: str
    source: str
    raw: dict

    @property
    def tags(self) -> list[str]:
        return self.raw.get("metadata", {}).get("tags", [])

    @property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    @cached_property
    def tree(self) -> ast.Module | None:
        """Syntax tree of a code cell; None if it is not plain Python."""
        try:
            return ast.parse(self.source)
        except SyntaxError:
            return None

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Calls of ``lab.<name>(…)`` in this cell."""
        for node in ast.walk(self.tree or ast.Module([], [])):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in names
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "lab"
            ):
                yield node


@dataclass(frozen=True)
class Page:
    """A notebook as the rules see it."""

    stem: str
    notebook: dict
    text: str
    folder: Path
    claims: dict[str, str] = field(default_factory=dict)  # claim id -> the notebook that decides it

    @cached_property
    def cells(self) -> list[Cell]:
        return [
            Cell(place, raw["cell_type"], "".join(raw["source"]), raw)
            for place, raw in enumerate(self.notebook["cells"], 1)
        ]

    @property
    def form(self) -> Form:
        return FORMS.get(self.stem, Form())

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    @property
    def prose(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @cached_property
    def parameters(self) -> list[Cell]:
        return [cell for cell in self.code if "parameters" in cell.tags]

    @property
    def opening(self) -> list[Cell]:
        end = self.parameters[0].place if self.parameters else len(self.cells) + 1
        return [cell for cell in self.cells if cell.place < end]

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        """Every H2: (place of its cell, text)."""
        return [
            (cell.place, line[3:].strip())
            for cell in self.prose
            for line in text_lines(cell.source)
            if line.startswith("## ")
        ]

    def section(self, keyword: str) -> list[Cell]:
        """Cells from the heading that begins with ``keyword`` up to the next H2."""
        starts = [place for place, text in self.headings]
        for place, text in self.headings:
            if text.startswith(keyword):
                end = min((other for other in starts if other > place), default=len(self.cells) + 1)
                return [cell for cell in self.cells if place <= cell.place < end]
        return []


def read(path: Path, claims: dict[str, str]) -> Page:
    """Read a notebook file into a page."""
    text = path.read_text(encoding="utf-8")
    return Page(path.stem, json.loads(text), text, path.parent, claims)


def text_lines(source: str) -> list[str]:
    """Lines of a markdown cell that are neither in a code fence nor in display mathematics."""
    kept, fenced = [], False
    for line in source.splitlines():
        if line.lstrip().startswith(("```", "~~~")) or line.strip() == "$$":
            fenced = not fenced
        elif not fenced:
            kept.append(line)
    return kept


Rule = Callable[[Page], list[str]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Add a rule to the collection under its function's name."""
    RULES[function.__name__] = function
    return function


# --- the opening -----------------------------------------------------------------------------------------------------


@rule
def title_and_claim(page: Page) -> list[str]:
    lines = page.cells[0].lines if page.cells and page.cells[0].kind == "markdown" else []
    number = "NN" if page.stem.startswith("_") else page.stem.split("_")[0]
    match = re.fullmatch(r"# (\S+) · (\w+) .+", lines[0]) if lines else None
    if not match:
        return ["the first line must be '# NN · Verb …'"]
    found = []
    if match[1] != number:
        found.append(f"the title's number is {match[1]}, the file's is {number}")
    if match[2] not in VERBS:
        found.append(f"the title begins with {match[2]!r}, which is not in rules.VERBS")
    claims = [line for line in lines[1:] if line.startswith("**Claim.** ")]
    if len(claims) != 1 or len(claims[0].split()) < 8:
        found.append("the first cell needs exactly one line '**Claim.** …' of phenomenon, workload, evidence, control")
    return found


@rule
def at_a_glance(page: Page) -> list[str]:
    return _table(page, GLANCE)


@rule
def prerequisites(page: Page) -> list[str]:
    found = _table(page, NEEDED)
    lines = [line for cell in page.opening for line in cell.lines]
    if found:
        return found
    start = lines.index(NEEDED)
    for row in _rows(lines[start + 2 :]):
        if _fields(row)[1] not in ("necessary", "helpful"):
            found.append(f"a prerequisite is 'necessary' or 'helpful', not {_fields(row)[1]!r}")
    if not any(line.startswith("You can skip") for line in lines[start:]):
        found.append("a line 'You can skip …' must follow the prerequisites")
    return found


def _fields(row: str) -> list[str]:
    return [text.strip() for text in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def _rows(lines: list[str]) -> list[str]:
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    return rows


def _table(page: Page, header: str) -> list[str]:
    lines = [line for cell in page.opening if cell.kind == "markdown" for line in [*cell.lines, ""]]
    if lines.count(header) != 1:
        return [f"the opening needs one table with the header {header}"]
    start = lines.index(header)
    width = len(_fields(header))
    rows = _rows(lines[start + 2 :])
    if not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", lines[start + 1]) or not rows:
        return [f"the table {header} has no ruler or no row"]
    return [f"this row must fill {width} cells: {row}" for row in rows if len([f for f in _fields(row) if f]) != width]


@rule
def cost_line(page: Page) -> list[str]:
    lines = [line for cell in page.opening for line in cell.lines if line.startswith("**Cost.** ")]
    if len(lines) != 1:
        return ["the opening needs one line '**Cost.** Needs … · full … · smoke … · recorded YYYY-MM-DD.'"]
    parts = lines[0].removeprefix("**Cost.** ").split(" · ")
    if len(parts) < 4 or not parts[0].startswith("Needs"):
        return ["the cost line is '**Cost.** Needs … · full … · smoke … · recorded YYYY-MM-DD.'"]
    figures = r".*\d\s?(s|min)\b.*\d\s?(MiB|GiB|MB|GB)\b"
    full = [p for p in parts if p.startswith("full")]
    smoke = [p for p in parts if p.startswith("smoke")]
    found = []
    if not full or not (re.match(figures, full[0]) or "not yet recorded" in full[0]):
        found.append("the cost line's 'full …' part needs a time and a memory, or 'not yet recorded'")
    if not smoke or not re.match(figures, smoke[0]):
        found.append("the cost line's 'smoke …' part needs a time and a memory")
    if not re.search(r"recorded 20\d\d-[01]\d-[0-3]\d", lines[0]):
        found.append("the cost line needs 'recorded YYYY-MM-DD'")
    return found


@rule
def parameters_cell(page: Page) -> list[str]:
    if len(page.parameters) != 1:
        return [f"exactly one cell is tagged 'parameters', not {len(page.parameters)}"]
    cell = page.parameters[0]
    found = []
    if any(other.kind == "code" for other in page.opening):
        found.append("no code cell may stand before the parameters cell")
    lines = [line for line in cell.lines if line.strip()]
    if not 1 <= len(lines) <= 8:
        found.append(f"the parameters cell has {len(lines)} lines; 1 to 8 are allowed")
    names = []
    for line in lines:
        match = re.fullmatch(r"(\w+): (str|int|float|bool) = ([^=#]+?)  # \[[^\]]+\] \S[^=]*", line)
        if not match:
            found.append(f"not of the form 'name: type = literal  # [unit] meaning' with a single '=': {line}")
            continue
        names.append(match[1])
        try:
            value = ast.literal_eval(match[3])
        except (ValueError, SyntaxError):
            found.append(f"not a literal: {line}")
            continue
        if type(value).__name__ != match[2]:
            found.append(f"{match[1]} is declared {match[2]} but is {value!r}")
    return found + [f"the parameter '{name}' is missing" for name in ("preset", "seed") if name not in names]


@rule
def start_cell(page: Page) -> list[str]:
    after = [cell for cell in page.code if page.parameters and cell.place > page.parameters[0].place]
    for node in after[0].tree.body if after and after[0].tree else []:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call, target = node.value, node.targets[0]
            if ast.unparse(call.func) != "o1lab.start" or ast.unparse(target) != "lab":
                continue
            found = []
            if not call.args or ast.literal_eval(call.args[0]) != page.stem:
                found.append(f"o1lab.start must name this notebook: '{page.stem}'")
            if {k.arg: ast.unparse(k.value) for k in call.keywords}.get("preset") != "preset":
                found.append("o1lab.start must be given preset=preset")
            return found
    return ["the code cell after the parameters must hold 'lab = o1lab.start(…)'"]


# --- the body --------------------------------------------------------------------------------------------------------


@rule
def section_order(page: Page) -> list[str]:
    body = [text for place, text in page.headings if not text.startswith(OPENING_HEADINGS)]
    wanted = page.form.headings
    if len(body) == len(wanted) and all(text.startswith(key) for text, key in zip(body, wanted, strict=True)):
        return []
    return [f"the H2 headings must begin, in this order, with {' → '.join(wanted)}; found {' → '.join(body) or 'none'}"]


@rule
def section_contents(page: Page) -> list[str]:
    found = []
    for keyword in page.form.headings:
        cells = page.section(keyword)
        if keyword in WITH_CODE and not any(cell.kind == "code" for cell in cells):
            found.append(f"'{keyword}' needs a code cell")
        if keyword == "Predict" and not any("ratio" in cell.source.lower() for cell in cells):
            found.append("'Predict' must give the ratio of measured to predicted")
        if keyword == "Verdict" and not any(list(cell.calls("verdict")) for cell in cells):
            found.append("'Verdict' needs a lab.verdict(…)")
        if keyword == "Summary":
            text = "\n".join(cell.source for cell in cells if cell.kind == "markdown")
            if not re.search(r"^\*\*Next\.\*\* ", text, re.M) or not re.search(r"\[[^\]]+\]\([^)]+\)", text):
                found.append("'Summary' needs a line '**Next.** …' and a link")
    return found


@rule
def exercises(page: Page) -> list[str]:
    cells = page.section("Try it yourself")
    at = [
        (cell.place, line)
        for cell in cells
        if cell.kind == "markdown"
        for line in text_lines(cell.source)
        if line.startswith("### ")
    ]
    least, most = page.form.exercises
    found = []
    if not least <= len(at) <= most:
        found.append(f"{least} to {most} exercises are wanted, found {len(at)}")
    for index, (place, line) in enumerate(at):
        if not re.fullmatch(r"### Exercise \d · .+ \((easy|medium|hard), \d+ min\)", line):
            found.append(f"an exercise is '### Exercise 1 · what to do (easy, 3 min)', not: {line}")
        end = at[index + 1][0] if index + 1 < len(at) else len(page.cells) + 1
        mine = [cell for cell in cells if place <= cell.place < end]
        if not any(cell.kind == "code" and "check" in cell.tags for cell in mine):
            found.append(f"no code cell tagged 'check' beneath: {line}")
        text = "\n".join(cell.source for cell in mine if cell.kind == "markdown")
        if not re.search(r"<details>\s*<summary>.+?</summary>.+?</details>", text, re.S):
            found.append(f"no folded solution (<details><summary>…) beneath: {line}")
    return found


@rule
def one_signature_figure(page: Page) -> list[str]:
    signed = [
        call
        for cell in page.code
        for call in cell.calls("figure")
        if any(k.arg == "signature" and ast.unparse(k.value) == "True" for k in call.keywords)
    ]
    return [] if len(signed) == 1 else [f"exactly one lab.figure(…, signature=True) is wanted, found {len(signed)}"]


@rule
def figures_are_announced(page: Page) -> list[str]:
    kinds = {cell.place: cell.kind for cell in page.cells}
    return [
        f"cell {cell.place}: say in a markdown cell directly before the figure what to look for"
        for cell in page.code
        if list(cell.calls("figure")) and kinds.get(cell.place - 1) != "markdown"
    ]


@rule
def finish_is_last(page: Page) -> list[str]:
    body = page.code[-1].tree.body if page.code and page.code[-1].tree else []
    last = ast.unparse(body[-1]) if body else ""
    return [] if last == "lab.finish()" else ["the last code cell must end with lab.finish()"]


@rule
def claims_are_its_own(page: Page) -> list[str]:
    found = []
    for cell in page.code:
        for call in cell.calls(*CLAIM_CALLS):
            name = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if name is not None and name not in page.claims:
                found.append(f"cell {cell.place}: claim '{name}' is not in claims.toml")
            elif name is not None and page.claims[name] != page.stem:
                found.append(f"cell {cell.place}: claim '{name}' is decided by {page.claims[name]}, not here")
    words = {
        node.value
        for cell in page.code
        for node in ast.walk(cell.tree or ast.Module([], []))
        if isinstance(node, ast.Constant)
    }
    own = [claim for claim, notebook in page.claims.items() if notebook == page.stem]
    return found + [
        f"claim '{claim}' names this notebook, which never mentions it" for claim in own if claim not in words
    ]


# --- sizes -----------------------------------------------------------------------------------------------------------


@rule
def cell_sizes(page: Page) -> list[str]:
    sizes = sorted(sum(bool(line.strip()) for line in cell.lines) for cell in page.code)
    if not sizes:
        return ["there is no code cell"]
    found = []
    if sizes[-1] > MOST_LINES:
        found.append(f"the longest code cell has {sizes[-1]} lines; at most {MOST_LINES}")
    if statistics.median(sizes) > MEDIAN_LINES:
        found.append(f"the median code cell has {statistics.median(sizes)} lines; at most {MEDIAN_LINES}")
    p90 = sizes[-(-9 * len(sizes) // 10) - 1]
    if p90 > P90_LINES:
        found.append(f"nine in ten code cells may have at most {P90_LINES} lines; the 90th percentile is {p90}")
    return found


@rule
def prose_matches_code(page: Page) -> list[str]:
    if len(page.prose) >= len(page.code):
        return []
    return [f"{len(page.prose)} markdown cells for {len(page.code)} code cells; at least as many are wanted"]


@rule
def definitions(page: Page) -> list[str]:
    judged = [cell for cell in page.code if cell.tree and "object-of-study" not in cell.tags]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    defining = [cell for cell in judged if any(isinstance(node, kinds) for node in ast.walk(cell.tree))]
    found = [
        f"cell {cell.place}: no class in a notebook (move it to the package)"
        for cell in judged
        if any(isinstance(node, ast.ClassDef) for node in ast.walk(cell.tree))
    ]
    if len(defining) > DEFINING_SHARE * len(page.code):
        places = ", ".join(str(cell.place) for cell in defining)
        found.append(f"{len(defining)} of {len(page.code)} code cells define a function (cells {places}); at most 5 %")
    return found


@rule
def file_size(page: Page) -> list[str]:
    size = len(page.text.encode())
    return [] if size <= MOST_KIB * 1024 else [f"{size / 1024:.0f} KiB; at most {MOST_KIB}"]


# --- hygiene ---------------------------------------------------------------------------------------------------------


@rule
def plain_python(page: Page) -> list[str]:
    return [f"cell {cell.place}: not plain Python (no % or ! lines)" for cell in page.code if cell.tree is None]


@rule
def no_figure_shown_twice(page: Page) -> list[str]:
    """``lab.estimate`` and ``lab.record`` print what they record; as a cell's last value it would be shown again."""
    found = []
    for cell in page.code:
        last = cell.tree.body[-1] if cell.tree and cell.tree.body else None
        called = ast.unparse(last.value.func) if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) else ""
        if called in ("lab.estimate", "lab.record") and not "".join(cell.lines).rstrip().endswith(";"):
            found.append(f"cell {cell.place}: end {called}(…) with a semicolon")
    return found


@rule
def comments_are_not_narrative(page: Page) -> list[str]:
    found = []
    for cell in page.code:
        lines = [line.strip() for line in cell.lines if line.strip()]
        if lines and lines[0].startswith("#"):
            found.append(f"cell {cell.place}: begins with a comment; say it in markdown")
        if any(a.startswith("#") and b.startswith("#") for a, b in zip(lines, lines[1:], strict=False)):
            found.append(f"cell {cell.place}: two comment lines in a row; say it in markdown")
    return found


@rule
def no_machine_paths(page: Page) -> list[str]:
    found = []
    for cell in page.cells:
        if "sys.path" in cell.source:
            found.append(f"cell {cell.place}: sys.path; the package is installed")
        if re.search(r"(?<![\w./:])/(home|Users|root|tmp|work|mnt|opt|usr|var|data)/|\b[A-Z]:\\", cell.source):
            found.append(f"cell {cell.place}: an absolute path")
        if "raises-exception" in cell.tags:
            found.append(
                f"cell {cell.place}: the tag raises-exception still fails headless; catch the error and show it"
            )
    return found


@rule
def links_resolve(page: Page) -> list[str]:
    found = []
    for cell in page.prose:
        for target in re.findall(r"\]\(([^)\s]+)\)", cell.source):
            if re.match(r"(https?:|mailto:|#)", target):
                continue
            if not (page.folder / target.split("#")[0]).exists():
                found.append(f"cell {cell.place}: the link {target} leads nowhere")
    return found


ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|Fig|Eq|Sec|No|approx|resp|Dr|et al)\.$")


@rule
def one_sentence_a_line(page: Page) -> list[str]:
    found = []
    for cell in page.prose:
        before = ""
        for line in text_lines(cell.source):
            text = re.sub(r"`[^`]*`", "`x`", line.strip())
            prose = bool(text) and not text.startswith(("|", "#", "<", "$$", "!["))
            item = re.match(r"([-*+]|\d+\.|>)\s+", text)
            body = text[item.end() :] if item else text
            body = re.sub(r"^(\*\*[^*]+\.\*\*)\s", "", body)  # a run-in heading such as **Claim.**
            for stop in re.finditer(r"[.!?][\"'”’)*_]*\s+(?=[\"'“‘(*_`]*[A-Z])", body) if prose else ():
                if not ABBREVIATION.search(body[: stop.start() + 1]):
                    found.append(f"cell {cell.place}: more than one sentence on the line: {line.strip()[:70]}")
                    break
            if prose and before and not item and not re.search(r"[.!?:;…][\"'”’)*_]*$", before):
                found.append(f"cell {cell.place}: a sentence is broken over two lines: {before[-40:]}")
            before = text if prose else ""
    return found


@rule
def stripped(page: Page) -> list[str]:
    found = []
    for cell in page.cells:
        if cell.raw.get("outputs") or cell.raw.get("execution_count") is not None:
            found.append(f"cell {cell.place}: outputs or an execution count are in the file; run nbstripout")
        if extra := set(cell.raw.get("metadata", {})) - {"tags"}:
            found.append(f"cell {cell.place}: metadata {sorted(extra)}; only tags are kept")
        if cell.raw.get("attachments"):
            found.append(f"cell {cell.place}: attachments are not kept")
    if extra := set(page.notebook["metadata"]) - {"kernelspec", "language_info"}:
        found.append(f"notebook metadata {sorted(extra)}; only kernelspec and language_info are kept")
    return found


@rule
def kernel_and_format(page: Page) -> list[str]:
    metadata, found = page.notebook["metadata"], []
    if metadata.get("kernelspec") != {"display_name": "Python 3", "language": "python", "name": "python3"}:
        found.append("kernelspec must be python3, displayed as 'Python 3'")
    if metadata.get("language_info", {"name": "python"}) != {"name": "python"}:
        found.append("language_info may only say {'name': 'python'}")
    if (page.notebook.get("nbformat"), page.notebook.get("nbformat_minor")) != (4, 5):
        found.append("the format must be 4.5")
    if page.text != json.dumps(page.notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n":
        found.append("the file is not laid out as nbformat writes it")
    return found


@rule
def cell_ids(page: Page) -> list[str]:
    ids = [cell.raw.get("id", "") for cell in page.cells]
    found = [f"cell id {name!r} is not valid" for name in ids if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)]
    return found + [f"cell id {name!r} is used twice" for name in sorted({n for n in ids if n and ids.count(n) > 1})]
