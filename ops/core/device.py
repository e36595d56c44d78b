"""What a launch asks of the device it runs on."""

from functools import cache

import torch

# what is assumed where no GPU is present: the interpreter and the CPU's compilations make the same programs as an H200
H200_SMS = 132
_WORKSPACES: dict[tuple[torch.device, str], list[torch.Tensor]] = {}


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a CUDA device; an H200's for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS


def workspace(device: torch.device, key: str, nbytes: int, zero: bool = False) -> torch.Tensor:
    """A uint8 tensor of at least `nbytes` on `device`; `zero=True` for counters (zeroed once, kernels leave them at
    zero).
    """
    generations = _WORKSPACES.setdefault((device, key), [])
    if not generations or generations[-1].numel() < nbytes:
        size = max(nbytes, 2 * generations[-1].numel() if generations else 0)
        make = torch.zeros if zero else torch.empty
        generations.append(make(size, dtype=torch.uint8, device=device))
    return generations[-1]
