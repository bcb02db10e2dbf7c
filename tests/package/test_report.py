"""The report: what it says of a run, that nothing from outside becomes markup, and each way it can fail."""

import errno
import json
import os
import re
from html.parser import HTMLParser

import pytest
from package.report_fixture import EVIL, RUN, build

from o1lab import __main__, claims, records, report, report_pages, report_view, storage
from o1lab.errors import RecordError, ResultsError, UnknownName
from o1lab.stats import Estimate


class Page(HTMLParser):
    """Text, links and script elements of a page; ``cells`` holds the table rows as lists of text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts, self.links, self.rows, self.headers, self.text = [], [], [], [], ""
        self._cell = False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "script":
            self.scripts.append(attributes)
        if tag == "a":
            self.links.append(attributes.get("href"))
        if tag == "th":
            self.headers.append(attributes.get("scope"))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        self.text += data + " "
        if self._cell:
            self.rows[-1][-1] += data + " "

    def row(self, word):
        [found] = [[" ".join(cell.split()) for cell in row] for row in self.rows if word in " ".join(row[:1]).split()]
        return found


@pytest.fixture
def folder(tmp_path):
    return build(tmp_path / RUN)


@pytest.fixture
def page(folder):
    return Page(report.write(folder).read_text(encoding="utf-8"))


def test_ledger_row_says_claim_article_measurement_verdict(page):
    assert page.row("leak-cause/host") == [
        f"{claims.load()['leak-cause/host'].title} leak-cause/host · our measure",
        "our addition; the article gives no figure",
        "768 KiB/graph 95 % interval 683.6 to 781.2, n = 10 host heap bytes in use kept per compiled graph",
        "✓ supported the whole interval is at or above 4,096 B/graph",
    ]
    limit = page.row("leak-cause/default-limit")
    assert "256" in limit[1]
    assert limit[2].startswith("8 graphs alike in all 3 observations")
    assert limit[3].startswith("✗ refuted")
    assert page.row("gone-claim")[0] == "gone-claim gone-claim · not in this version's ledger"


def test_what_could_not_be_decided_is_apart(page, folder):
    html = (folder / "index.html").read_text()
    assert page.row("leak-rate")[1:] == ["– not evaluated", "needs an NVIDIA GPU that torch can use"]
    before, fold, after = html.partition('<details id="undecided"')
    assert fold
    assert "<code>leak-rate</code>" in after.partition("</details>")[0]
    assert "<code>leak-rate</code>" not in before
    unwritten = [claim.id for claim in claims.load().values() if not claim.notebook_exists() and claim.group != "Z"]
    missing = html.partition("whose notebook is not written yet")[2].partition("</details>")[0]
    assert unwritten
    assert re.findall(r"<code>([^<]+)</code>", missing) == unwritten
    assert "template" not in re.findall(r"<code>([^<]+)</code>", html)


def test_tally_counts_each_outcome(page):
    assert re.search(r"1\s+✓\s+supported\s+2\s+✗\s+refuted\s+1\s+\?\s+inconclusive\s+1\s+–\s+beyond", page.text)


def test_run_facts_and_failed_notebook(page, folder):
    for fact in ("cpu · Test CPU", "2026-01-02 03:04 UTC", "commit 0123456789, with uncommitted changes", "smoke", RUN):
        assert fact in page.text
    assert page.row("02_broken") == [
        "02_broken", "✗ failed", "3 s", "cell 2/2 (Reproduce): ValueError: bad",
    ]  # fmt: skip
    assert page.row("03_never")[1] == "… pending"
    assert "02_broken.html" in page.links
    assert "03_never.html" not in page.links
    broken = Page((folder / "02_broken.html").read_text()).text
    assert "cell 2/2 (Reproduce): ValueError: bad" in broken
    assert "no verdict of it counts" in broken


def test_every_local_link_leads_to_a_file(folder):
    report.write(folder)
    for path in folder.glob("*.html"):
        for link in Page(path.read_text()).links:
            if not link.startswith(("#", "http")):
                assert (folder / link.partition("#")[0]).is_file(), f"{path.name} → {link}"


def test_a_record_of_a_failed_notebook_does_not_count(folder):
    manifest = json.loads((folder / "run.json").read_text())
    manifest["notebooks"][1]["status"] = "failed"
    records.write_json(folder / "run.json", manifest)
    page = Page(report.write(folder).read_text())
    assert (
        "leak-cause/host"
        not in page.text.partition("Ledger")[2].partition("This run")[0].partition("not judged in this run")[0]
    )
    assert "the record of 01_memory_leak is not counted" in page.text


def test_code_is_on_one_page_only(folder):
    report.write(folder)
    plain, code = ((folder / name).read_text() for name in ("01_memory_leak.html", "01_memory_leak.code.html"))
    assert "print" not in Page(plain).text
    assert "print" in Page(code).text
    assert plain.count('<figure class="plot"') == code.count('<figure class="plot"') == 1
    assert "01_memory_leak.code.html" in Page(plain).links
    assert "index.html" in Page(code).links
    assert "3 lines of messages" in plain


def test_figures_have_one_caption_and_the_shared_script(folder):
    html = report.write(folder).read_text()
    assert html.count('<figure class="plot"') == 2, "signature figures only"
    assert 'src="figures/01_memory_leak--leak.png"' in html
    assert 'alt="1,444 B per request with the view, 12 with the mean."' in html
    assert [script["src"] for script in Page(html).scripts if "src" in script] == ["report.js", "plotly.min.js"]
    page = (folder / "01_memory_leak.html").read_text()
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert "1,444" not in data, "the caption is text on the page, not drawn"
    assert "title" not in json.loads(data)["layout"]
    assert page.count("1,444 B per request with the view, 12 with the mean.</figcaption>") == 1
    assert page.count('<p class="figure-title">One float keeps a whole row alive</p>') == 1


def test_offline_and_small(folder):
    report.write(folder)
    for path in [*folder.glob("*.html"), folder / "style.css", folder / "report.js"]:
        text = path.read_text()
        assert not re.search(r"""(src|href|url\(|@import)\s*=?\s*["'(]?https?:""", re.sub(r"<a [^>]*>", "", text)), path
        assert "require.js" not in text
        assert "mathjax" not in text.lower()
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 8 * 2**20


def test_nothing_from_outside_becomes_markup(tmp_path):
    folder = build(tmp_path / RUN, evil=EVIL)
    report.write(folder)
    second = build(tmp_path / "second", "20260102-030405-cafe", evil=EVIL)
    report.compare(folder, second)
    for path in [*folder.glob("*.html"), *second.glob("compare*.html")]:
        html = path.read_text()
        shown_raw = path.name.startswith(("01_", "02_"))  # a notebook's own HTML stays; the page's policy disarms it
        assert "Content-Security-Policy" in html
        assert "script-src 'self' file:;" in html
        if not shown_raw:
            assert EVIL not in html, path.name
        assert "<script>document" not in html.partition('<article class="notebook">')[0], path.name


def test_scripts_in_json_cannot_end_their_element():
    text = report_pages.safe_json({"title": "</script><!--<script>"})
    assert "<" not in text
    assert json.loads(text) == {"title": "</script><!--<script>"}


def test_tables_name_their_headers(page):
    assert page.headers
    assert set(page.headers) <= {"col", "row"}


def test_corrupt_record_is_named_and_the_rest_shown(folder):
    path = records.record_path(folder, "01_memory_leak")
    path.write_text(path.read_text()[:200])
    page = Page(report.write(folder).read_text())
    assert "01_memory_leak.json is truncated" in page.text
    assert str(folder) not in page.text, "no absolute paths on a page that is passed on"
    assert page.row("leak-cause/default-limit")[3].startswith("✗ refuted")
    assert "leak-cause/host" not in [row[0].split()[-4] for row in page.rows if row and "supported" in row[-1]]


def test_corrupt_manifest_notebook_and_figure_are_named(folder):
    (folder / "run.json").write_text("{")
    (folder / "notebooks" / "00_start_here.ipynb").write_text("no notebook")
    (folder / "figures" / "01_memory_leak--leak.json").write_text("[")
    page = Page(report.write(folder).read_text())
    for problem in ("run.json is truncated", "00_start_here.ipynb cannot be read", "leak.json cannot be read"):
        assert problem in page.text
    assert page.row("leak-cause/host")[3].startswith("✓ supported")


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RecordError, match="holds no run"):
        report.write(tmp_path)
    with pytest.raises(RecordError, match="holds no run"):
        report.compare(tmp_path, tmp_path)


