"""What the cost model knows of a GPU: one entry a GPU, each figure with where it comes from."""

from dataclasses import dataclass
from itertools import pairwise


class UnknownGpu(ValueError):
    """A GPU that the table has no entry for."""


@dataclass(frozen=True)
class Gpu:
    """Ceilings and fixed costs of one GPU.

    source         where the figures come from
    sms            streaming multiprocessors
    bandwidth      (SMs, TB/s) points: what a reading loop on so many SMs gets out of the memory; straight lines between
                   them
    fp8_tflops     dense tensor-core rate of 8-bit operands; f16_tflops of 16-bit ones; f32_tflops outside the tensor
                   cores
    launch         seconds from a kernel's end to the next one's start inside a CUDA graph; launch_pdl with programmatic
                   dependent launch (each in a chain of 320 kernels that do nothing)
    fork           seconds from the main stream's event to the side stream's kernel
    join           seconds from the side stream's event to a kernel of the main stream, where that was waiting for it;
                   join_launch: what a join adds in any case to a kernel launched without PDL, whose edges are all whole
    nvlink_gbs     GB/s that a kernel reads from other GPUs of the host
    copy_gbs       GB/s of a copy from pinned host memory; copy_latency its fixed seconds
    """

    name: str
    source: str
    sms: int
    bandwidth: tuple[tuple[int, float], ...]
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

    def bytes_per_second(self, sms: float | None = None) -> float:
        """What `sms` SMs (None = all) read in a second."""
        if sms is None or sms >= self.bandwidth[-1][0]:
            return self.bandwidth[-1][1] * 1e12
        for (low, slow), (high, fast) in pairwise(((0, 0.0), *self.bandwidth)):
            if sms <= high:
                return (slow + (fast - slow) * (sms - low) / (high - low)) * 1e12
        return self.bandwidth[-1][1] * 1e12

    def flops_per_second(self, element_bytes: int, sms: float | None = None) -> float:
        """Dense rate of `sms` SMs on operands of so many bytes (1: FP8, 2: 16 bit, 4: fp32)."""
        rate = {1: self.fp8_tflops, 2: self.f16_tflops}.get(element_bytes, self.f32_tflops)
        return rate * 1e12 * (1.0 if sms is None else min(1.0, sms / self.sms))


# fitted with compiler/cost/kinds.py; bare kernels of a second stream measure 0.3 to 0.6 us for a fork and a join
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
)
H100 = Gpu(
    name="H100",
    source="not measured: the H100 SXM's datasheet (3.35 TB/s) times the share of the datasheet's bandwidth that an "
    "H200 reaches; fixed costs as on the H200",
    sms=132,
    bandwidth=((33, 2.09), (66, 2.98), (99, 3.19), (132, 3.27)),
    fp8_tflops=1979.0,
    f16_tflops=989.0,
    f32_tflops=67.0,
    launch=1.22e-6,
    launch_pdl=0.93e-6,
    fork=FORK,
    join=JOIN,
    join_launch=JOIN_LAUNCH,
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (H200, H100)}


def gpu_named(name: str) -> Gpu:
    """The entry for `name` ("H200", or a driver's name such as "NVIDIA H200").

    Raises UnknownGpu naming those that there are.
    """
    for gpu in GPUS.values():
        if gpu.name.lower() in name.lower():
            return gpu
    raise UnknownGpu(
        f"the cost model has no figures for {name!r}; it knows {', '.join(GPUS)} (compiler/cost/hardware.py)"
    )
