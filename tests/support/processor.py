"""The processor that runs the tests, and a library that behaves as it does on other processors."""

import os
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS")
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
ONE_RESULT = frozenset({aten.silu.default, aten.sigmoid.default})


def processor_name() -> str:
    """The processor, its instruction sets, and the variables and torch settings that choose among kernels."""
    lines: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                lines.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    known = lines.get("flags", "").split()
    parts = [lines.get("model name", "unknown processor"), " ".join(flag for flag in FLAGS if flag in known)]
    parts += [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    if "torch" in sys.modules:
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
        parts.append(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
        parts.append(f"{torch.get_num_threads()} threads, AMX {'unknown' if has_amx is None else has_amx()}")
    return ", ".join(part for part in parts if part)


class OtherKernels(TorchDispatchMode):
    """Sums of floating-point products are in another order for each number of rows and each `variant`, and SiLU and
    sigmoid differ in the last bit at places that depend on the tensor's size: what a library may do on a processor that
    is not there. `products` counts them by dtype.
    """

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.variant = variant
        self.products: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            place = PRODUCTS[func]
            first, second = args[place], args[place + 1]
            if first.is_floating_point():
                self.products[first.dtype] = self.products.get(first.dtype, 0) + 1
                order = torch.randperm(first.shape[-1], generator=self._generator(first.shape[-2]))
                args = (*args[:place], first[..., order], second[..., order, :], *args[place + 2 :])
        result = func(*args, **kwargs)
        if func in ONE_RESULT:
            changed = torch.rand(result.shape, generator=self._generator(result.numel())) < 0.1
            return torch.where(changed, torch.nextafter(result.float(), result.float() + 1).to(result.dtype), result)
        return result

    def _generator(self, size: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * size + self.variant)
