"""LTC-Bench: the same bytes every time, folders whole or not at all, read back; reasoning-gym through one interface."""

from __future__ import annotations

import json
import re
import sys
import types
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from o1lab.chains import bench, dataset, reasoning
from o1lab.chains.samples import TASKS
from o1lab.errors import ChainError, UnknownName

SMALL = {"lengths": (3, 5), "n": 8}
PART = "e1bbd5a18098b2905d7001774b9304c270e80288973bfbdf16948bee83779261"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return bench.export(tmp_path_factory.mktemp("bench") / "ltc", **SMALL)


def test_a_part_of_the_benchmark_is_the_same_bytes():
    assert bench.sha256(bench.problems(lengths=(8, 64, 256), n=4)) == PART


@pytest.mark.slow
def test_the_whole_benchmark_is_the_same_bytes():
    assert bench.sha256(bench.problems()) == bench.SHA256


def test_the_main_grid_is_three_families_by_eight_lengths_by_512():
    assert len(TASKS) * len(bench.LENGTHS) * bench.PER_CELL == 12_288
    found = Counter((sample.task, sample.length) for sample in bench.problems(n=1))
    assert found == {(task, steps): 1 for task in TASKS for steps in (8, 16, 32, 64, 96, 128, 192, 256)}


def test_factor_cells_change_one_thing_and_keep_the_problems():
    main = {sample.id: sample for sample in bench.problems(n=2)}
    cells: Counter[str] = Counter()
    for cell, sample in bench.factors(n=2):
        cells[cell] += 1
        twin = main[f"{sample.task}-{sample.length}-{sample.seed}-{sample.number}"]
        same = {step.label: step for step in twin.steps}
        assert all(same[step.label].state == step.state for step in sample.steps)
        assert set(sample.program) == set(twin.program)
        changed = {name for name in ("first", "order", "facts") if sample.factors[name] != twin.factors[name]}
        changed |= {"asked"} if len(sample.steps) < sample.length and sample.factors["first"] == 1 else set()
        assert changed == {{"short": "asked", "late": "first", "shuffled": "order", "distract": "facts"}[cell]}
    assert cells == {"short": 24, "late": 24, "shuffled": 12, "distract": 4}


def test_json_lines_hold_the_samples_and_both_styles(exported):
    for task in TASKS:
        path = exported.folder / "jsonl" / f"main-{task}.jsonl"
        assert list(bench.read(path)) == list(bench.problems(task, **SMALL))
        row = json.loads(path.read_text("ascii").splitlines()[0])
        assert row["prompt_tokens"].startswith("<bos> ")
        assert row["prompt_language"].endswith(".\n")
        assert row["gold_language"].endswith(f"Answer: {row['answer_language']}")
        assert row["gold_tokens"].endswith(row["answer_tokens"])
        assert row["cell"] == "main"
    factors = exported.folder / "jsonl" / "factors-hops.jsonl"
    assert [sample.id for sample in bench.read(factors)] == [sample.id for _, sample in bench.factors("hops", n=2)]


def test_parquet_holds_the_same_rows(exported):
    for path in sorted((exported.folder / "jsonl").glob("*.jsonl")):
        table = pyarrow.parquet.read_table(exported.folder / "data" / f"{path.stem}.parquet")
        assert table.schema.equals(dataset.schema())
        assert table.to_pylist() == [json.loads(line) for line in path.read_text("ascii").splitlines()]
    assert len(list((exported.folder / "data").iterdir())) == 6


def test_the_card_names_files_that_are_there(exported):
    _, front, text = (exported.folder / "README.md").read_text("utf-8").split("---\n", 2)
    configs = yaml.safe_load(front)["configs"]
    assert [config["config_name"] for config in configs] == ["all", *TASKS]
    for config in configs:
        found = [list(exported.folder.glob(files["path"])) for files in config["data_files"]]
        assert [len(paths) for paths in found] == ([3, 3] if config["config_name"] == "all" else [1, 1])
        assert [files["split"] for files in config["data_files"]] == ["test", "factors"]
    assert exported.sha256["main"] in text
    assert "--seed 0 --lengths 3,5 --n 8" in text
    about = json.loads((exported.folder / bench.MANIFEST).read_text("utf-8"))
    assert about["rows"] == exported.rows == {"main": 48, "factors": 64}
    assert about["sha256"]["main"] == exported.sha256["main"] == bench.sha256(bench.problems(**SMALL))


def test_hugging_face_datasets_loads_the_folder(exported, tmp_path):
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(str(exported.folder), cache_dir=str(tmp_path))
    assert {name: len(split) for name, split in loaded.items()} == {"test": 48, "factors": 64}
    hops = datasets.load_dataset(str(exported.folder), "hops", split="test", cache_dir=str(tmp_path))
    assert [row["id"] for row in hops] == [sample.id for sample in bench.problems("hops", **SMALL)]
    assert hops[0]["steps"][0]["state"] == next(bench.problems("hops", **SMALL)).steps[0].state


