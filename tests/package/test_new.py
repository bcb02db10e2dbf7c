"""``python -m o1lab new``: a copy of the template that keeps the rules, and every refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from structure import rules

from o1lab import claims, new, paths
from o1lab.errors import NotebookError, ResultsError

MORE = {"exercises": ["2 to 3 exercises are wanted, found 1"]}
"""What a copy leaves to its author."""
NOTEBOOKS = paths.PACKAGE.parent / "notebooks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_a_copy_keeps_every_rule_once_its_claim_has_a_row(folder):
    path = new.new("42_queue_length", "Watch the queue of a server", folder)
    ledger = {claim.id: claim.notebook for claim in claims.load().values()} | {"template": "42_queue_length"}
    page = rules.read(path, ledger)
    assert {name: found for name, check in rules.RULES.items() if (found := check(page))} == MORE
    assert page.cells[0].lines[0] == "# 42 · Watch the queue of a server"


def test_ids_are_new_and_the_rest_is_the_template(folder):
    one, two = new.new("42_queue", folder=folder), new.new("43_queue", folder=folder)
    template, first, second = (json.loads(p.read_text("utf-8")) for p in (folder / "_template.ipynb", one, two))
    ids = [{cell["id"] for cell in notebook["cells"]} for notebook in (template, first, second)]
    assert not ids[0] & ids[1]
    assert not ids[1] & ids[2]
    assert first["cells"][0]["source"][0] == "# 42 · Measure queue\n"
    changed = [a["source"] != b["source"] for a, b in zip(template["cells"], first["cells"], strict=True)]
    assert sum(changed) == 2, "the title and the start cell"
    assert 'o1lab.start("42_queue"' in one.read_text("utf-8").replace('\\"', '"')


def test_the_extension_may_be_given(folder):
    assert new.new("42_queue.ipynb", folder=folder).name == "42_queue.ipynb"


@pytest.mark.parametrize(
    "name",
    ["queue", "4_queue", "42-queue", "42_Queue", "42_", "42__queue", "../42_queue", "42_queue/x", "", "٤٢_queue"],
)
def test_a_name_off_the_pattern_is_refused(folder, name):
    before = sorted(folder.rglob("*"))
    with pytest.raises(NotebookError, match="05_my_question"):
        new.new(name, folder=folder)
    assert sorted(folder.rglob("*")) == before


def test_a_taken_number_is_refused_and_free_ones_named(folder):
    with pytest.raises(NotebookError, match=r"taken by 01_memory_leak; free numbers: \d\d, "):
        new.new("01_other", folder=folder)


@pytest.mark.parametrize("title", ["", "  ", "two\nlines"])
def test_a_title_of_no_or_many_lines_is_refused(folder, title):
    with pytest.raises(NotebookError, match="one line"):
        new.new("42_queue", title, folder)


def test_a_missing_or_damaged_template_is_named(folder):
    (folder / "_template.ipynb").write_text("{", encoding="utf-8")
    with pytest.raises(NotebookError, match="_template.ipynb is missing or damaged"):
        new.new("42_queue", folder=folder)
    (folder / "_template.ipynb").unlink()
    with pytest.raises(NotebookError, match="restore it from git"):
        new.new("42_queue", folder=folder)
    assert not (folder / "42_queue.ipynb").exists()


def test_an_unwritable_folder_is_a_results_error(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ResultsError):
        new.new("42_queue", folder=folder)
    assert not list(folder.glob("*42_queue*"))


def test_the_command_says_what_comes_next(folder, monkeypatch, capsys):
    from o1lab.__main__ import main

    monkeypatch.setenv("O1LAB_NOTEBOOKS", str(folder))
    assert main(["new", "42_queue"]) == 0
    out = capsys.readouterr().out
    assert "42_queue.ipynb" in out
    assert "claims.toml" in out
    assert main(["new", "42_queue"]) == 2
    assert capsys.readouterr().err.startswith("o1lab: the number 42 is taken")
