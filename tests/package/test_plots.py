"""Figures: what is refused, what is thinned, the fixed meanings, the bundle, and PNGs that never cost a notebook."""

import base64
import os
import re
import subprocess
import sys
import time

import numpy as np
import plotly.io as pio
import psutil
import pytest

from o1lab import browser, plots

WORDS = {"title": "It leaks", "x_title": "requests", "y_title": "kept (B)"}
CAPTION = "64 B per request kept, and none once fixed: the band is the 95 % interval of 12 rounds on two CPU cores."


@pytest.fixture(autouse=True)
def _no_failed_browser(monkeypatch):
    monkeypatch.setattr(plots, "_failed", set())


@pytest.fixture
def no_browser(monkeypatch):
    monkeypatch.setenv("O1LAB_BROWSER", "none")


def pair(**options):
    return plots.broken_vs_fixed([0, 1, 2], [0.0, 64.0, 128.0], [0.0, 0.0, 0.0], **{**WORDS, **options})


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_keep_their_meaning_and_are_seen_on_white():
    assert plots.COLOURS["broken"] == "#D55E00"
    assert plots.COLOURS["fixed"] == "#0072B2"
    assert plots.COLOURS["ideal"] == "#000000"
    for role, colour in plots.COLOURS.items():
        assert 1.05 / (luminance(colour) + 0.05) >= 3, role


def test_second_cues_tell_roles_apart_in_grey():
    cues = {(style.dash, style.symbol) for style in plots.STYLES.values()}
    assert len(cues) == len(plots.STYLES)
    assert plots.STYLES["ideal"].dash == "dash"


def test_template_is_registered_opaque_and_large_enough():
    assert pio.templates.default == "o1lab"
    layout = pio.templates["o1lab"].layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "#ffffff"
    assert layout.font.size >= 16  # px, 12 pt
    drawn = plots.captioned(pair(), CAPTION)
    assert min(note.font.size for note in drawn.layout.annotations) >= 16


def test_downsampling_keeps_ends_and_extremes():
    y = np.random.default_rng(0).normal(size=50_000)
    y[31_234], y[7] = 99.0, -99.0
    xs, ys = plots.downsample(np.arange(y.size), y)
    assert len(xs) <= 2000
    assert (xs[0], xs[-1]) == (0, y.size - 1)
    assert (ys.max(), ys.min()) == (99.0, -99.0)
    assert (np.diff(xs) > 0).all()
    assert (y[xs] == ys).all()


def test_downsampling_survives_gaps_and_leaves_short_series_alone():
    y = np.full(10_000, np.nan)
    y[5_000] = 3.0
    assert 3.0 in plots.downsample(range(10_000), y)[1]
    assert plots.downsample([1, 2], [3, 4])[1].tolist() == [3, 4]
    with pytest.raises(plots.FigureError, match="equal length"):
        plots.downsample([1, 2, 3], [1, 2])


def test_long_series_are_thinned_with_their_bands():
    x = np.arange(9_000)
    figure = plots.broken_vs_fixed(x, x * 2.0, x * 0.0, bands={"broken": (x * 1.5, x * 2.5)}, **WORDS)
    assert max(len(trace.x) for trace in figure.data) <= 2000
    plots.check(figure)
    band = [trace for trace in figure.data if trace.fill]
    assert len(band) == 1
    assert band[0].y[-1] == 1.5 * 8_999


def test_lines_are_named_at_their_ends_without_overlap():
    figure = plots.broken_vs_fixed([0, 1], [0, 100], [0, 1], ideal=[0, 0], control=[0, 2], **WORDS)
    assert [trace.name for trace in figure.data] == ["control", "broken", "fixed", "predicted"], "the dashes on top"
    notes = figure.layout.annotations
    assert {re.sub("<.*?>", "", note.text) for note in notes} == {"broken", "fixed", "predicted", "control"}
    heights = sorted(note.y / 100 * 0.85 * plots.PLOT_HEIGHT + note.yshift for note in notes)
    assert min(np.diff(heights)) >= 16
    assert figure.layout.margin.r >= 9 * len("predicted")


def test_bars_carry_whiskers_and_a_legend():
    bands = {"broken": ([50.0], [80.0])}
    figure = plots.broken_vs_fixed(["a"], [64.0], [0.0], kind="bar", bands=bands, labels={"broken": "leak"}, **WORDS)
    broken = figure.data[0]
    assert (broken.name, broken.marker.color) == ("leak", plots.COLOURS["broken"])
    assert (broken.error_y.array[0], broken.error_y.arrayminus[0]) == (16.0, 14.0)
    assert figure.layout.showlegend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "pie"}, "pie"),
        ({"labels": {"brokn": "x"}}, "brokn"),
        ({"bands": {"best": ([0], [1])}}, "best"),
        ({"control": [1.0]}, "control has 1 points"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(plots.FigureError, match=message):
        pair(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title_text": ""}, "no title"),
        ({"xaxis_title_text": ""}, "xaxis has no title"),
        ({"yaxis_title_text": None}, "yaxis has no title"),
    ],
)
def test_a_figure_that_says_too_little_is_refused(no_browser, change, message):
    with pytest.raises(plots.FigureError, match=message):
        plots.show(pair().update_layout(change), CAPTION)


