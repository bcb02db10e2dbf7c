"""The head-to-head table as text and as a figure. Each cell has a word beside its colour."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

MARKS = {
    "right": ("✓", "#0072B2", "leak found, cure silent; or nothing to find and silent"),
    "missed": ("missed", "#d9d9d9", "leak not found"),
    "alarm": ("alarm", "#D55E00", "reports growth where nothing leaks"),
    "no answer": ("–", "#ffffff", "does not run here, or is not made for it"),
}
ORDER = list(MARKS)
SHORT = {
    "not its job": "–",
    "not run": "",
    "needs CUDA": "CUDA",
    "not installed": "absent",
    "timed out": "time",
    "crashed": "crash",
}
"""What a narrow cell says instead of an answer."""
LEGEND = (
    "✓ found, silent once cured (or: nothing leaks, silent)<br>"
    "k right kind · o right owner · l right line · alarm: reports growth where nothing leaks<br>"
    "below the line nothing leaks in either form · empty: not run"
)


def mark(row: Any) -> str:
    """Which of :data:`MARKS` a row of the table gets."""
    if row.status != "ran":
        return "no answer"
    if row.false_alarm:
        return "alarm"
    return "right" if row.group != "leak" or row.found else "missed"


def word(row: Any) -> str:
    """The text of a cell: the mark, then ``k`` for a right kind and ``o`` or ``l`` for a right owner or line."""
    kind = mark(row)
    if kind == "no answer":
        return str(row.status)
    text = MARKS[kind][0]
    if row.found:
        letters = ("k" if row.kind_right else "") + (row.names[:1] if row.place_right else "")
        text = f"{text} {letters}".rstrip()
    return text


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per tool: leaks found of those it could be asked about, false alarms, kinds and places right, seconds.

    ``found`` counts also where the cured form raised an alarm; ``clean`` is the number of forms and workloads without a
    leak. ``seconds`` is the median time for both forms of a case.
    """
    import pandas as pd

    rows = []
    for name, mine in table.groupby("tool", sort=False):
        ran = mine[mine.status == "ran"]
        leaks = ran[ran.group == "leak"]
        rows.append(
            {
                "tool": name,
                "version": mine.version.iloc[0],
                "found": int(leaks.found.eq(True).sum()),
                "leaks": len(leaks),
                "alarms": int(ran.false_alarm.eq(True).sum()),
                "clean": len(ran),
                "kind_right": int(leaks.kind_right.eq(True).sum()),
                "place_right": int(leaks.place_right.eq(True).sum()),
                "seconds": float(ran.seconds.median()) if len(ran) else float("nan"),
                "no_answer": ", ".join(f"{n} {why}" for why, n in Counter(mine.status[mine.status != "ran"]).items()),
            }
        )
    return pd.DataFrame(rows)


def text(table: pd.DataFrame) -> str:
    """The table for a terminal: cases down, tools across, a summary below, and what each sign means."""
    tools = list(dict.fromkeys(table.tool))
    cells = {(row.case, row.tool): word(row) for row in table.itertuples()}
    cases = list(dict.fromkeys(table.case))
    first = max(len(name) for name in [*cases, "case"])
    widths = {name: max(len(name), *(len(cells[case, name]) for case in cases)) for name in tools}
    lines = ["  ".join(["case".ljust(first), *(name.ljust(widths[name]) for name in tools)])]
    lines += ["  ".join([case.ljust(first), *(cells[case, t].ljust(widths[t]) for t in tools)]) for case in cases]
    lines.append("")
    for row in summary(table).itertuples():
        said = f"{row.tool} {row.version}".rstrip() + ": "
        if row.clean:
            said += (
                f"{row.found}/{row.leaks} leaks found, {row.alarms} alarms in {row.clean} cases where nothing leaks, "
                f"kind right {row.kind_right}, place right {row.place_right}, {row.seconds:.1f} s a case"
            )
        lines.append(said + ("; " * bool(row.clean) + row.no_answer if row.no_answer else ""))
    lines += ["", *(f"{sign}  {meaning}" for sign, _, meaning in MARKS.values())]
    lines.append("k  right kind · o  right owner (a path that holds it) · l  right line (that allocated it)")
    absent = table[table.status == "not installed"].drop_duplicates("tool")
    lines += [f"{row.tool}: not installed: {row.reason}" for row in absent.itertuples()]
    failed = table[table.status.isin(["crashed", "timed out"])]
    lines += [f"{row.tool} on {row.case}: {row.status}: {row.reason}" for row in failed.itertuples()]
    return "\n".join(line.rstrip() for line in lines)


