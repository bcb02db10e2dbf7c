"""The report opened from disk in a real browser: drawn, quick, silent, offline, and no wider than its window."""

import pytest
from notebooks.chromium import browser, page  # noqa: F401 (fixtures)
from package.report_fixture import EVIL, RUN, build

from o1lab import report

WIDTHS = (1200, 390)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = build(tmp_path_factory.mktemp("report") / RUN)
    report.compare(build(made.parent / "other", "20260103-000000-cafe", device="cuda:0 · NVIDIA H200"), made)
    report.write(made)
    return made


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    made = build(tmp_path_factory.mktemp("evil") / RUN, evil=EVIL)
    report.write(made)
    return made


@pytest.fixture
def heard(page):  # noqa: F811
    """What the page says on its console and asks of anything but the disk."""
    said = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: said.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
    page.on("requestfailed", lambda r: said.append(r.url) if r.failure != "net::ERR_ABORTED" else None)
    return said


def pages(folder):
    return sorted(path.name for path in folder.glob("*.html"))


def see_all(page):  # noqa: F811
    """Scroll to the end, so that every figure is drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height + 600, 600):
        page.evaluate(f"window.scrollTo(0, {y})")
        page.wait_for_timeout(40)


def test_ledger_is_seen_at_once(folder, page, heard):  # noqa: F811
    page.goto((folder / "index.html").as_uri())
    page.get_by_role("heading", name="What this machine decided").wait_for()
    row = page.locator("tr", has_text="leak-cause/host").first
    assert row.is_visible()
    assert "supported" in row.inner_text()
    assert page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 2000
    figures = page.locator("figure.plot")
    assert figures.count() == 2
    for index in range(2):
        figures.nth(index).scroll_into_view_if_needed()
        figures.nth(index).locator("svg.main-svg").first.wait_for(state="visible")
        assert figures.nth(index).locator("figcaption").is_visible()
        assert not figures.nth(index).locator("img").filter(visible=True).count(), "the drawing replaces the picture"
        assert figures.nth(index).locator(".scatterlayer .trace").count() >= 3
        edge = figures.nth(index).locator(".drawing").evaluate("box => box.getBoundingClientRect().right")
        names = figures.nth(index).locator("text.annotation-text")
        assert names.count() == 3
        for name in names.all():
            assert name.evaluate("text => text.getBoundingClientRect().right") <= edge, "a line's name is cut off"
    assert heard == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_window_or_asks_the_network(folder, page, heard, width):  # noqa: F811
    page.set_viewport_size({"width": width, "height": 844})
    for name in pages(folder):
        page.goto((folder / name).as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
        see_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        drawn, figures = page.locator("figure.plot.drawn svg.main-svg").count(), page.locator("figure.plot").count()
        assert drawn >= figures, name
    assert heard == []


def test_phone_shows_cards_and_a_legend(folder, page):  # noqa: F811
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto((folder / "index.html").as_uri())
    cell = page.locator("tr", has_text="leak-cause/host").first.locator("td").nth(1)
    assert cell.evaluate("cell => getComputedStyle(cell).display") == "block"
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Measured here"'
    figure = page.locator("figure.plot").first
    figure.scroll_into_view_if_needed()
    figure.locator(".legendtext", has_text="keeps a mean").wait_for()
    assert figure.locator(".figure-title").inner_text() == "8 graphs"


def test_print_shows_the_picture_and_unfolds_what_was_not_decided(folder, page):  # noqa: F811
    page.goto((folder / "index.html").as_uri())
    see_all(page)
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    with_picture = page.locator("figure.plot", has=page.locator("img"))
    assert with_picture.locator("img").is_visible()
    assert not with_picture.locator(".drawing").is_visible()
    without = page.locator("figure.plot").filter(has_not=page.locator("img"))
    assert without.locator(".drawing").is_visible()
    assert page.locator("#undecided").evaluate("fold => fold.open")


def test_pictures_stand_in_where_scripts_are_off(folder, browser):  # noqa: F811
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()  # noqa: F811
    page.goto((folder / "index.html").as_uri())
    assert page.locator("figure.plot img").first.is_visible()
    context.close()


def test_links_lead_through_the_report(folder, page, heard):  # noqa: F811
    page.goto((folder / "index.html").as_uri())
    page.get_by_role("link", name="with code").nth(1).click()
    page.get_by_role("heading", name="01 · Find a leak").wait_for()
    assert page.locator(".input_area", has_text="print").is_visible()
    page.get_by_role("link", name="without code").click()
    assert page.locator(".input_area").count() == 0
    page.get_by_role("link", name="Sustained inference leaks GPU memory").click()
    page.locator("#undecided[open]").wait_for()
    assert heard == []


def test_nothing_from_outside_runs(evil, page):  # noqa: F811
    for name in pages(evil):
        page.goto((evil / name).as_uri())
        see_all(page)
        assert page.title() != "owned", name
        assert "o1lab" in page.title()
    page.goto((evil / "index.html").as_uri())
    assert EVIL in page.locator("h3", has_text="01 · Find a leak").inner_text()


CONTRAST = """() => {
  const light = ([r, g, b]) => {
    const part = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(node).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *:not(svg *):not(script)")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own) continue;
    const [a, b] = [light(numbers(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    const where = node.tagName + " " + node.className + ": " + node.textContent.trim().slice(0, 40);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(where);
  }
  return low;
}"""


def test_every_text_has_contrast(folder, page):  # noqa: F811
    for name in pages(folder):
        page.goto((folder / name).as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
        assert page.evaluate(CONTRAST) == [], name
        assert page.evaluate("document.documentElement.lang") == "en-GB"


def test_folder_is_small(folder):
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 8 * 2**20
