"""``python -m o1lab watch PID``: does a process that may not be touched go on growing? A trend, and never a proof.

Readings of :mod:`o1lab.memory.outside` at an interval, judged by :mod:`o1lab.memory.trend`. The readings kept are
bounded: when they are too many, every second one goes, so that they always span the whole time watched.

Exit codes: 0 no trend; 1 a trend, unproven, of host or device memory; 2 it could not judge (too few readings, also
because the process or the watch ended early; no such process; an option that makes no sense).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from o1lab.memory.outside import DeviceMemory, Ended, Process, Sparse, WatchError
from o1lab.memory.trend import MIB, NO_TREND, TOO_SHORT, TREND, Sample, Trend, judge, mib
from o1lab.stats import readable

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_SAMPLES = 4000
UNIQUE_S, FILES_S, NVML_SHARE = 0.0004, 0.0002, 0.01
"""Seconds a sample that unique memory and open files may cost on average, and NVML's share of the interval."""
DEVICE_GRAIN = 2 * MIB
EXIT_CODES = {NO_TREND: 0, TREND: 1, TOO_SHORT: 2}


class Watch:
    """Take samples of one process when you like; of your own loop, too.

    Parameters
    ----------
    pid : int, optional
        Default: this process.
    children : bool
        Add its children and theirs; they are looked up anew every two seconds.
    interval_s : float
        Seconds between the samples that :meth:`run` takes.

    Raises
    ------
    WatchError
        It cannot be watched.

    Examples
    --------
    >>> watch = Watch()
    >>> watch.sample().rss_bytes > 0
    True
    >>> watch.trend().host.verdict
    'too short'
    """

    def __init__(self, pid: int | None = None, *, children: bool = False, interval_s: float = 0.5) -> None:
        from o1lab import hardware

        if not interval_s > 0:
            raise WatchError(f"interval_s={interval_s}: give a time above zero, in seconds")
        self.process = Process(os.getpid() if pid is None else pid)
        self.name = self.process.name
        self.with_children, self.interval_s = children, interval_s
        self.all, self._looked = [self.process], -1e9
        self.device = DeviceMemory(hardware.nvml())
        self._unique = Sparse(lambda: _sum(process.unique() for process in self.all), UNIQUE_S)
        self._files = Sparse(lambda: _sum((process.files(),) for process in self.all), FILES_S)
        self._nvml = Sparse(lambda: self.device.read(self.all), NVML_SHARE * interval_s)
        self.samples: list[Sample] = []
        self.costs_ms: list[float] = []
        self.ended, self._seen, self._stride, self._begun = "", 0, 1, time.monotonic()

    def sample(self) -> Sample | None:
        """Read once and keep it; ``None`` once the process has ended (:attr:`ended` says how)."""
        if self.ended:
            return None
        begun = time.perf_counter()
        if self.with_children and time.monotonic() - self._looked > 2:
            for child in self.all[1:]:
                child.close()
            self.all, self._looked = [self.process, *self.process.children()], time.monotonic()
        readings = []
        try:
            readings.append(self.process.read())
        except Ended as gone:
            self.ended = str(gone)
            return None
        for child in self.all[1:]:
            try:
                readings.append(child.read())
            except Ended:
                self._looked = -1e9
        rss, own, threads = (sum(column) for column in zip(*readings, strict=True))
        unique, files = self._unique() or (None, None), self._files() or (None,)
        seconds = time.monotonic() - self._begun
        sample = Sample(seconds, rss, own, threads, files[0], *unique, self._nvml())
        if self._seen % self._stride == 0:
            self.samples.append(sample)
            self.costs_ms.append((time.perf_counter() - begun) * 1e3)
        self._seen += 1
        if len(self.samples) > MOST_SAMPLES:
            self.samples, self.costs_ms, self._stride = self.samples[::2], self.costs_ms[::2], 2 * self._stride
        return sample

    def run(self, seconds: float | None = None, samples: int | None = None) -> Iterator[Sample]:
        """Samples at the interval until the time or number is reached, or the process ends."""
        end = None if seconds is None else time.monotonic() + seconds
        due, taken = time.monotonic(), 0
        while (samples is None or taken < samples) and (end is None or due <= end):
            time.sleep(max(0.0, due - time.monotonic()))
            sample = self.sample()
            if sample is None:
                return
            yield sample
            taken += 1
            due = max(due + self.interval_s, time.monotonic())

    def trend(self, requests_per_second: float | None = None) -> Trend:
        """Judge what was seen so far."""
        at = [sample.seconds for sample in self.samples]
        host = judge(at, [sample.own_bytes for sample in self.samples])
        device = None
        pairs = [(s.seconds, s.device_bytes) for s in self.samples if s.device_bytes is not None]
        if pairs:
            device = judge(*zip(*pairs, strict=True), grain_bytes=DEVICE_GRAIN)
        return Trend(
            self.process.pid, self.name, len(self.all), tuple(self.samples), host, device, self.device.whose,
            self.device.reason, self.ended, self.process.free_bytes(), self.device.free_bytes,
            median(self.costs_ms) if self.costs_ms else 0.0, requests_per_second,
        )  # fmt: skip


