"""Plant leaks of known size and ask each instrument whether it sees them; and ask it again when nothing leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from o1lab import host
from o1lab.errors import ProbeError
from o1lab.memory import counters, sampling
from o1lab.memory.plants import DevicePlant, HostPlant
from o1lab.memory.probe import probe
from o1lab.memory.sampling import finds
from o1lab.memory.serving_loop import with_plant

if TYPE_CHECKING:
    import pandas as pd

SIZES = (64, 512, 4096, 16384, 65536)


def compare(
    step: Callable[[Any], Any], *, inputs: Iterable[Any], sizes: Sequence[int] = SIZES, repeats: int = 1,
    where: str = "host", requests: int = 200, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Plant each size ``repeats`` times in ``step`` and record what RSS, NVML, torch's profiler and the probe say.

    Parameters
    ----------
    step : callable
        The loop without a leak; called with the next of ``inputs``.
    sizes : sequence of int
        Bytes leaked per request; 0 plants nothing (a clean run).
    where : str
        ``"host"`` (native memory) or ``"cuda"`` (a kept tensor).
    requests : int
        Requests that each instrument gets to see, warm-up included for the probe.

    Returns
    -------
    pandas.DataFrame
        One row per planted leak: ``where, planted_bytes, true_bytes, repeat, rss_finds, nvml_finds, profiler_locates``
        (``None`` where this machine lacks the instrument), ``probe_finds, probe_kind, probe_bytes`` (B/request),
        ``rss_bytes`` (slope in B/request).
    """
    import pandas as pd

    from o1lab.progress import progress

    if where not in ("host", "cuda"):
        raise ProbeError(f"where={where!r}: a leak can be planted on 'host' or 'cuda'")
    requests_list = list(inputs)
    rounds, samples = 12, 50 if where == "host" else 25
    per_round = max(1, round(requests / (rounds + 5)))
    rows = []
    cases = [(size, repeat) for size in sizes for repeat in range(repeats)]
    with counters.frozen():
        for size, repeat in progress(cases, total=len(cases), label=f"planted leaks, {where}"):
            leak = _plant(where, size)
            _return_free(where)  # what an earlier case left free would hide this one from the outside tools
            with leak:
                both = with_plant(step, leak)
                seen = sampling.sample(
                    both,
                    inputs=requests_list,
                    requests=requests,
                    samples=samples,
                    seed=seed + repeat,
                    nvml=where == "cuda",
                )
                found = probe(
                    both, inputs=requests_list, rounds=rounds, requests_per_round=per_round, warm_up=4, owners=False,
                    interventions=False,
                )  # fmt: skip
            locates = None
            if where == "cuda":
                with _plant(where, size) as again:
                    sites = sampling.live_sites(with_plant(step, again), inputs=requests_list, requests=requests)
                locates = bool(sites) and sites.most_common(1)[0][0].startswith("plants.py:")
            rate = found.device if where == "cuda" else found.host
            true = leak.true_bytes if size else 0
            rows.append(
                {
                    "where": where,
                    "planted_bytes": size,
                    "true_bytes": true,
                    "repeat": repeat,
                    "rss_finds": finds(seen.rss_slope, true),
                    "nvml_finds": None if seen.nvml is None else finds(seen.nvml_slope, true),
                    "profiler_locates": locates,
                    "probe_finds": found.kind == "per-call leak" and finds(rate, true),
                    "probe_kind": found.kind,
                    "probe_bytes": None if rate is None else rate.value,
                    "rss_bytes": seen.rss_slope.value,
                }
            )
    return pd.DataFrame(rows)


def _return_free(where: str) -> None:
    host.trim()
    if where == "cuda":
        import torch

        torch.cuda.empty_cache()


def _plant(where: str, size: int) -> HostPlant | DevicePlant:
    kind = HostPlant if where == "host" else lambda size, on: DevicePlant(size, "cuda", on=on)
    return kind(max(size, 1), on=size > 0)


def false_alarms(step: Callable[[Any], Any], *, inputs: Iterable[Any], repeats: int = 20, requests: int = 200) -> int:
    """How many of ``repeats`` probes of a clean ``step`` report a leak."""
    from o1lab.progress import progress

    batch, per_round = list(inputs), max(1, round(requests / 17))
    alarms = 0
    with counters.frozen():
        for _ in progress(range(repeats), total=repeats, label="clean repeats"):
            report = probe(step, inputs=batch, rounds=12, requests_per_round=per_round, warm_up=4, owners=False)
            alarms += report.kind in ("per-call leak", "keyed growth")
    return alarms
