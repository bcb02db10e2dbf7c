"""Find a Chromium-like browser, and draw figures with it under a time limit: one browser a process, kept open."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import shutil
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge", "microsoft-edge")
"""Commands looked for on the PATH, in this order."""


def find_browser() -> str | None:
    """Path of a Chromium-like browser for PNG export, or ``None``; ``O1LAB_BROWSER`` names one (``none``: use none)."""
    given = os.environ.get("O1LAB_BROWSER")
    if given:
        found = None if given.lower() == "none" else shutil.which(given)
        if found is None and given.lower() != "none":
            warnings.warn(f"O1LAB_BROWSER names {given!r}, which is no program here: no PNGs", stacklevel=2)
        return found
    places: list[str] = []
    if sys.platform == "darwin":
        apps = ("Google Chrome", "Chromium", "Microsoft Edge")
        places = [f"/Applications/{app}.app/Contents/MacOS/{app}" for app in apps]
    elif sys.platform == "win32":
        tails = (r"Google\Chrome\Application\chrome.exe", r"Microsoft\Edge\Application\msedge.exe")
        roots = [os.environ.get(name, "") for name in ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA")]
        places = [os.path.join(root, tail) for root in roots if root for tail in tails]
    found = (shutil.which(name) for name in NAMES)
    return next((path for path in found if path), None) or next((path for path in places if Path(path).is_file()), None)


CLEAN_UP_SECONDS = 10.0
"""How long a browser that missed the limit may take to end before it is left alone."""


class Painter:
    """A headless browser on an event loop of its own that turns figures into PNG.

    kaleido's synchronous server waits for ever for an answer if its browser did not start; here every call ends.

    Parameters
    ----------
    browser : str
        Path of the browser, which starts with the first picture.
    """

    def __init__(self, browser: str) -> None:
        self.browser, self.pid = browser, os.getpid()
        self._kaleido: Any = None
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="o1lab-browser", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    async def _paint(self, figure: dict[str, Any], options: dict[str, Any], seconds: float) -> bytes:
        if self._kaleido is None:
            import kaleido

            # mathjax=False: the default fetches MathJax from the network
            painter = kaleido.Kaleido(n=1, timeout=seconds, mathjax=False, path=self.browser)
            try:
                await painter.open()
            except BaseException:
                self._kill(painter)  # its own close() waits for an answer
                raise
            self._kaleido = painter
        return await self._kaleido.calc_fig(figure, opts=options)

    @staticmethod
    def _kill(painter: Any) -> None:
        """End a browser that does not answer, if it ever started."""
        process = getattr(painter, "subprocess", None)
        if process is None:
            return
        if os.name == "nt":
            process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: the browser and what it started
        process.wait(5)

    def paint(self, figure: dict[str, Any], width: int, height: int, *, scale: float, seconds: float) -> bytes:
        """Draw one figure.

        Parameters
        ----------
        figure : dict
            Plotly figure.
        width, height : int
            Size in CSS pixels; the picture has ``scale`` times as many.
        seconds : float
            Time limit, starting the browser included.

        Raises
        ------
        TimeoutError
            When the limit passes; the browser's own errors otherwise.
        """
        options = {"format": "png", "width": width, "height": height, "scale": scale}
        with self._lock:
            limited = asyncio.wait_for(self._paint(figure, options, seconds), seconds)
            future = asyncio.run_coroutine_threadsafe(limited, self._loop)
            try:
                return bytes(future.result(seconds + CLEAN_UP_SECONDS))
            except (TimeoutError, concurrent.futures.TimeoutError) as error:
                raise TimeoutError(f"no picture within {seconds:g} s") from error

    def close(self) -> None:
        """Close the browser within seconds; a forked process leaves its parent's alone."""
        atexit.unregister(self.close)
        if os.getpid() != self.pid or not self._loop.is_running():
            return
        if self._kaleido is not None:
            ending = asyncio.run_coroutine_threadsafe(self._kaleido.close(), self._loop)
            concurrent.futures.wait([ending], timeout=5)
            self._kill(self._kaleido)
            self._kaleido = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2)