def _sum(rows: Any) -> tuple[int, ...] | None:
    """Columns of the rows added up, without rows that are not known; ``None`` if none is."""
    known = [row for row in rows if row is not None and None not in row]
    return tuple(sum(column) for column in zip(*known, strict=True)) if known else None


def watch_process(
    pid: int, *, seconds: float = 60.0, interval_s: float = 0.5, children: bool = False,
    requests_per_second: float | None = None,
) -> Trend:  # fmt: skip
    """Watch a process for some time and judge it; ends early if the process does. See :class:`Watch`.

    Examples
    --------
    >>> import os
    >>> watch_process(os.getpid(), seconds=0.05, interval_s=0.01).ended
    ''
    """
    watch = Watch(pid, children=children, interval_s=interval_s)
    for _ in watch.run(seconds):
        pass
    return watch.trend(requests_per_second)


def live(
    pid: int, *, seconds: float = 60.0, interval_s: float = 0.5, children: bool = False,
    requests_per_second: float | None = None,
) -> Trend:  # fmt: skip
    """Watch a process and draw it meanwhile, at most once a second; the last picture stays, with its caption.

    In a notebook one output is updated (no widget, so it exports); elsewhere and headless only the end is shown.
    """
    from o1lab import plots
    from o1lab.progress import headless, in_kernel

    watch = Watch(pid, children=children, interval_s=interval_s)
    handle, drawn = None, time.monotonic()
    for _ in watch.run(seconds):
        if headless() or not in_kernel() or time.monotonic() - drawn < 1 or len(watch.samples) < 2:
            continue
        from IPython.display import display

        data = {"application/vnd.plotly.v1+json": json.loads(figure(watch).to_json())}
        if handle is None:
            handle = display(data, raw=True, display_id=True)
        else:
            handle.update(data, raw=True)
        drawn = time.monotonic()
    trend = watch.trend(requests_per_second)
    if len(trend.samples) < 2:
        print(trend)
    elif handle is None:
        plots.show(figure(trend), trend.caption())
    else:
        handle.update(plots.bundle(plots.captioned(figure(trend), trend.caption()), trend.caption()), raw=True)
    return trend