def test_full_disk_leaves_the_earlier_page(folder, monkeypatch):
    before = report.write(folder).read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "write", full)
    with pytest.raises(ResultsError, match="disk is full"):
        report.write(folder)
    assert (folder / "index.html").read_bytes() == before
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_unwritable_folder(folder, monkeypatch, code):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_CREAT and str(path).startswith(str(folder)):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    monkeypatch.setattr(storage.os, "open", refuse)
    with pytest.raises(ResultsError, match=f"cannot write to {re.escape(str(folder))}: .*(permission|read-only)"):
        report.write(folder)
    assert not (folder / "index.html").exists()


def second_run(tmp_path):
    """Another device, where leak-cause/host comes out the other way and leak-rate/host is higher."""
    other = build(tmp_path / "b", "20260103-000000-cafe", device="cuda:0 · NVIDIA H200", preset="full")
    path = records.record_path(other, "01_memory_leak")
    content = json.loads(path.read_text())
    for verdict in content["verdicts"]:
        if verdict["claim"] == "leak-cause/host":
            verdict["outcome"] = "refuted"
    for estimate in content["estimates"]:
        if estimate["claim"] == "leak-rate/host":
            estimate.update(value=2048.0, low=2000.0, high=2100.0)
    content["verdicts"] = [item for item in content["verdicts"] if item["claim"] != "gone-claim"]
    content["sha256"] = records.digest(content)
    path.write_text(json.dumps(content))
    return other


