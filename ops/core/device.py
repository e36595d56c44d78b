"""SM count of the device, and scratch memory that outlives a launch."""

from functools import cache

import torch

# Without a GPU, the interpreter and compilations ahead of time use an H200's number, for the same programs as there.
H200_SMS = 132
_WORKSPACES: dict[tuple[torch.device, str], list[torch.Tensor]] = {}


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device; an H200's for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS


def workspace(device: torch.device, key: str, nbytes: int, zero: bool = False) -> torch.Tensor:
    """Return uint8 scratch memory of at least `nbytes` on `device`, for split-K planes and arrival counters.

    `zero`: for counters; they are zeroed once, and each kernel resets them to zero. Ops that may run at the same time
    use different keys. A workspace only grows, and old allocations stay alive, because captured CUDA graphs keep their
    addresses.
    """
    generations = _WORKSPACES.setdefault((device, key), [])
    if not generations or generations[-1].numel() < nbytes:
        size = max(nbytes, 2 * generations[-1].numel() if generations else 0)
        make = torch.zeros if zero else torch.empty
        generations.append(make(size, dtype=torch.uint8, device=device))
    return generations[-1]
