"""How much is read, and what is rounded for, where nothing else is asked. Does without torch."""

from collections.abc import Mapping
from typing import Any

FIGURE_TOKENS, LENGTH = 4096, 512  # of the text, and of a piece of it
ROUND_TOKENS = 131072  # sums over few tokens fit those tokens alone
CPU_TOKENS, CPU_LENGTH = 1024, 256
# of int8: the arm `int8-calibrated-rounded-values` of `sidestream eval --real`
ROUNDED_FOR: Mapping[str, Any] = {"norm_rotation": 64, "rotate_values": True}
