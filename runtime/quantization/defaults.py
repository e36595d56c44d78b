"""File names and default sizes of calibration. Imports no torch."""

from collections.abc import Mapping
from typing import Any

AUTO, OFF = "auto", "off"  # option values: the file next to the model's weights, and none
FILE_NAME = "sidestream_calibration.safetensors"

FIGURE_TOKENS, LENGTH = 4096, 512  # tokens of the text, and of one piece
ROUND_TOKENS = 131072  # with few tokens the rounding would only fit these
CPU_TOKENS, CPU_LENGTH = 1024, 256
# for int8, as the arm `int8-calibrated-rounded-values` of `sidestream eval --real`
ROUNDED_FOR: Mapping[str, Any] = {"norm_rotation": 64, "rotate_values": True}


def file_name(precision: str) -> str:
    """Return the file name of rounded weights for a precision."""
    return f"sidestream_rounded_{precision}.safetensors"
