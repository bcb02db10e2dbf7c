"""``bench chains``: a model over LTC-Bench, by family and length."""

from __future__ import annotations

import json

import pytest

from o1lab import __main__ as cli
from o1lab.chains import accuracy, bench


def test_the_table_says_what_the_results_file_says(tmp_path, capsys):
    figures, results = tmp_path / "figures.json", tmp_path / "results.jsonl"
    asked = ["--device", "cpu", "--n", "3", "--lengths", "8", "16", "--tasks", "symbols", "hops"]
    assert accuracy.main([*asked, "--json", str(figures), "--out", str(results)]) == 0
    said = capsys.readouterr().out
    made = json.loads(figures.read_text("utf-8"))
    assert made["problems"] == 12
    assert list(made["right"]) == ["symbols 8", "symbols 16", "hops 8", "hops 16"]
    assert all(share["n"] == 3 and share["value"] > 0.5 for share in made["right"].values())
    lines = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    ids = {one.id for task in ("symbols", "hops") for one in bench.problems(task, lengths=(8, 16), n=3)}
    assert ids == {line["id"] for line in lines if "id" in line}
    rows = [line.split() for line in said.splitlines() if line.startswith(("    8", "   16"))]
    assert [row[0] for row in rows] == ["8", "16"]
    assert accuracy.main([*asked, "--out", str(results)]) == 0  # all of it is there
    assert "12 of the results were in results.jsonl" in capsys.readouterr().out


def test_a_broken_model_is_not_scored_as_right(tmp_path, capsys):
    assert accuracy.main(["--model", "tiny", "--device", "cpu", "--n", "1", "--lengths", "8", "--tasks", "hops"]) == 0
    said = capsys.readouterr().out
    assert "  8  0 [0, 0.7935] (n=1)" in said


@pytest.mark.parametrize(("wrong", "words"), [
    (["--model", "nothing-like-it"], "nothing-like-it"), (["--device", "cuda:77"], "cuda"),
])  # fmt: skip
def test_what_is_not_there_ends_in_one_line(wrong, words, capsys):
    assert cli.main(["bench", "chains", "--n", "1", "--lengths", "8", *wrong]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("wrong", [["--n", "0"], ["--lengths", "-1"], ["--tasks", "poetry"]])
def test_numbers_that_fit_nothing_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        accuracy.main(wrong)
    assert wrong[0] in capsys.readouterr().err
