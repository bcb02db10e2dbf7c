"""The command line and the import: quick, no torch, no GPU context, one line and the exit code 2 for bad input."""

from __future__ import annotations

import argparse
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import types

import pytest

import o1lab
from o1lab import __main__ as cli
from o1lab import bench, options
from o1lab.errors import RunError

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(o1lab.__path__, "o1lab.") if not module.name.endswith("__main__")
)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def imported(code: str) -> dict[str, int]:
    """Every module that ``code`` imports, with the microseconds that it took including what it imports itself."""
    ran = python("-X", "importtime", "-c", code)
    assert ran.returncode == 0, ran.stderr
    rows = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s*(\S+)$", ran.stderr, re.M)
    return {name: int(cumulative) for cumulative, name in rows}


def test_import_is_quick_and_leaves_torch_alone():
    runs = [imported("import o1lab") for _ in range(3)]
    assert not {"torch", "numpy", "plotly", "transformers"} & set(runs[0])
    assert min(run["o1lab"] for run in runs) < 1_000_000


def test_the_lab_is_quick_beyond_torch():
    code = "import torch, numpy, pandas; import o1lab, o1lab.lab, o1lab.claims"
    spent = min(
        sum(run[n] for n in ("o1lab", "o1lab.lab", "o1lab.claims")) for run in [imported(code) for _ in range(2)]
    )
    assert spent < 1_000_000


def test_no_module_touches_a_gpu_when_imported():
    code = (
        f"import torch, importlib\nfor n in {MODULES!r}: importlib.import_module(n)\nprint(torch.cuda.is_initialized())"
    )
    ran = python("-c", code)
    assert ran.stdout.strip() == "False", ran.stderr


def test_help_imports_no_command():
    ran = python("-X", "importtime", "-m", "o1lab", "--help")
    assert ran.returncode == 0
    assert not re.search(r"\b(torch|numpy|o1lab\.(runner|report|doctor|claims|new))\b", ran.stderr)
    for name in cli.COMMANDS:
        assert re.search(rf"^\s+{name}\s+\w", ran.stdout, re.M)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_command(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"o1lab {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["fly"], [], ["claims", "--no-such-option"]])
def test_an_unknown_command_or_option_is_two(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: o1lab" in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_bench_has_a_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", name, "--help"])
    assert stopped.value.code == 0
    assert "--" in capsys.readouterr().out


def test_a_bench_gets_the_rest_of_the_line_and_ends_as_it_says(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("o1lab.kv.bench.main", lambda rest: seen.append(rest) or 3)
    assert cli.main(["bench", "kv", "latency", "--device", "cpu", "--json", "x"]) == 3
    assert seen == [["latency", "--device", "cpu", "--json", "x"]]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "speed"])
    assert stopped.value.code == 2
    assert "choose from" in capsys.readouterr().err


BAD = {
    "decode --device cuda": "there is no CUDA device here; give cpu",
    "kv latency --device cuda": "there is no CUDA device here; give cpu",
    "writeback rate --device cuda:1": "there is no CUDA device here; give cpu",
    "decode --device gpu": "'gpu': give cpu, cuda or cuda:1",
    "writeback --device cpu:x": "'cpu:x': give cpu, cuda or cuda:1",
    "kv --json /nope/x.json": "there is no folder /nope; make it first",
    "decode --json /nope/x.json": "there is no folder /nope; make it first",
    "writeback --json /nope/x.json": "there is no folder /nope; make it first",
    "faults --json /nope/x.json": "there is no folder /nope; make it first",
    "attention --json /nope/x.json": "there is no folder /nope; make it first",
    "tools --json /nope/x.json": "there is no folder /nope; make it first",
    "faults --json .": "is a folder: name a file in it",
    "kv --torch-threads 0": "'0': give a whole number, at least 1, at most 1,024",
    "decode --batch 1 0": "'0': give a whole number, at least 1",
    "decode --context -4": "'-4': give a whole number, at least 1",
    "decode --steps 0": "'0': give a whole number, at least 1",
    "decode --steps 1.5": "'1.5': give a whole number, at least 1",
    "decode --seconds-per-arm nan": "'nan': give seconds, above 0",
    "decode --tuned [1]": "'[1]': give a JSON object",
    "decode --models nothing --device cpu --steps 1": "unknown model 'nothing'",
    "writeback --batch 0": "'0': give a whole number, at least 1",
    "writeback --workers -1": "'-1': give a whole number, at least 0",
    "attention --q-heads 3 --kv-heads 2": "--q-heads 3 is no multiple of --kv-heads 2",
    "attention --head-dim 0": "'0': give a whole number, at least 1",
    "attention --budget 0": "'0': give seconds, above 0",
    "attention --shapes 2x64,0x64": "0x64: at least 1 sequence",
    "attention --shapes 2x64x1": "'2x64x1' is no workload",
    "attention --tune 5": "--tune needs a CUDA device",
    "attention --ncu": "--ncu needs a CUDA device",
    "faults --n 0": "'0': give a whole number, at least 1",
    "faults --n 17": "n=17: at least 18, one fault of each kind at each place",
    "faults --seed -1": "'-1': give a whole number, at least 0",
    "tools --jobs 0": "'0': give a whole number, at least 1",
}


