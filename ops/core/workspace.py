"""Scratch memory that outlives a launch: split-K planes and arrival counters.

A workspace belongs to one (device, key); ops that may run at the same time use different keys. It only grows, and old
generations stay alive, because a captured CUDA graph goes on using the address that it saw.
"""

import torch

_WORKSPACES: dict[tuple[torch.device, str], list[torch.Tensor]] = {}


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