def test_compare_marks_changes_and_differences(folder, tmp_path):
    other = second_run(tmp_path)
    out = report.compare(folder, other)
    assert out == other / f"compare--{RUN}.html"
    page = Page(out.read_text())
    changed = page.row("leak-cause/host")
    assert (changed[1][:11], changed[2][:9]) == ("✓ supported", "✗ refuted")
    assert changed[3].startswith("≠ changed")
    higher = page.row("leak-rate/host")
    assert higher[3] == "= same verdict B − A: +2,047 B/request (intervals apart)"
    assert page.row("gone-claim")[3] == "only in A"
    assert page.row("device") == ["device", "cpu · Test CPU", "cuda:0 · NVIDIA H200"]
    assert page.row("preset") == ["preset", "smoke", "full"]
    assert not [row for row in page.rows if row and row[0].startswith("libraries")], "what is alike is not listed"
    assert "1 of 4 verdicts differ" in page.text
    assert report.compare(folder, other, tmp_path / "x.html") == tmp_path / "x.html"


@pytest.mark.parametrize(
    ("estimate", "value"),
    [
        (Estimate(1444.0, 1400.0, 1500.0, 3, "B/request"), "1,444 B/request"),
        (Estimate(5 * 2**20, 5 * 2**20, 6 * 2**20, 3, "B/graph"), "5 MiB/graph"),
        (Estimate(-14.136, -14.7, -13.6, 2, "%"), "−14.14 %"),
        (Estimate(0.05, 0.0, 0.2, 20, "1"), "0.05"),
        (Estimate(2.5, 2.0, 3.0, 20, "×"), "2.5×"),
        (Estimate(0.0, 0.0, 30.0, 20, "B/request"), "0 B/request"),
    ],
)
def test_quantities_are_readable(estimate, value):
    assert report_view.measured(estimate).value == value


def test_command_finds_runs(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("O1LAB_RESULTS", str(tmp_path))
    assert __main__.main(["report"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / RUN / "index.html")
    assert report.find(RUN) == report.find(RUN[:10]) == folder
    assert report.find(str(folder)) == folder
    with pytest.raises(UnknownName, match=f"unknown run 'nope'.*{RUN}"):
        report.find("nope")
    assert __main__.main(["report", "nope"]) == 2
    assert "unknown run" in capsys.readouterr().err
    assert __main__.main(["report", RUN, "--out", "x.html"]) == 2
    second_run(tmp_path)
    assert __main__.main(["report", RUN, "b", "--out", str(tmp_path / "c.html")]) == 0
    assert (tmp_path / "c.html").is_file()


def test_no_finished_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("O1LAB_RESULTS", str(tmp_path))
    assert __main__.main(["report"]) == 2
    assert "no finished run" in capsys.readouterr().err
