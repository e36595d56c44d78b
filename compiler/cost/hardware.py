"""Ceilings and fixed costs of GPUs: a table of measured GPUs, with sources; for others, figures from the driver."""

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch


class UnknownGpu(ValueError):
    """A GPU without an entry in the table."""


@dataclass(frozen=True)
class Gpu:
    """Ceilings and fixed costs of one GPU.

    source         origin of the figures
    drivers_name   pattern of this GPU's names in drivers
    sms            streaming multiprocessors
    bandwidth      (SMs, TB/s) points of a loop that reads memory, interpolated linearly
    fp8_tflops     dense tensor-core rate of 8-bit operands; f16_tflops: of 16-bit operands; f32_tflops: outside the
                   tensor cores; known_rates: False if scaled from another GPU's
    launch         seconds from a kernel's end to the next one's start inside a CUDA graph; launch_pdl: the same with
                   programmatic dependent launch (each in a chain of 320 empty kernels)
    fork           seconds from the main stream's event to the side stream's kernel
    join           seconds from the side stream's event to a waiting kernel of the main stream; join_launch: seconds
                   that a join always adds to a kernel launched without PDL
    nvlink_gbs     GB/s that a kernel reads from other GPUs of the host
    copy_gbs       GB/s of a copy from pinned host memory; copy_latency: its fixed seconds
    """

    name: str
    source: str
    sms: int
    bandwidth: tuple[tuple[float, float], ...]
    fp8_tflops: float
    f16_tflops: float
    f32_tflops: float
    launch: float
    launch_pdl: float
    fork: float
    join: float
    join_launch: float
    nvlink_gbs: float = 394.0  # two H200 over 18 links each
    copy_gbs: float = 50.0
    copy_latency: float = 4e-6
    drivers_name: str = ""
    known_rates: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return name, bytes per second and source, for files of measurements."""
        return {"name": self.name, "bytes_per_second": self.bytes_per_second(), "source": self.source}

    def describe_bandwidth(self) -> str:
        """Return bandwidth and name: "3.03 TB/s (H100)"."""
        return f"{self.bytes_per_second() / 1e12:.2f} TB/s ({self.name})"

    def bytes_per_second(self, sms: float | None = None) -> float:
        """Return the bytes per second that `sms` SMs (None = all) read."""
        if sms is None or sms >= self.bandwidth[-1][0]:
            return self.bandwidth[-1][1] * 1e12
        for (low, slow), (high, fast) in pairwise(((0, 0.0), *self.bandwidth)):
            if sms <= high:
                return (slow + (fast - slow) * (sms - low) / (high - low)) * 1e12
        return self.bandwidth[-1][1] * 1e12

    def flops_per_second(self, element_bytes: int, sms: float | None = None) -> float:
        """Return the dense FLOPs per second of `sms` SMs (None = all), for operands of 1, 2 or 4 (fp32) bytes."""
        rate = {1: self.fp8_tflops, 2: self.f16_tflops}.get(element_bytes, self.f32_tflops)
        return rate * 1e12 * (1.0 if sms is None else min(1.0, sms / self.sms))


# fitted with compiler/cost/kernel_costs.py; bare kernels of a second stream measure 0.3 to 0.6 us for a fork and a join
FORK, JOIN, JOIN_LAUNCH = 0.60e-6, 0.15e-6, 1.25e-6
H200 = Gpu(
    name="H200",
    source="bandwidth, launches and waits measured on an H200 SXM; FLOP rates from the datasheet",
    sms=132,
    bandwidth=((33, 2.21), (66, 3.65), (99, 4.37), (132, 4.68)),
    fp8_tflops=1979.0,
    f16_tflops=989.0,
    f32_tflops=67.0,
    launch=1.22e-6,
    launch_pdl=0.93e-6,
    fork=FORK,
    join=JOIN,
    join_launch=JOIN_LAUNCH,
    drivers_name=r"(NVIDIA )?H200( SXM5?)?",
)
H100 = replace(
    H200,
    name="H100",
    source="bandwidth measured by a copy on an H100 SXM, that of fewer SMs estimated; fixed costs not measured: as on "
    "an H200; FLOP rates from the datasheet",
    bandwidth=((33, 1.94), (66, 2.76), (99, 2.96), (132, 3.03)),
    drivers_name=r"(NVIDIA )?H100( SXM5?| 80GB HBM3)?",
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (H200, H100)}
COPY_SHARE = 0.9
"""Share of the memory's peak bandwidth that a copy reaches (an H100 SXM: 3.03 of 3.35 TB/s)."""
_COPIED_BYTES, _COPIES = 1 << 28, 5


def gpu_named(name: str) -> Gpu:
    """Return the entry for `name` ("H200", or a driver's name such as "NVIDIA H100 80GB HBM3").

    Other variants of a chip, such as the H100 PCIe, have other memory and no entry. Raises UnknownGpu, which lists the
    entries.
    """
    for gpu in GPUS.values():
        if re.fullmatch(gpu.drivers_name, name.strip(), re.IGNORECASE):
            return gpu
    raise UnknownGpu(
        f"the cost model has no figures for {name!r}, only for {', '.join(GPUS)} (compiler/cost/hardware.py)"
    )


def gpu_of(device: torch.device | str = "cuda") -> Gpu:
    """Return the figures of a CUDA device: its table entry, or else estimated ones.

    Estimates are an H200's figures with this device's bandwidth (reported by the driver, or measured by a copy) and
    FLOP rates scaled by the number of SMs.
    """
    found = torch.cuda.get_device_properties(device)
    try:
        return gpu_named(found.name)
    except UnknownGpu:
        pass
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    if clock and width:  # kHz and bits; two transfers per clock
        peak = COPY_SHARE * 2 * clock * 1e3 * width / 8
        source = f"{COPY_SHARE:.0%} of the bandwidth that its driver reports"
    else:
        peak, source = _copied_bytes_per_second(torch.device(device)), "bandwidth measured here by a copy"
    sms = found.multi_processor_count
    return replace(
        H200,
        name=found.name,
        source=f"{source}; other figures not measured, as on an H200 (FLOP rates by the number of SMs)",
        sms=sms,
        bandwidth=tuple(
            (sms * part / H200.sms, peak / 1e12 * speed / H200.bandwidth[-1][1]) for part, speed in H200.bandwidth
        ),
        fp8_tflops=H200.fp8_tflops * sms / H200.sms,
        f16_tflops=H200.f16_tflops * sms / H200.sms,
        f32_tflops=H200.f32_tflops * sms / H200.sms,
        drivers_name=re.escape(found.name),
        known_rates=False,
    )


def gpu_here(assumed: Gpu = H200) -> Gpu:
    """Return the figures of the current CUDA device; without a GPU those of `assumed`, with a note in `source`."""
    if torch.cuda.is_available():
        return gpu_of()
    return replace(assumed, source=f"assumed, as this machine has no GPU: {assumed.source}")


@cache
def _copied_bytes_per_second(device: torch.device) -> float:
    """Return the bytes per second, read and written, of the fastest of some copies."""
    with torch.cuda.device(device):
        size = min(_COPIED_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_COPIES + 1)]
        target.copy_(source)
        marks[0].record()
        for mark in marks[1:]:
            target.copy_(source)
            mark.record()
        marks[-1].synchronize()
    return 2e3 * size / min(begin.elapsed_time(end) for begin, end in pairwise(marks))