@pytest.mark.parametrize("alone", [False, True], ids=["o1lab bench", "its own main"])
@pytest.mark.parametrize("line", BAD)
def test_a_bench_refuses_what_it_cannot_do_in_one_line_before_it_runs(line, alone, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    name, *rest = line.split()
    module = importlib.import_module(bench.BENCHES[name][0])
    try:
        code = module.main(rest) if alone else cli.main(["bench", name, *rest])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    assert code == 2
    assert BAD[line] in said.err.splitlines()[-1]
    assert not said.out or "nothing" in line  # an unknown model is one of several, and the others run


def test_an_arm_with_a_graph_is_not_run_without_a_gpu(capsys):
    small = ["--device", "cpu", "--steps", "2", "--context", "9", "--batch", "1", "--arms"]
    assert cli.main(["bench", "decode", *small, "paged + graph", "paged"]) == 0
    *_, refused, ran = capsys.readouterr().out.splitlines()
    assert refused.split("  ")[-1].strip() == "needs a CUDA device"
    assert "paged" in ran
    assert "needs" not in ran
    assert cli.main(["bench", "decode", *small, "fused + graph"]) == 2


def test_a_file_for_figures_may_be_there_already(tmp_path):
    file = tmp_path / "found.json"
    assert options.new_file(str(file)) == file
    file.write_text("{}", encoding="utf-8")
    assert options.new_file(str(file)) == file


def test_a_numbered_device_must_be_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [options.device(text) for text in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]
    with pytest.raises(argparse.ArgumentTypeError, match="there are 2 CUDA devices here, cuda:0 to cuda:1"):
        options.device("cuda:2")


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"o1lab {o1lab.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [["run", "no_such_notebook"], ["run", "--preset", "huge"], ["report", "no-such-run"], ["new", "Bad Name"]],
)
def test_bad_input_is_one_line_and_two(arguments):
    ran = python("-m", "o1lab", *arguments)
    assert ran.returncode == 2
    assert ran.stderr.startswith("o1lab: ")
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RunError("the notebook stopped"), 2, "o1lab: the notebook stopped\n"),
        (KeyboardInterrupt(), 130, "o1lab: interrupted\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_how_a_command_may_end(monkeypatch, capsys, error, code, line):
    def command(_: argparse.Namespace) -> int:
        raise error

    fake = types.ModuleType("o1lab.fake")
    fake.configure, fake.command = lambda parser: None, command
    monkeypatch.setitem(sys.modules, "o1lab.fake", fake)
    monkeypatch.setitem(cli.COMMANDS, "fake", ("o1lab.fake", "a command for this test"))
    assert cli.main(["fake"]) == code
    assert capsys.readouterr().err == line


def test_an_error_of_the_code_is_not_hidden(monkeypatch):
    fake = types.ModuleType("o1lab.fake")
    fake.configure, fake.command = lambda parser: None, lambda options: 1 // 0
    monkeypatch.setitem(sys.modules, "o1lab.fake", fake)
    monkeypatch.setitem(cli.COMMANDS, "fake", ("o1lab.fake", "a command for this test"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert results.failed == 0


def test_there_are_doctests():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 10
