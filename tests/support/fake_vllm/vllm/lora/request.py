"""Where vLLM has it."""

from sidestream import LoRARequest

__all__ = ["LoRARequest"]
