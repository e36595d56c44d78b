"""vLLM's LoRARequest."""

from dataclasses import dataclass

from .errors import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for `lora_request=` of `LLM.generate` and `LLM.chat`, as in vLLM; `adapter=` takes a name.

    lora_name     name that identifies the adapter; it is loaded when the name is first used
    lora_int_id   positive integer, not used; in vLLM it identifies the adapter
    lora_path     directory in PEFT's format; '' for a loaded adapter
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name={self.lora_name!r} must be an adapter's name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(f"lora_int_id={self.lora_int_id!r} must be a positive integer")

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path
