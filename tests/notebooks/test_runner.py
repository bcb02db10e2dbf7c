"""The runner against notebooks that each fall into one trap of headless execution."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import nbformat
import pytest

from o1lab import collection, engine, records, run_view, runner
from o1lab.__main__ import main
from o1lab.errors import RecordError, ResultsError, RunError, UnknownName

RUN = "20260101-000000-abcd"
RECORD = """
import os
from o1lab import records
fields = dict(run_id=os.environ["O1LAB_RUN_ID"], title="t", preset="smoke", seed=0, device="cpu",
              started=records.now(), finished=records.now(), seconds=1.0)
def put(name, **changes):
    return records.write_record(os.environ["O1LAB_RUN_DIR"], records.Record(notebook=name, **{**fields, **changes}))
"""
GOOD = """
import os, sys
from pathlib import Path
import o1lab
from tqdm.auto import tqdm
lab = o1lab.start("00_good", preset=preset, seed=seed)
for _ in o1lab.progress(range(50), label="rounds"):
    pass
lab.record("leak-rate/host", requests, low=requests, high=requests, n=3, unit="B/request")
lab.note(f"{sys.executable}|{Path.cwd()}")
"""


def write(folder: Path, name: str, *cells: str, parameters: str | None = None, tags: dict[int, str] | None = None):
    """Write a notebook with a heading before each of ``cells``."""
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    book.cells.append(nbformat.v4.new_markdown_cell(f"# {name}"))
    if parameters:
        book.cells.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    for number, source in enumerate(cells):
        book.cells.append(nbformat.v4.new_markdown_cell(f"## Part {number}"))
        metadata = {"tags": [tags[number]]} if tags and number in tags else {}
        book.cells.append(nbformat.v4.new_code_cell(source.strip(), metadata=metadata))
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, folder / f"{name}.ipynb")


def quiet_report(patch: pytest.MonkeyPatch, write=lambda folder: Path(folder) / "index.html") -> None:
    fake = types.ModuleType("o1lab.report")
    fake.write = write
    patch.setitem(sys.modules, "o1lab.report", fake)
    patch.setattr("o1lab.report", fake, raising=False)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """An empty notebooks folder and a results folder, with the report left out."""
    for variable in ("O1LAB_RUN_DIR", "O1LAB_RUN_ID", "O1LAB_PRESET", "O1LAB_PARAMETERS", "O1LAB_HEADLESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("O1LAB_NOTEBOOKS", str(tmp_path / "notebooks"))
    monkeypatch.setenv("O1LAB_RESULTS", str(tmp_path / "results"))
    quiet_report(monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    """One run over all traps that need no short budget, from a foreign folder, with a foreign kernelspec about."""
    root = tmp_path_factory.mktemp("traps")
    books = root / "notebooks"
    parameters = (
        'preset = "auto"  # auto, smoke or full\nseed = 0  # seed\nrequests = 100  # requests\nrate = 1.0  # 1/s'
    )
    write(books, "00_good", GOOD, "lab.finish()", parameters=parameters)
    write(books, "01_exit", RECORD, "raise SystemExit(0)", 'put("01_exit")')
    write(books, "02_dead", "x = 1", "import os; os._exit(0)", "x = 2")
    write(books, "03_killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    write(books, "04_tagged", RECORD, "raise MemoryError('planned')", 'put("04_tagged")', tags={1: "raises-exception"})
    write(books, "05_other", RECORD, 'put("05_other", run_id="20250101-000000-ffff")')
    write(books, "06_cut", RECORD, 'path = put("06_cut"); path.write_bytes(path.read_bytes()[:200])')
    write(books, "07_stale", "print('ends, but records nothing')")
    write(books, "08_early", RECORD + 'put("08_early")', "import time; time.sleep(0.05)")
    widget = "import ipywidgets\nslider = ipywidgets.IntSlider(value=64, description='B/request')\ndisplay(slider)"
    write(books, "09_widget", widget)
    write(
        books,
        "10_quit",
        RECORD + 'put("10_quit")',
        "exit()",
        "print('the kernel is still there: exit() only asks the front end')",
    )
    write(books, "11_error", "requests = 3\n1 / 0")
    write(
        books,
        "12_misnamed",
        RECORD + 'os.replace(put("someone_else"), records.record_path(os.environ["O1LAB_RUN_DIR"], "12_misnamed"))',
    )
    write(books, "_template", RECORD + 'put("_template")')
    spec = root / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/nonexistent/python"], "display_name": "Foreign", "language": "python"}))
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        for variable in ("O1LAB_RUN_DIR", "O1LAB_RUN_ID", "O1LAB_PRESET", "O1LAB_PARAMETERS"):
            patch.delenv(variable, raising=False)
        patch.setenv("O1LAB_NOTEBOOKS", "../notebooks")
        patch.setenv("O1LAB_RESULTS", "../results")
        patch.setenv("JUPYTER_PATH", str(root / "jupyter"))
        patch.setenv("JUPYTER_DATA_DIR", str(root / "jupyter"))
        reports = []
        quiet_report(patch, lambda folder: reports.append(folder) or Path(folder) / "index.html")
        fields = {"title": "t", "preset": "smoke", "seed": 0, "device": "cpu", "seconds": 1.0}
        stale = records.Record(run_id=RUN, notebook="07_stale", started="2026", finished="2026", **fields)
        records.write_record(root / "results" / RUN, stale)
        log = io.StringIO()
        run = runner.run(preset="smoke", parameters={"requests": "250", "rate": 2}, run_id=RUN, stream=log)
    entries = {entry["name"]: entry for entry in run.manifest["notebooks"]}
    return types.SimpleNamespace(root=root, run=run, entries=entries, log=log.getvalue(), reports=reports)


def saved(traps, name: str):
    return nbformat.read(traps.run.folder / "notebooks" / f"{name}.ipynb", as_version=4)


def states(book) -> list[str]:
    return [cell.metadata.papermill["status"] for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("00_good", "ok", ""),
        ("01_exit", "failed", r"cell 2/3 \(Part 1\): SystemExit: 0"),
        ("02_dead", "dead kernel", r"cell 2/3 \(Part 1\): the kernel ended"),
        ("03_killed", "dead kernel", r"cell 1/1 \(Part 0\): the kernel was ended by SIGKILL .*out of memory"),
        ("04_tagged", "failed", r"cell 2/3 \(Part 1\): MemoryError: planned"),
        ("05_other", "no record", "is of run 20250101-000000-ffff, not of " + RUN),
        ("06_cut", "no record", "truncated"),
        ("07_stale", "no record", "is missing"),
        ("08_early", "no record", "its last cell wrote no record"),
        ("09_widget", "no record", "is missing"),
        ("10_quit", "no record", "its last cell wrote no record"),
        ("11_error", "failed", "ZeroDivisionError: division by zero"),
        ("12_misnamed", "no record", "is of someone_else"),
    ],
)
def test_each_trap_is_told_apart_in_one_line(traps, name, status, words):
    entry = traps.entries[name]
    assert entry["status"] == status, entry
    assert re.search(words, entry["detail"]), entry
    assert "\n" not in entry["detail"]
    assert f"{name}  {status}" in traps.log
    assert saved(traps, name).metadata.o1lab == {"run_id": RUN, "status": status, "detail": entry["detail"]}


def test_the_good_one_counts(traps):
    record = traps.run.records["00_good"]
    assert record.run_id == RUN
    assert record.preset == "smoke"
    assert record.estimates["leak-rate/host"].value == 250
    assert record.parameters == {"preset": "smoke", "seed": 0, "requests": 250, "rate": 2.0}
    assert traps.entries["00_good"]["parameters"] == record.parameters
    assert states(saved(traps, "00_good")) == ["completed"] * 4


def test_this_interpreter_and_the_notebooks_folder_whatever_is_about(traps):
    executable, folder = traps.run.records["00_good"].notes[0].split("|")
    assert executable == sys.executable
    assert Path(folder) == (traps.root / "notebooks").resolve()


def test_progress_under_the_runner_is_text_without_a_widget(traps):
    outputs = [output for cell in saved(traps, "00_good").cells for output in cell.get("outputs", [])]
    assert any("rounds: 50 done" in output.get("text", "") for output in outputs)
    assert not any("widget" in kind for output in outputs for kind in output.get("data", {}))


def test_the_saved_file_says_what_never_ran(traps):
    assert states(saved(traps, "01_exit")) == ["completed", "failed", "pending"]
    assert states(saved(traps, "02_dead")) == ["completed", "failed", "pending"]
    assert states(saved(traps, "04_tagged")) == ["completed", "failed", "pending"]


def test_unnumbered_notebooks_run_only_when_named(traps):
    assert "_template" not in traps.entries


def test_the_table_and_the_ledger_end_the_log(traps):
    tail = traps.log.split("\n\n")
    assert re.search(r"^notebook +status +seconds +verdicts$", tail[-2], re.MULTILINE)
    assert re.search(r"^00_good +ok +\d+  1 supported$", tail[-2], re.MULTILINE)
    assert "ledger: 1 supported\n" in tail[-1]
    assert tail[-1].rstrip().endswith("index.html")
    assert traps.reports == [traps.run.folder]
    assert "\r" not in traps.log


def test_the_folder_is_whole(traps):
    assert traps.run.folder == (traps.root / "results" / RUN).resolve()
    assert traps.run.manifest["finished"] is not None
    assert not list(traps.run.folder.rglob("*.tmp"))
    assert not (traps.run.folder / "notebooks" / "00_good.kernel.log").exists()
    assert records.latest_run(traps.root / "results").name == RUN


def test_budgets_of_cell_and_notebook(room):
    books = room / "notebooks"
    write(books, "00_slow", "print('first')", "import time; time.sleep(60)", "print('third')")
    write(books, "01_flood", "while True: print('x' * 1000)")
    write(books, "02_long", *["import time; time.sleep(1.5)"] * 9)
    start = time.monotonic()
    run = runner.run(cell_seconds=4, notebook_seconds=9, stream=io.StringIO())
    assert time.monotonic() - start < 60
    assert [entry["status"] for entry in run.manifest["notebooks"]] == ["timeout"] * 3
    details = [entry["detail"] for entry in run.manifest["notebooks"]]
    assert details[0] == "cell 2/3 (Part 1): it passed the budget of 4 s per cell"
    assert details[1] == "cell 1/1 (Part 0): it passed the budget of 4 s per cell"
    assert re.fullmatch(r"cell \d/9 \(Part \d\): the notebook's budget of 9 s ran out", details[2])
    slow = nbformat.read(run.folder / "notebooks" / "00_slow.ipynb", as_version=4)
    assert states(slow) == ["completed", "failed", "pending"]
    assert slow.cells[2].outputs[0].text == "first\n"
    flood = run.folder / "notebooks" / "01_flood.ipynb"
    assert flood.stat().st_size < 2 * engine.MOST_TEXT
    assert "is not kept" in flood.read_text()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_done(room, sent):
    marker = room / "started"
    write(room / "notebooks", "00_first", RECORD + 'put("00_first")')
    write(
        room / "notebooks",
        "01_waits",
        "print('done before')",
        f"import os, pathlib, time; pathlib.Path({str(marker)!r}).write_text(str(os.getpid())); time.sleep(120)",
    )
    write(room / "notebooks", "02_never", "x = 1")
    process = subprocess.Popen(
        [sys.executable, "-m", "o1lab", "run", "--run-id", RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not marker.exists() or not marker.read_text():
        assert time.monotonic() < deadline, "the cell never started"
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(sent)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "01_waits  interrupted" in output
    assert "cell 2/2 (Part 1): stopped by Ctrl-C" in output
    assert "Traceback" not in output
    run = records.read_run(room / "results" / RUN)
    assert [entry["status"] for entry in run.manifest["notebooks"]] == ["ok", "interrupted", "pending"]
    assert list(run.records) == ["00_first"]
    assert run.manifest["finished"]
    book = nbformat.read(run.folder / "notebooks" / "01_waits.ipynb", as_version=4)
    assert states(book) == ["completed", "failed"]
    assert "done before" in book.cells[2].outputs[0].text
    kernel, deadline = int(marker.read_text()), time.monotonic() + 5
    while alive(kernel):  # the kernel is gone too
        assert time.monotonic() < deadline, "the kernel outlived its run"
        time.sleep(0.1)


@pytest.fixture
def one(room):
    """A room with one notebook that records and one that takes a parameter; nothing here starts a kernel by itself."""
    write(
        room / "notebooks", "00_good", RECORD + 'put("00_good")', parameters="requests = 100  # n\nname = 'a'  # text"
    )
    write(room / "notebooks", "01_memory_leak", "x = 1", parameters='requests = 5  # n\nmodel = "tiny"  # id')
    return room


def no_kernel(monkeypatch) -> None:
    monkeypatch.setattr(runner, "_execute", lambda *_: pytest.fail("a notebook was executed"))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"parameters": {"request": 5}}, UnknownName, "did you mean requests; nothing was run"),
        ({"parameters": {"requests": 2.5}}, RunError, "must be a whole number, like its default 100"),
        ({"parameters": {"requests": "many"}}, RunError, "requests='many' of 00_good must be a whole number"),
        ({"parameters": {"requests": True}}, RunError, "must be a whole number"),
        ({"parameters": {"name": 3}}, RunError, "must be a text"),
        ({"names": ["02_cot"]}, UnknownName, "unknown notebook '02_cot'"),
        ({"names": ["0"]}, UnknownName, "fits more than one"),
        ({"names": [""]}, UnknownName, "unknown notebook"),
        ({"preset": "quick"}, UnknownName, "unknown preset 'quick'"),
        ({"cell_seconds": -1}, RunError, "more than 0 seconds"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(one, monkeypatch, arguments, error, words):
    no_kernel(monkeypatch)
    with pytest.raises(error, match=words):
        runner.run(stream=io.StringIO(), **arguments)
    assert not (one / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "request=5"], "unknown parameter of 00_good, 01_memory_leak 'request'"),
        (["-p", "requests"], "is no NAME=VALUE"),
        (["--seed", "1"], "unknown parameter"),
        (["00", "--model", "mine"], "unknown parameter of 00_good 'model'"),
        (["--cell-seconds", "0"], "--cell-seconds must be more than 0"),
        (["nope"], "unknown notebook 'nope'"),
    ],
)
def test_bad_command_lines_end_with_2_and_one_line(one, monkeypatch, capsys, arguments, words):
    no_kernel(monkeypatch)
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_text_parameter_stays_a_text():
    assert collection.assign({"a": {"model": "x"}}, {"model": "123"}) == {"a": {"model": "123"}}
    assert collection.assign({"a": {"on": False}}, {"on": "true"}) == {"a": {"on": True}}
    assert collection.assign({"a": {"x": collection.UNKNOWN}}, {"x": "[1]"}) == {"a": {"x": [1]}}
    assert collection.assign({"a": {"n": 1}, "b": {}}, {"n": "2"}) == {"a": {"n": 2}, "b": {}}


def test_a_relative_path_is_one_from_the_callers_folder(one, monkeypatch):
    lines = "table = ''  # [path] a table\nmodel = 'tiny'  # [name] a name or a folder"
    write(one / "notebooks", "02_paths", "x = 1", parameters=lines)
    (one / "own" / "model").mkdir(parents=True)
    monkeypatch.chdir(one / "own")
    handed = []
    monkeypatch.setattr(runner, "_execute", lambda name, output, inject, execution: handed.append(inject))
    for model in ("./model", "model", "someone/model"):
        runner.run(["02"], parameters={"table": "mine.csv", "model": model}, stream=io.StringIO())
    assert [values["table"] for values in handed] == [str(one / "own" / "mine.csv")] * 3
    assert [values["model"] for values in handed] == [str(one / "own" / "model"), "model", "someone/model"]
    assert collection.from_here("02_paths", {"table": "", "model": "tiny"}) == {"table": "", "model": "tiny"}


def test_names(one):
    write(one / "notebooks", "_template", "x = 1")
    assert collection.resolve([]) == ["00_good", "01_memory_leak"]
    assert collection.resolve(["01", "00_good.ipynb", "01_mem", "_template"]) == [
        "01_memory_leak",
        "00_good",
        "_template",
    ]


def test_an_empty_notebooks_folder_says_so(room):
    with pytest.raises(RunError, match="no notebooks in .*O1LAB_NOTEBOOKS"):
        runner.run(stream=io.StringIO())


def test_a_file_that_is_no_notebook(one, monkeypatch):
    no_kernel(monkeypatch)
    (one / "notebooks" / "02_broken.ipynb").write_text("{")
    with pytest.raises(RunError, match="02_broken.ipynb is no usable notebook"):
        runner.run(stream=io.StringIO())


def test_unwritable_results(one, monkeypatch):
    no_kernel(monkeypatch)
    (one / "results").write_text("a file")
    with pytest.raises(ResultsError, match="a file stands where the folder should be"):
        runner.run(stream=io.StringIO())


def test_a_second_run_into_the_same_folder(one, monkeypatch):
    no_kernel(monkeypatch)
    with records.RunLock(one / "results" / RUN), pytest.raises(ResultsError, match=f"pid {os.getpid()}.*{RUN}"):
        runner.run(run_id=RUN, stream=io.StringIO())


def test_a_corrupt_manifest_is_not_overwritten(one, monkeypatch):
    no_kernel(monkeypatch)
    folder = one / "results" / RUN
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")
    with pytest.raises(RecordError, match="run.json is truncated"):
        runner.run(into=folder, stream=io.StringIO())
    assert (folder / "run.json").read_text() == "{"


def test_run_again_into_a_folder_keeps_its_other_notebooks(one, monkeypatch):
    folder = one / "results" / "kept"
    other = {"name": "09_other", "status": "ok", "seconds": 1.0, "detail": "", "parameters": {}}
    records.write_json(folder / "run.json", {"schema": 1, "run_id": RUN, "started": "2026", "notebooks": [other]})

    def execute(name, output, inject, execution):
        fields = {"title": "t", "preset": "smoke", "seed": 0, "device": "cpu", "seconds": 1.0}
        record = records.Record(run_id=RUN, notebook=name, started=records.now(), finished=records.now(), **fields)
        records.write_record(folder, record)

    monkeypatch.setattr(runner, "_execute", execute)
    run = runner.run(["00"], into=folder, stream=io.StringIO())
    assert [(entry["name"], entry["status"]) for entry in run.manifest["notebooks"]] == [
        ("00_good", "ok"),
        ("09_other", "ok"),
    ]
    assert run.manifest["run_id"] == RUN


def test_a_failing_report_does_not_lose_the_run(one, monkeypatch, capsys):
    def broken(folder):
        raise KeyError("no such figure")

    quiet_report(monkeypatch, broken)
    monkeypatch.setattr(runner, "_execute", lambda *_: None)
    assert main(["run", "00", "--run-id", RUN]) == 1
    assert "no report: KeyError: 'no such figure'" in capsys.readouterr().out
    assert records.read_run(one / "results" / RUN).manifest["finished"]


def test_ctrl_c_between_two_notebooks(one, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_execute", lambda *_: None)
    monkeypatch.setattr(engine, "save", lambda *_: None)
    monkeypatch.setattr(runner, "finish_line", stop)
    assert main(["run", "--run-id", RUN]) == 130
    manifest = records.read_manifest(one / "results" / RUN)
    assert [entry["status"] for entry in manifest["notebooks"]] == ["no record", "pending"]
    assert manifest["interrupted"] is True
    assert manifest["finished"]


def test_a_disk_that_fills_while_running(one, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("papermill.execute_notebook", full)
    with pytest.raises(ResultsError, match="disk is full"):
        runner.run(["00"], stream=io.StringIO())


def test_list(one, capsys):
    assert main(["run", "--list"]) == 0
    assert "01_memory_leak: 01_memory_leak\n    requests=5, model='tiny'" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_moves_in_a_terminal_and_is_rare_in_a_log(tmp_path, monkeypatch):
    state = engine.Execution(60, 60, {}, tmp_path, tmp_path / "log")
    state.number, state.total, state.heading = 7, 31, "Reproduce"
    terminal, log = Terminal(), io.StringIO()
    with run_view.Line("01_memory_leak", state, terminal), run_view.Line("01_memory_leak", state, log):
        time.sleep(0.7)
    assert "01_memory_leak  cell 7/31 (Reproduce)  00:00" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")
    assert log.getvalue() == ""
    monkeypatch.setattr(run_view, "LOG_SECONDS", 0.1)
    with run_view.Line("01_memory_leak", state, log):
        time.sleep(0.35)
    assert 1 <= log.getvalue().count("01_memory_leak  cell 7/31 (Reproduce)  00:00\n") <= 3
