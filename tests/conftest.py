"""What every test gets: its own results and cache folders, one thread, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

OWN_FOLDERS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before anything imports torch; kernels and subprocesses inherit it."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    config.stash[OWN_FOLDERS] = tempfile.mkdtemp(prefix="o1lab-tests-")
    for name in ("O1LAB_RESULTS", "O1LAB_CACHE"):
        os.environ.setdefault(name, os.path.join(config.stash[OWN_FOLDERS], name.lower()))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folders that this session made."""
    if OWN_FOLDERS in config.stash:
        shutil.rmtree(config.stash[OWN_FOLDERS], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, with the reason, on a machine whose torch finds no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none here"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch for a module's tests, also where the environment asks for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
