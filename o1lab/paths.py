"""Where the notebooks and results live: resolved from the package, never from the caller's folder alone."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def project() -> Path:
    """Root of the checkout that holds the package, or the current folder for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "notebooks").is_dir() and (root / "pyproject.toml").is_file() else Path.cwd()


def notebooks() -> Path:
    """Folder of the numbered notebooks (``O1LAB_NOTEBOOKS`` overrides it)."""
    return Path(os.environ.get("O1LAB_NOTEBOOKS") or project() / "notebooks")


def results() -> Path:
    """Folder under which each run gets its own folder (``O1LAB_RESULTS`` overrides it)."""
    return Path(os.environ.get("O1LAB_RESULTS") or project() / "results")


def cache() -> Path:
    """Folder for converted weights and other things that can be made again (``O1LAB_CACHE`` overrides it)."""
    home = os.environ.get("O1LAB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "o1lab"
    return Path(home)
