"""Memory growth in inference: find it, explain it, name its owner, cure it; and follow allocations through their lives.

``probe`` and ``watch`` judge a loop from inside, ``python -m o1lab watch PID`` from outside; ``release_notebook`` frees
what Jupyter keeps; ``simulate`` replays a recorded allocation trace under other allocator settings.
"""

from o1lab.memory.counters import Reading, has_exact_host, read
from o1lab.memory.jupyter import release_notebook
from o1lab.memory.leak_report import LeakReport
from o1lab.memory.plants import DevicePlant, HostPlant
from o1lab.memory.probe import probe
from o1lab.memory.serving_loop import ServingLoop, with_plant
from o1lab.memory.simulate import simulate
from o1lab.memory.watch import watch

__all__ = [
    "DevicePlant",
    "HostPlant",
    "LeakReport",
    "Reading",
    "ServingLoop",
    "has_exact_host",
    "probe",
    "read",
    "release_notebook",
    "simulate",
    "watch",
    "with_plant",
]