def test_a_folder_in_use_is_refused(tmp_path):
    out = tmp_path / "ltc"
    out.mkdir()
    bench.export(out, lengths=(2,), n=1)
    with pytest.raises(ChainError, match="holds an export already.*--force"):
        bench.export(out, lengths=(2,), n=1)
    (out / "extra.txt").write_text("old", encoding="utf-8")
    again = bench.export(out, lengths=(3,), n=1, force=True)
    assert not (out / "extra.txt").exists()
    assert json.loads((out / bench.MANIFEST).read_text("utf-8"))["lengths"] == [3]
    assert again.rows["main"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["ltc"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_something_else_is_never_replaced(tmp_path, force):
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(ChainError, match="holds no earlier export"):
        bench.export(tmp_path, lengths=(2,), n=1, force=force)
    with pytest.raises(ChainError, match="is a file"):
        bench.export(tmp_path / "thesis.tex", lengths=(2,), n=1, force=force)
    assert (tmp_path / "thesis.tex").read_text("utf-8") == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("before", [False, True])
def test_an_interrupted_export_leaves_what_was_there(tmp_path, monkeypatch, error, before):
    out = tmp_path / "ltc"
    if before:
        bench.export(out, lengths=(2,), n=1)
    kept = sorted(path.name for path in out.rglob("*"))

    def stop(*_):
        raise error

    monkeypatch.setattr(dataset, "write_folder", stop)
    with pytest.raises((KeyboardInterrupt, ChainError), match="No space|^$"):
        bench.export(out, lengths=(2,), n=1, force=True)
    assert sorted(path.name for path in out.rglob("*")) == kept
    assert [path.name for path in tmp_path.iterdir()] == (["ltc"] if before else [])


def test_an_export_that_cannot_get_its_name_leaves_the_old_one(tmp_path, monkeypatch):
    out = tmp_path / "ltc"
    bench.export(out, lengths=(2,), n=1)
    rename = Path.rename

    def fails(path, target):
        if path.suffix == ".part":
            raise OSError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(ChainError, match="Permission denied"):
        bench.export(out, lengths=(3,), n=1, force=True)
    assert json.loads((out / bench.MANIFEST).read_text("utf-8"))["lengths"] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["ltc"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "at least one"),
        ({"lengths": (8, 8)}, "each length once"),
        ({"lengths": (0,)}, "lengths=0 must be from 1 to 512"),
        ({"lengths": (600,)}, "lengths=600"),
        ({"n": 0}, "n=0 must be at least 1"),
        ({"seed": "0"}, "seed='0'"),
    ],
)
def test_bad_sizes_are_named_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ChainError, match=message):
        bench.export(tmp_path / "ltc", **options)
    assert not list(tmp_path.iterdir())


def test_a_bad_line_is_named_by_its_number(tmp_path):
    lines = [bench.line(sample) for sample in bench.problems("hops", **SMALL)][:3]
    path = tmp_path / "part.jsonl"
    for bad, message in (
        (lines[1][:50] + b"\n", "line 2: "),
        (b"[1]\n", "line 2: this is no chain problem"),
        (b"\xff\xfe\n", "line 2: "),
        (lines[1].replace(b'"start":"e', b'"start":"x'), "line 2: .*no fact says"),
    ):
        path.write_bytes(lines[0] + bad + lines[2])
        found = bench.read(path)
        assert next(found).id == "hops-3-0-0"
        with pytest.raises(ChainError, match=message):
            next(found)
    path.write_bytes(lines[0] + b"\n" + lines[2])
    assert len(list(bench.read(path))) == 2
    with pytest.raises(ChainError, match="cannot be read: No such file"):
        list(bench.read(tmp_path / "none.jsonl"))


def test_the_command_prints_hashes_and_refuses_in_one_line(tmp_path, capsys):
    asked = ["--out", str(tmp_path / "ltc"), "--lengths", "2,3", "--n", "2", "--seed", "7"]
    assert bench.main(asked) == 0
    printed = capsys.readouterr().out
    assert "12 problems and 32 in the split factors" in printed
    assert re.search(r"sha256 main     [0-9a-f]{64}\n", printed)
    assert "27 done" not in printed
    assert "LTC-Bench, cells: 9 done" in printed
    assert bench.main(asked) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert bench.main([*asked, "--force"]) == 0
    assert bench.main(["--out", str(tmp_path / "x"), "--n", "0"]) == 2
    for wrong in (["--lengths", "8;9"], ["--n", "many"], []):
        with pytest.raises(SystemExit):
            bench.main([*(["--out", str(tmp_path / "x")] if wrong else []), *wrong])
    assert [path.name for path in tmp_path.iterdir()] == ["ltc"]


