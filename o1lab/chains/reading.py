"""Read produced chains, tolerantly: what a reasoner or an instruction-tuned model wrote, step by step.

In language the reader gets past bold type, LaTeX, tables, thousands separators, prose around the steps, other ways to
head a step, several steps on a line, and a plan that comes before the work. It never looks at what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from o1lab.chains.samples import FAMILIES, Parsed, Produced, Sample

_PLAIN = [
    (re.compile(pattern, re.I), by)
    for pattern, by in (
        (r"(?s:^.*</think>)", ""),
        (r"\\boxed\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:text|textbf|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}", r"\1"),
        (r"(?<=\d)(?:\{,\}|,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", ""),
        (r"\\(?:times|cdot|ast)\b|[×✕∗⋅·]", "*"),
        (r"[\u2212\u2010-\u2015]", "-"),
        (r"\\(?:to|rightarrow|longrightarrow|implies)\b|[-=]{1,4}>|[→⇒⟶➜]", " -> "),
        (r"\\equiv\b|[≡≈]", "="),
        (r"\\[()\[\]]|\$|\*\*|__|`", ""),
        (r"\\[,;:! ]|[\u00a0\u2009\u202f~]", " "),
        (r"\(\s*\\?p?mod(?:ulo)?\s*\{?\d+\}?\s*\)|\\?\b[pb]?mod(?:ulo|ulus)?\s*\{?\d+\}?|%\s*(?:31|1000)\b", ""),
        (r"(?<=\d)\s*x\s*(?=\d)", " * "),
        (r"(?<![\w*])\*(?=\S)([^*\n]+)(?<=\S)\*(?![\w*])", r"\1"),
        (r"[ \t\r\f\v]+", " "),
        (r"\n[ \n]*\n", "\n\n"),
    )
]
_STEP = re.compile(
    r"(?im)(?:^[ \t>#*•|\[(-]*(?:\d{1,3}[.)]\s*)?(?:step|line)\s*(?:no\.?|number|\#)?\s*\[?(\d{1,4})\b\]?"
    r"(?:\s*(?:of|/)\s*\d+)?\s*(?:->|[:.)\]|=-])?"
    r"|\bstep\s*\#?(\d{1,4})\s*(?::|->))"
)
_NUMBERED = re.compile(r"(?m)^[ \t>#*•|\[(s-]*(\d{1,4})\s*(?:->|[:.)\]|])")
_ANSWER = re.compile(r"(?im)^[^\w\n]*(?:so,?\s*)?(?:the\s+)?(?:final\s+)?answer\b[ \t]*(?:is\b|:|=|->|-)*")
_INLINE_ANSWER = re.compile(r"(?i)\b(?:final\s+)?answer\s*(?:is\b|:|=|->)+")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_LABEL = re.compile(r"s\d+")
_PIECE = {"modular": r"-?\d+", "digits": r"\d+", "symbols": r"[A-Z]+", "hops": r"e\d+"}
_SPACED_DIGITS = re.compile(r"(?<![\d.])(\d) (\d) (\d)(?![ ]?[\d.])")


def clean(text: str) -> str:
    """Text without markup: one sign for each operation, one arrow, no modulus, whole numbers in one piece.

    >>> clean(r"**Step 8:** $18 \\times 3 = 1{,}054 \\equiv 23 \\pmod{31}$")
    'Step 8: 18 * 3 = 1054 = 23 '
    """
    for pattern, by in _PLAIN:
        text = pattern.sub(by, text)
    return "\n".join(_row(line) if line.lstrip().startswith("|") else line for line in text.split("\n"))


def _row(line: str) -> str:
    """A table's row with an arrow between the cells."""
    return " -> ".join(cell.strip() for cell in line.strip().strip("|").split("|"))