def test_too_many_points_and_no_caption_are_refused(no_browser):
    with pytest.raises(plots.FigureError, match="2001 points"):
        plots.show(pair().add_scatter(y=[0.0] * 2001), CAPTION)
    with pytest.raises(ValueError, match="caption"):
        plots.show(pair(), "  ")


def test_bundle_has_the_figure_and_the_caption_and_no_picture_without_a_browser(no_browser, capsys):
    figure = pair()
    before = figure.to_json()
    bundle = plots.show(figure, CAPTION, "growth")
    assert set(bundle) == {"application/vnd.plotly.v1+json", "text/plain"}
    assert bundle["text/plain"] == CAPTION
    assert CAPTION in capsys.readouterr().out
    assert figure.to_json() == before, "show changed the figure"
    notes = bundle["application/vnd.plotly.v1+json"]["layout"]["annotations"]
    [caption] = [note for note in notes if note.get("name") == "caption"]
    assert caption["text"].replace("<br>", " ") == CAPTION


@pytest.mark.parametrize(
    "words", ["Short", "A finding that takes quite a few more words than one line can hold, 3 of them"]
)
def test_words_fit_600_pixels_and_the_margins_grow_with_them(words):
    drawn = plots.captioned(pair(title=words), CAPTION * 2)
    layout = drawn.layout
    lines = layout.title.text.split("<br>")
    assert max(map(len, lines)) * 11 <= 560
    caption = layout.annotations[-1].text.split("<br>")
    assert max(map(len, caption)) * 8.5 <= 600 - 80 - 20
    assert layout.margin.t >= 27 * len(lines)
    assert layout.margin.b >= 76 + 22 * len(caption)
    assert layout.height - layout.margin.t - layout.margin.b == plots.PLOT_HEIGHT


def test_named_browser_is_used_and_none_means_none(monkeypatch):
    monkeypatch.setenv("O1LAB_BROWSER", "none")
    assert plots.find_browser() is None
    assert plots.png(pair()) is None
    monkeypatch.setenv("O1LAB_BROWSER", sys.executable)
    assert plots.find_browser() == sys.executable


def script(tmp_path, monkeypatch, text):
    path = tmp_path / "browser"
    path.write_text(f"#!/bin/sh\necho $$ > {path}.pid\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("O1LAB_BROWSER", str(path))
    return path


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for a browser is a shell script")
@pytest.mark.parametrize("text", ["exit 0", "exec sleep 300"])
def test_a_browser_that_dies_or_hangs_costs_seconds_and_is_said_once(tmp_path, monkeypatch, recwarn, text):
    path = script(tmp_path, monkeypatch, text)
    begun = time.monotonic()
    assert plots.png(pair(), seconds=3) is None
    assert time.monotonic() - begun < 3 + browser.CLEAN_UP_SECONDS + 5
    begun = time.monotonic()
    assert plots.png(pair(), seconds=3) is None
    assert time.monotonic() - begun < 0.5, "a browser that failed was tried again"
    said = [str(warning.message) for warning in recwarn if "no PNG" in str(warning.message)]
    assert len(said) == 1
    assert str(path) in said[0]
    assert "O1LAB_BROWSER" in said[0]
    pid = int(path.with_name("browser.pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "a browser lives on"


IN_A_KERNEL = """
import asyncio, time, plotly.graph_objects as go
from o1lab import plots
figure = plots.broken_vs_fixed([0, 1], [0, 5], [0, 0], title="it leaks", x_title="requests", y_title="kept (B)")
async def cell():
    first = plots.png(figure)
    begun = time.monotonic()
    again = plots.png(figure)
    return first, again, time.monotonic() - begun
first, again, seconds = asyncio.run(cell())
assert first[:8] == again[:8] == b"\\x89PNG\\r\\n\\x1a\\n"
assert int.from_bytes(first[16:20], "big") == 1800, "twice 900 pixels wide"
assert seconds < 3, f"the second picture took {seconds:.1f} s: the browser was not kept open"
"""


def test_a_browser_draws_inside_a_running_event_loop_and_ends_with_the_process():
    if plots.find_browser() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium or Chrome found in CI")
        pytest.skip("no Chromium or Chrome found")
    done = subprocess.run([sys.executable, "-c", IN_A_KERNEL], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_picture_of_the_bundle_is_base64(monkeypatch):
    monkeypatch.setattr(plots, "png", lambda figure: b"picture")
    assert base64.b64decode(plots.bundle(pair(), CAPTION)["image/png"]) == b"picture"


def test_a_browser_that_is_not_there_is_said(monkeypatch):
    from o1lab.browser import find_browser

    monkeypatch.setenv("O1LAB_BROWSER", "/no/such/browser")
    with pytest.warns(UserWarning, match="O1LAB_BROWSER names '/no/such/browser', which is no program here"):
        assert find_browser() is None
