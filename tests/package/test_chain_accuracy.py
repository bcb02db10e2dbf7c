"""``bench chains``: a model over LTC-Bench, by family and length."""

from __future__ import annotations

import json

import pytest

from o1lab import __main__ as cli
from o1lab.chains import accuracy, bench
from o1lab.chains.evaluate import judge
from o1lab.chains.report import ChainReport


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


def test_what_was_not_scored_is_in_no_cell():
    samples = list(bench.problems("hops", lengths=(8, 16), n=2))
    kept = [{"text": sample.gold, "ended": "stop", "tokens": 25} for sample in samples[:1]]
    lost = {"text": "", "ended": "", "tokens": 0, "problem": "timeout"}
    results = tuple(
        judge(sample, each, "tokens") for sample, each in zip(samples, [*kept, lost, lost, lost], strict=True)
    )
    found = accuracy.cells(ChainReport(results, "stub", "tokens", 1.0))
    assert {cell: (share.value, share.n) for cell, share in found.items()} == {("hops", 8): (1.0, 1)}


def test_a_model_too_short_for_the_problems_has_no_figure(capsys):
    assert accuracy.main(["--model", "tiny", "--device", "cpu", "--n", "1", "--lengths", "8", "--tasks", "hops"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["8", "–"]


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