def figure(seen: Trend | Watch) -> go.Figure:
    """Growth of host and device memory over the time watched, with the fitted lines where there is a trend.

    ``seen`` is a finished :class:`Trend`, or a :class:`Watch` that goes on and is drawn without a judgement.
    """
    import plotly.graph_objects as go

    from o1lab import plots

    judged = seen if isinstance(seen, Trend) else None
    pid = judged.pid if judged else seen.process.pid
    drawn, ends, found, grey = go.Figure(), [], [], plots.STYLES["control"]

    def line(xs: list[float], ys: list[float], name: str, colour: str, dash: str, width: int = 3) -> None:
        x, y = plots.downsample(xs, ys)
        style = {"color": colour, "dash": dash, "width": width}
        drawn.add_scatter(x=x, y=y, name=name, mode="lines", line=style)

    for where, field, dash in (("host", "own_bytes", "solid"), ("device", "device_bytes", "dot")):
        growth = judged and getattr(judged, where)
        pairs = [(s.seconds, getattr(s, field)) for s in seen.samples if getattr(s, field) is not None]
        if len(pairs) < 2:
            continue
        xs, ys = [at for at, _ in pairs], [(value - pairs[0][1]) / MIB for _, value in pairs]
        trend, start = (growth.verdict == TREND, growth.start) if growth else (False, 0)
        colour = plots.COLOURS["broken" if trend else "fixed"]
        if start:
            line(xs[: start + 1], ys[: start + 1], f"{where}, left out", grey.colour, dash)
        line(xs[start:], ys[start:], where, colour, dash)
        if trend:
            rate = growth.slope.value / MIB
            centre = median(y - rate * x for x, y in zip(xs[start:], ys[start:], strict=True))
            ends_x = [xs[start], xs[-1]]
            line(ends_x, [centre + rate * x for x in ends_x], f"{where}, fitted", plots.COLOURS["ideal"], "dash", 2)
            found.append(f"{where} +{readable(rate * 3600, 3)} MiB an hour")
        ends.append((ys[-1], xs[-1], where, colour))
    title = "; ".join(found) + " (trend, unproven)" if found else judged.host.verdict if judged else "watched now"
    shift, span = 0.0, max((y for trace in drawn.data for y in trace.y), default=0.0) or 1.0
    ends.sort()
    for place, (y, x, where, colour) in enumerate(ends):
        if place and (y - ends[place - 1][0]) / span < 0.07:  # the names must not lie on one another
            shift += 22
        drawn.add_annotation(
            x=x, y=y, text=f"<b>{where}</b>", xanchor="left", xshift=8, yshift=shift, showarrow=False,
            font={"color": colour, "size": plots.TEXT},
        )  # fmt: skip
    drawn.update_layout(title_text=f"PID {pid}: {title}", template="o1lab", margin={"r": 95})
    drawn.update_xaxes(title_text="time watched (s)", range=[0, 1.01 * max((end[1] for end in ends), default=1.0)])
    drawn.update_yaxes(title_text="growth since the first reading (MiB)")
    return drawn


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``watch`` to ``parser``."""
    parser.epilog = "exit code: 0 no trend, 1 a trend (unproven), 2 could not judge: too few readings or bad input"
    parser.add_argument("pid", type=int, metavar="PID", help="number of the process, as `ps -e` shows it")
    parser.add_argument("--seconds", type=float, help="how long to watch (default 120; Ctrl-C ends it sooner)")
    parser.add_argument("--samples", type=int, help="how many readings to take instead of a time")
    parser.add_argument("--interval", type=float, default=0.5, metavar="S", help="seconds between readings")
    parser.add_argument("--children", action="store_true", help="add the memory of its children")
    parser.add_argument("--requests-per-second", type=float, metavar="N", help="its load, to give bytes per request")
    parser.add_argument("--json", metavar="FILE", help="write readings and verdict to FILE")


def command(options: argparse.Namespace) -> int:
    """Watch, with a line that says how it goes, then print the summary; the exit code says what was found."""
    for name in ("seconds", "samples", "requests_per_second"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise WatchError(f"--{name.replace('_', '-')} {value}: give a number above zero")
    seconds = options.seconds or (None if options.samples else 120.0)
    watch = Watch(options.pid, children=options.children, interval_s=options.interval)
    say = _Line(sys.stdout)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a SIGTERM, too, leaves a summary
    try:
        for sample in watch.run(seconds, options.samples):
            say(watch, sample)
    except KeyboardInterrupt:
        watch.ended = watch.ended or "stopped by hand"
    finally:
        signal.signal(signal.SIGTERM, before)
        say.end()
    trend = watch.trend(options.requests_per_second)
    print(trend)
    if options.json:
        from o1lab.storage import write_json

        write_json(options.json, trend.to_dict())
    return EXIT_CODES[trend.kind]


class _Line:
    """One line that is written over in a terminal; in a log, one every five seconds."""

    def __init__(self, stream: Any) -> None:
        from o1lab.progress import LINE_SECONDS, kind

        self.stream, self.kind, self.told, self.open = stream, kind(stream), -1e9, False
        self.every = 0.2 if self.kind == "bar" else LINE_SECONDS

    def __call__(self, watch: Watch, sample: Sample) -> None:
        if self.kind == "none" or sample.seconds - self.told < self.every:
            return
        self.told, first = sample.seconds, watch.samples[0]
        parts = [f"{watch.name} {watch.process.pid}", f"{sample.seconds:.0f} s", f"host {mib(sample.own_bytes)}"]
        parts[-1] += f" ({mib(sample.own_bytes - first.own_bytes, '+')})"
        device = next((s.device_bytes for s in reversed(watch.samples) if s.device_bytes is not None), None)
        if device is not None:
            parts.append(f"device {mib(device)} of {watch.device.whose}")
        text = " · ".join([*parts, f"{sample.threads} threads"])
        if self.kind == "bar":
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r" + text[:width].ljust(width))
            self.open = True
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def end(self) -> None:
        """Begin a new line after the last one."""
        if self.open:
            self.stream.write("\n")