def title(table: pd.DataFrame) -> str:
    """What the table shows, in a sentence, from its numbers."""
    rows = summary(table)
    rows = rows[rows.leaks > 0]
    if rows.empty:
        return "No tool had a leak to find"
    clean = rows.assign(score=(rows.found - rows.alarms) / rows.leaks).sort_values("score", ascending=False)

    def said(row: Any) -> str:
        return f"{row.tool} finds {row.found} of {row.leaks} leaks with {row.alarms} false alarms"

    best = [said(row) for row in clean.head(2).itertuples()]
    return "; ".join(best)


def figure(table: pd.DataFrame) -> go.Figure:
    """Cases down, tools across; colour and word say the same. The title states the two best tools' figures.

    Parameters
    ----------
    table : pandas.DataFrame
        From :meth:`o1lab.memory.head_to_head.Comparison.table`.
    """
    import plotly.graph_objects as go

    from o1lab import plots

    answered = table.tool[table.status == "ran"].unique()
    table = table[table.tool.isin(answered)] if len(answered) else table  # a tool without one answer has no column
    table = table.sort_values("group", key=lambda group: group != "leak", kind="stable")  # leaks above, the rest below
    tools, cases = list(dict.fromkeys(table.tool)), list(dict.fromkeys(table.case))
    rows = {(row.case, row.tool): row for row in table.itertuples()}
    grid = [[rows[case, name] for name in tools] for case in cases]
    names = [case.replace("_", " ") for case in cases]
    steps = [(edge, MARKS[kind][1]) for n, kind in enumerate(ORDER) for edge in (n / len(ORDER), (n + 1) / len(ORDER))]
    chart = go.Figure(
        go.Heatmap(
            z=[[ORDER.index(mark(row)) for row in line] for line in grid], x=tools, y=names,
            customdata=[[row.reason for row in line] for line in grid],
            hovertemplate="%{y} · %{x}<br>%{customdata}<extra></extra>",
            zmin=-0.5, zmax=len(ORDER) - 0.5, colorscale=steps, showscale=False, xgap=2, ygap=2,
        )
    )  # fmt: skip
    notes: list[dict[str, Any]] = []  # set at once: plotly looks at all of them again for each that is added
    for case, line in zip(names, grid, strict=True):
        for name, row in zip(tools, line, strict=True):
            said, dark = SHORT.get(row.status, word(row)), mark(row) in ("right", "alarm")
            font = {"size": 13, "color": "#ffffff" if dark else "#444444"}
            text = f"<b>{said}</b>" if dark else said
            notes.append({"x": name, "y": case, "text": text, "showarrow": False, "font": font})
    leaks = sum(rows[case, tools[0]].group == "leak" for case in cases)
    if 0 < leaks < len(cases):
        chart.add_hline(y=leaks - 0.5, line={"color": "#1a1a1a", "width": 2, "dash": "dash"})
    notes.append({
        "x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top", "align": "left",
        "text": LEGEND, "showarrow": False, "font": {"size": 14},
    })  # fmt: skip
    heading = plots.titled(title(table), plots.TITLE_COLUMNS + 14)
    margin = {"l": 260, "r": 60, "t": 225, "b": 90}
    chart.update_layout(title_text=heading, height=margin["t"] + margin["b"] + 24 * len(cases), margin=margin)
    chart.update_layout(template="o1lab", hovermode="closest", annotations=notes)
    chart.update_xaxes(title_text="tool", title_standoff=90, side="top", tickangle=-35, showgrid=False, ticks="")
    chart.update_yaxes(
        title_text="case",
        title_standoff=24,
        automargin=True,
        autorange="reversed",
        showgrid=False,
        ticks="",
        tickfont={"size": 13},
    )
    return chart