def read_language(sample: Sample, text: str) -> Parsed:
    """Read a chain written in ordinary language."""
    family = FAMILIES[sample.variant]
    boxed = _BOXED.findall(text)
    text = clean(text)
    if sample.variant == "digits":
        text = _SPACED_DIGITS.sub(r"\1\2\3", text)
    heads = list(_STEP.finditer(text)) or list(_NUMBERED.finditer(text))
    end, ended, answer, tail = _answer(sample, text, heads)
    heads = [head for head in heads if head.start() < end]
    if heads:
        ends = [*(head.start() for head in heads[1:]), end]
        pieces = [(int(next(filter(None, h.groups()))), text[h.end() : stop], text[h.start() : stop])
                  for h, stop in zip(heads, ends, strict=True)]  # fmt: skip
        before = text[: heads[0].start()].strip()
    else:
        lines = [line for line in text[:end].split("\n") if line.strip()]
        said = [line for line in lines if all(family.read_step(line, None)[::2])]
        pieces = [(None, line, line) for line in said]
        before = "\n".join(line for line in lines if line not in said)
    steps: list[Produced] = []
    state: str | None = sample.start
    for label, piece, whole in pieces:
        step = Produced(label, *family.read_step(piece, state), whole.strip())
        state = step.state or state
        steps.append(step)
    told = {step.label for step in steps if step.state is not None}
    steps = [step for step in steps if step.state is not None or step.label is None or step.label not in told]
    if answer is None and boxed and steps:
        answer, ended = family.read_state(clean(boxed[-1])), True
    rest = "\n".join(part for part in (before, tail.strip()) if part)
    return Parsed(tuple(steps), ended, rest, answer)


def _answer(sample: Sample, text: str, heads: list[re.Match[str]]) -> tuple[int, bool, str | None, str]:
    """Where the chain ends, whether an answer line ends it, what that says, and what comes after it."""
    family, asked = FAMILIES[sample.variant], str(sample.steps[-1].label)
    last = [head for head in heads if asked in head.groups()]
    least = (last or heads)[0].start() if heads else 0
    lines = list(_ANSWER.finditer(text))
    late = [match for match in lines if match.start() >= least]
    found = late + lines[::-1][: not late] + list(_INLINE_ANSWER.finditer(text))[-1:]
    for match in found:
        line, _, tail = text[match.end() :].lstrip(" \t*:").lstrip("\n").partition("\n")
        state = None if _STEP.match(line) else family.read_state(line)
        if state is not None:
            behind = match.start() >= least
            return (match.start() if behind else len(text)), True, state, tail if behind else ""
    return (late[0].start(), True, None, text[late[0].end() :]) if late else (len(text), False, None, "")


def read_tokens(sample: Sample, text: str) -> Parsed:
    """Read a chain in the reasoner's tokens.

    A step begins with a label, or, where the label is missing, with an operator after a whole step.
    """
    words = text.split()
    if "chain" in words:
        words = words[len(words) - words[::-1].index("chain") :]
    ended = "<eos>" in words
    end = words.index("<eos>") if ended else len(words)
    rest = [word for word in words[end + 1 :] if word != "<pad>"]
    groups = list(_groups(sample, words[:end]))
    if groups and not _LABEL.fullmatch(groups[0][0]) and groups[0][0] not in FAMILIES[sample.variant].operators:
        rest = groups.pop(0) + rest
    steps = tuple(_step(sample, group) for group in groups)
    return Parsed(steps, ended, " ".join(rest), steps[-1].state if steps else None)


def _groups(sample: Sample, words: list[str]) -> Iterator[list[str]]:
    family, group = FAMILIES[sample.variant], []
    whole = 1 + family.operand_width + family.state_width
    for word in words:
        body = len(group) - bool(group and _LABEL.fullmatch(group[0]))
        if group and (_LABEL.fullmatch(word) or (word in family.operators and body >= whole)):
            yield group
            group = []
        if word not in ("<bos>", "<pad>"):
            group.append(word)
    if group:
        yield group


def _step(sample: Sample, group: list[str]) -> Produced:
    family, text = FAMILIES[sample.variant], " ".join(group)
    label = int(group[0][1:]) if _LABEL.fullmatch(group[0]) else None
    body = group[1:] if label is not None else group
    operator = body[0] if body and body[0] in family.operators else None
    expected = family.operand_width + family.state_width
    if operator is not None or len(body) > expected:
        body = body[1:]
    if sample.variant in ("digits", "symbols") and len(body) < expected:  # marks that grew together
        body = [mark for word in body for mark in (word if re.fullmatch(_PIECE[sample.variant], word) else [word])]
    fits = all(re.fullmatch(_PIECE[sample.variant], word) for word in body)
    cut = family.operand_width
    operand = " ".join(body[:cut]) if len(body) >= cut and fits else None
    state = " ".join(body[cut:]) if len(body) >= expected and fits else None
    return Produced(label, operator, operand, state, text)
