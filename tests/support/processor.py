"""The processor that runs the tests."""

import os
import sys

FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS")


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
    torch = sys.modules.get("torch")  # pytest's main process does without it
    if torch is not None:
        has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
        parts.append(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
        parts.append(f"{torch.get_num_threads()} threads, AMX {'unknown' if has_amx is None else has_amx()}")
    return ", ".join(part for part in parts if part)
