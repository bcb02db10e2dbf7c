"""What IPython and Jupyter keep: every holder is named while the object lives, and one call gives it all back."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import weakref

import nbclient
import nbformat
import pytest
import torch

from o1lab.memory import counters
from o1lab.memory.jupyter import release_notebook

PLANT = "x = torch.zeros(1000, 1000); r = weakref.ref(x)"  # 4 000 000 bytes
FAIL = "def f(batch):\n    raise ValueError('a')\nf(x)"
NESTED = """
def inner(batch):
    try:
        raise ValueError('a')
    except ValueError as error:
        raise KeyError('b') from error
def outer():
    held = x
    try:
        inner(held)
    except KeyError:
        raise RuntimeError('c')
outer()
"""
BAD_REPR = """
class Bad:
    def __init__(self, t): self.t = t
    def __repr__(self): raise ValueError('no')
bad = Bad(x)
"""
GROUP = """
def grouped(b):
    raise ExceptionGroup('g', [ValueError(b)])
grouped(x)
"""
SCENARIOS = {  # cells, and holders that must be named (each is a negative control: it alone keeps the tensor alive)
    "displayed": ([PLANT, "x", "del x"], {"Out[3]", "_", "_3", "get_ipython().user_ns_hidden['_']",
                  "get_ipython().user_ns_hidden['_3']", "get_ipython().displayhook._"}),
    "three outputs ago": ([PLANT, "x", "del x", "1", "2"], {"Out[3]", "___", "_3", "get_ipython().displayhook.___",
                          "get_ipython().user_ns_hidden['___']"}),
    "inside a displayed list": ([PLANT, "[x, {'a': x}]", "del x"], {"Out[3]", "_"}),
    "a displayed view": ([PLANT, "x[0, :1]", "del x"], {"Out[3]", "_"}),
    "failed": ([PLANT, FAIL, "del x"], {"sys.last_value", "sys.last_traceback", "get_ipython().InteractiveTB.tb"}),
    "displayed, then failed twice": ([PLANT, "x", FAIL, "del x", "1/0", "2"], {"Out[3]", "__"}),
    "nested errors": ([PLANT, NESTED, "del x"], {"sys.last_value", "sys.last_traceback"}),
    "in the error's arguments": ([PLANT, "raise ValueError(x)", "del x"], {"sys.last_value"}),
    "in an error group": ([PLANT, GROUP, "del x"], {"sys.last_value"}),
    "failed, then a syntax error": ([PLANT, FAIL, "del x", "1+"], {"get_ipython().InteractiveTB.tb"}),
    "repr fails": ([PLANT, BAD_REPR, "bad", "del x, bad"], {"Out[4]", "_", "sys.last_value"}),
    "ran a file": (["open('plant.py', 'w').write('import torch\\nx = torch.zeros(1000, 1000)\\n');",
                    "%run plant.py", "r = weakref.ref(x)", "del x"], {"get_ipython()._main_mod_cache"}),
    "verbose traceback": ([PLANT, "%xmode Verbose", FAIL, "%tb", "del x"], {"sys.last_value"}),
    "post mortem": ([PLANT, FAIL, POST_MORTEM := "get_ipython().InteractiveTB.pdb = p = "
                     "get_ipython().InteractiveTB.debugger_cls(); p.reset(); "
                     "p.setup(None, __import__('sys').last_traceback); del p", "del x"],
                    {"get_ipython().InteractiveTB.pdb"}),
    "never kept": ([PLANT, "x;", "del x"], set()),
}  # fmt: skip
PROGRAM = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
if shell.history_manager: shell.history_manager.enabled = False
import torch
answers = {}
for name, cells in json.load(sys.stdin).items():
    shell.reset()
    shell.execution_count = 1
    for code in ["import torch, weakref, gc", *cells]:
        shell.run_cell(code, store_history=True, silent=False)
    import gc
    from o1lab.memory import counters
    from o1lab.memory.jupyter import release_notebook
    gc.collect()
    ref = shell.user_ns["r"]
    alive = ref() is not None
    before = counters.read().host_in_use
    released = release_notebook()
    after = counters.read().host_in_use
    big = [path.path for path in released.holders if path.bytes >= 4_000_000]
    answers[name] = [alive, ref() is not None, released.freed_bytes, (before or 0) - (after or 0), big]
    shell.run_cell("%xmode Context")
print("ANSWER" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """All scenarios in one real IPython process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps({name: cells for name, (cells, _) in SCENARIOS.items()}),
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path_factory.mktemp("ipython"),
    )  # fmt: skip
    line = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert line, done.stderr[-2000:]
    return json.loads(line[0].removeprefix("ANSWER"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_call_gives_all_back_in_ipython(answers, name):
    alive, still, freed, measured, holders = answers[name]
    expected = SCENARIOS[name][1]
    assert alive is bool(expected)  # without the call it stays
    assert not still
    for path in expected:
        assert any(one.startswith(path) for one in holders), holders
    if counters.has_exact_host():
        assert freed == pytest.approx(4_000_000 if expected else 0, abs=100_000)
        assert measured == pytest.approx(freed, abs=20_000)


def notebook(cells: list[str], folder) -> str:
    """Run cells in a real kernel, errors allowed; what the last one printed."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    client = nbclient.NotebookClient(made, timeout=120, kernel_name="python3", allow_errors=True, resources={})
    client.execute(cwd=str(folder))
    return "".join(out.get("text", "") for out in made.cells[-1].outputs)


START = """
import gc, json, torch, weakref
from o1lab.memory import counters
from o1lab.memory.jupyter import release_notebook
torch.zeros(1)
release_notebook()  # the first call loads what it needs
begun = counters.read()
"""
ROUND = """
gc.collect()
was = r() is not None
before = counters.read()
released = release_notebook()
after = counters.read()
answers = globals().get("answers", []) + [[was, r() is not None, released.freed_bytes,
    before.host_in_use and before.host_in_use - after.host_in_use, [path.path for path in released.holders]]]
"""


@pytest.mark.slow
def test_one_call_gives_all_back_in_a_real_kernel(tmp_path):
    plain = [PLANT, "x", "del x", ROUND]
    failed = [PLANT, "x", FAIL, "del x", ROUND]
    twice = [PLANT, "x", FAIL, NESTED, "del x", "1/0", ROUND]
    tab = [
        PLANT,
        "x",
        "get_ipython().kernel.do_complete('x.', 2); get_ipython().kernel.do_inspect('x', 1);",
        "del x",
        ROUND,
    ]
    text = notebook([START, *plain, *failed, *twice, *tab, "print(json.dumps(answers))"], tmp_path)
    answers = json.loads(text)
    assert len(answers) == 4
    for was, still, freed, measured, holders in answers:
        assert was
        assert not still
        assert holders
        if counters.has_exact_host():
            assert freed == pytest.approx(4_000_000, abs=100_000)
            assert measured == pytest.approx(freed, abs=20_000)


ONE = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
run = lambda code: shell.run_cell(code, store_history=True)
run("import torch, weakref, gc")
run("x = torch.zeros(10); y = torch.zeros(20); mine = {'deep': [x]}; r = weakref.ref(x)")
for code in ("x", "y", "_ = 'set by hand'", "import sys", "def f(b): raise ValueError()", "f(x)"): run(code)
from o1lab.memory.jupyter import release_notebook
first = release_notebook(shell.user_ns["r"])
print("holders", sorted(path.path for path in first.holders))
print("left", sorted(path.path for path in first.left))
print("others", 3 in shell.user_ns["Out"], 4 in shell.user_ns["Out"], shell.user_ns["_"])
run("x = None; mine.clear()")
print("dead", shell.user_ns["r"]() is None)
second = release_notebook()
print("kept", shell.user_ns["_"], shell.user_ns["y"].shape[0], len(shell.user_ns["Out"]))
run("y")
print("works", shell.user_ns["Out"], len(release_notebook().holders) > 0)
run("f(y)")
print("direct", [path.path for path in release_notebook().holders if "error_in_exec" in path.path])
texts = [getattr(shell.history_manager, name) for name in ("outputs", "output_hist_reprs", "exceptions")]
print("history", *map(len, texts))
print("again", [path.path for path in release_notebook().holders])
"""


def test_only_one_object_is_released_and_your_variables_are_left():
    done = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True, timeout=120, check=False)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line and line[0] in "hlodkwa")
    assert "Out[3]" in said["holders"], done.stderr[-2000:]
    assert "Out[4]" not in said["holders"]
    for name in ("sys.last_value", "sys.last_traceback", "InteractiveTB.tb", "last_execution_result.error_in_exec"):
        assert name in said["holders"]
    assert ast.literal_eval(said["left"]) == ["mine['deep'][…]", "x"]
    assert said["others"] == "False True set by hand"
    assert said["dead"] == "True"
    assert said["kept"] == "set by hand 20 0"
    assert said["works"].endswith("True")
    assert "error_in_exec" in said["direct"]
    assert said["history"] == "0 0 0"  # texts shown, and texts of tracebacks
    assert said["again"] == "[]"


def test_outside_ipython_the_last_exception_is_cleared():
    tensor = torch.zeros(1000, 1000)
    ref = weakref.ref(tensor)
    sys.last_value = ValueError(tensor)
    del tensor
    assert ref() is not None
    released = release_notebook(ref)
    assert [path.path for path in released.holders] == ["sys.last_value"]
    assert released.left == []
    assert ref() is None
    assert not hasattr(sys, "last_value")
    if counters.has_exact_host():
        assert released.freed_bytes == pytest.approx(4_000_000, abs=20_000)
    assert "given back by clearing 1 holders" in str(released)


def test_a_variable_of_yours_is_named_and_never_deleted():
    mine = {"batch": [torch.zeros(10)]}
    released = release_notebook(mine["batch"][0])
    assert released.holders == []
    assert [path.path for path in released.left] == ["mine['batch'][…]"]
    assert len(mine["batch"]) == 1
