"""Figures of the remedies: a forest of paired differences by kind of decay, the harm of a bias, how answers ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from o1lab.decoding.stopping import KINDS
from o1lab.plots import STYLES
from o1lab.stats import Estimate

if TYPE_CHECKING:
    import pandas as pd

ROLES = {"as written": "broken", "ours": "fixed", "control": "control"}

FAINT = {"fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.35}


def forest(frame: pd.DataFrame, roles: Mapping[str, str], title: str) -> go.Figure:
    """Paired differences with their intervals, a column for each decay and a row for each remedy.

    Parameters
    ----------
    frame : DataFrame
        Of :func:`o1lab.decoding.trials.table`.
    roles : mapping of str to str
        Remedy to ``"as written"``, ``"ours"`` or ``"control"``; its order is that of the rows, from above.
    """
    decays = list(dict.fromkeys(frame["decay"]))
    names = [name for name in roles if name in set(frame["remedy"])]
    figure = make_subplots(1, len(decays), shared_yaxes=True, subplot_titles=decays, horizontal_spacing=0.04)
    shown: set[str] = set()
    for column, decay in enumerate(decays, 1):
        part = frame[frame["decay"] == decay].set_index("remedy")
        for role, style in ((role, STYLES[name]) for role, name in ROLES.items()):
            mine = part.loc[[name for name in names if roles[name] == role and name in part.index]]
            spread = {"array": mine["high"] - mine["difference"], "arrayminus": mine["difference"] - mine["low"]}
            figure.add_scatter(
                x=mine["difference"], y=list(mine.index), mode="markers", name=role, legendgroup=role, row=1,
                col=column, showlegend=role not in shown and not mine.empty,
                error_x={"type": "data", "thickness": 2, **spread},
                marker={"color": style.colour, "symbol": style.symbol, "size": 11},
            )  # fmt: skip
            shown |= set() if mine.empty else {role}
        figure.add_vline(x=0, line={"color": "#000000", "dash": "dash", "width": 1}, row=1, col=column)
        for name in names:
            if name not in part.index:
                figure.add_annotation(x=-60, y=name, text="–", showarrow=False, row=1, col=column,
                                      font={"color": "#767676", "size": 24})  # fmt: skip
    figure.update_xaxes(range=[-112, 112], tickvals=[-50, 0, 50])
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], range=[-0.6, len(names) - 0.4])
    middle = (len(decays) + 1) // 2
    for column in range(1, len(decays) + 1):
        text = "whole chains right, with the remedy minus without (points)" if column == middle else " "
        figure.update_xaxes(title_text=text, row=1, col=column)
    figure.update_yaxes(title_text="remedy", row=1, col=1)
    figure.update_layout(title_text=title, template="o1lab", hovermode="closest", margin={"r": 24})
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.1, "yanchor": "bottom", "x": 0})
    return figure


def harm(curves: Mapping[str, Mapping[float, Estimate]], title: str) -> go.Figure:
    """Per-step accuracy against the strength of the bias: a line with its band for each of at most three cases."""
    figure = go.Figure()
    for style, (name, curve) in zip(
        (STYLES[role] for role in ("fixed", "broken", "control")), curves.items(), strict=False
    ):
        strengths, values = list(curve), list(curve.values())
        spread = {"array": [v.high - v.value for v in values], "arrayminus": [v.value - v.low for v in values]}
        figure.add_scatter(
            x=strengths, y=[v.value for v in values], name=name, mode="lines+markers",
            error_y={"type": "data", "thickness": 2, **spread}, marker={"symbol": style.symbol, "size": 9},
            line={"color": style.colour, "dash": style.dash, "width": 3},
        )  # fmt: skip
    figure.add_vline(x=0.3, line={"color": "#000000", "dash": "dash", "width": 1})
    figure.add_annotation(x=0.3, y=1, yref="paper", text="as written", showarrow=False, xanchor="left", xshift=6)
    figure.update_xaxes(title_text="strength of the bias, α")
    figure.update_yaxes(title_text="steps right (%)", range=[0, 106])
    figure.update_layout(title_text=title, template="o1lab", margin={"r": 24}, showlegend=True)
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure


def stopping(ended: Mapping[str, Mapping[str, Estimate]], title: str) -> go.Figure:
    """How answers ended under each rule: stacked shares of exact, premature and overrun."""
    figure, names = go.Figure(), list(ended)
    looks = dict(zip(KINDS, (("fixed", ""), ("broken", "/"), ("control", "x")), strict=True))
    for kind in KINDS:
        role, pattern = looks[kind]
        shares = [100 * ended[name][kind].value for name in names]
        figure.add_bar(
            y=names, x=shares, name=kind, orientation="h",
            marker={"color": STYLES[role].colour, "pattern": {"shape": pattern, **FAINT}},
            text=[f"{share:.0f} %" if share >= 6 else "" for share in shares], textposition="inside",
            insidetextanchor="middle", textfont={"color": "#ffffff"}, textangle=0,
        )  # fmt: skip
    figure.update_xaxes(title_text="answers (%)", range=[0, 100])
    figure.update_yaxes(title_text="stop rule", categoryorder="array", categoryarray=names[::-1])
    figure.update_layout(title_text=title, template="o1lab", barmode="stack", bargap=0.35, margin={"r": 24})
    figure.update_layout(showlegend=True)
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"})
    return figure


def best(frame: pd.DataFrame, decay: str) -> Sequence[str]:
    """The remedies of a decay whose gain holds after Holm, the greatest first."""
    part = frame[(frame["decay"] == decay) & (frame["Holm p"] < 0.05) & (frame["difference"] > 0)]
    return part.sort_values("difference", ascending=False)["remedy"].tolist()
