"""What a launch asks of the device it runs on."""

from functools import cache

import torch

# what is assumed where no GPU is present: the interpreter and the CPU's compilations make the same programs as an H200
H200_SMS = 132


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a CUDA device; an H200's for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS
