"""Memory growth in inference: exact counters, the leak probe, plants of known size, sampling, compile accounting."""

from o1lab.memory.counters import Reading, has_exact_host, read
from o1lab.memory.leak_report import LeakReport
from o1lab.memory.plants import DevicePlant, HostPlant
from o1lab.memory.probe import probe
from o1lab.memory.serving_loop import ServingLoop, with_plant
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
    "watch",
    "with_plant",
]