# reasoning-gym


class Source:
    """Stands in for a data set of reasoning-gym."""

    def __init__(self, name: str, size: int, seed: int, **options):
        assert options["max_terms"] < 50, "max_terms must be below 50"
        self.name, self.size, self.seed, self.options = name, size, seed, options

    def __getitem__(self, number: int) -> dict:
        terms = [self.seed + number, *range(1, self.options["max_terms"])]
        expression = " - ".join(map(str, terms))
        return {"question": f"{expression} =", "answer": str(terms[0] - sum(terms[1:])),
                "metadata": {"expression": expression}}  # fmt: skip

    def score_answer(self, answer: str, entry: dict) -> float:
        return 1.0 if answer == entry["answer"] else 0.25


@pytest.fixture
def fake_gym(monkeypatch):
    module = types.ModuleType("reasoning_gym")
    module.create_dataset = Source
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for call in (lambda: reasoning.make("chain_sum", 4, 1), reasoning.version):
        with pytest.raises(ChainError, match=r"reasoning-gym is not installed: pip install 'o1lab\[gym\]'"):
            call()


@pytest.mark.usefixtures("fake_gym")
def test_puzzles_look_like_samples():
    puzzles = reasoning.make("chain_sum", 3, 2, seed=1)
    assert [puzzle.id for puzzle in puzzles] == ["chain_sum-3-1-0", "chain_sum-3-1-1"]
    first = puzzles[0]
    assert first.states == tuple(str(reasoning.SPREAD - total) for total in (1, 3, 6))
    assert first.states[-1] == first.answer
    assert first.prompt.startswith(f"{reasoning.SPREAD} - 1 - 2 - 3 =")
    assert "<answer>" in first.prompt
    assert first.score(f"I think\n<answer>{first.answer}</answer>") == 1.0
    assert first.score("Answer: 5") == 0.25
    assert first.score("  ") == 0.0
    assert not hasattr(first, "steps")


@pytest.mark.usefixtures("fake_gym")
def test_bad_requests_to_reasoning_gym_are_named():
    with pytest.raises(UnknownName, match="did you mean chain_sum"):
        reasoning.make("chainsum", 4, 1)
    with pytest.raises(ChainError, match="steps=0"):
        reasoning.make("chain_sum", 0, 1)
    with pytest.raises(ChainError, match="seed=-1"):
        reasoning.make("chain_sum", 1, 1, -1)
    with pytest.raises(ChainError, match="makes no chain_sum of 60 steps: max_terms must be below 50"):
        reasoning.make("chain_sum", 60, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer> no, <answer>\n2\n3\n</answer>", "2\n3"),
        ("<think><answer>1</answer></think>The final answer is: 2", "2"),
        ("**Answer:** `cyan`", "cyan"),
        ("so \\boxed{12} it is", "12"),
        ("first\nthe last line\n", "the last line"),
        ("", None),
    ],
)
def test_answers_are_found_in_texts(text, expected):
    assert reasoning.answer(text) == expected


@pytest.mark.parametrize("task", reasoning.TASKS)
def test_real_puzzles_of_reasoning_gym(task):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is an extra")
    puzzles = reasoning.make(task, 6, 3)
    assert puzzles == reasoning.make(task, 6, 3)
    assert len({puzzle.prompt for puzzle in puzzles}) == 3
    for puzzle in puzzles:
        assert puzzle.score(f"<answer>{puzzle.answer}</answer>") == 1.0
        assert puzzle.score("<answer>nonsense</answer>") < 1.0
        if task in ("chain_sum", "string_manipulation"):
            assert len(puzzle.states) == 6
            assert puzzle.states[-1] == puzzle.answer


def test_cells_are_checked_by_their_bytes_and_by_replay(monkeypatch):
    found = bench.check((8,))
    assert (found.problems, found.wrong) == (3 * 512, ())
    assert found.share.value == 1
    assert found.sha256 == bench.sha256(bench.problems(lengths=(8,)))
    monkeypatch.setitem(bench.CELLS, "hops", bench.CELLS["symbols"])
    assert len(bench.check((8,)).wrong) == 512
    sample = next(bench.problems("hops", lengths=(8,), n=1))
    altered = bench.line(sample).replace(b'"state":"' + sample.answer.encode() + b'"', b'"state":"e63"')
    assert bench._replays(sample, bench.line(sample))
    assert not bench._replays(sample, altered)


def test_workers_find_what_one_process_finds():
    assert bench.check((8,), workers=2) == bench.check((8,))
