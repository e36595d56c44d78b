"""An adapter as vLLM's users name it."""

from dataclasses import dataclass

from .errors import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name and directory, for `lora_request=` of `LLM.generate` and `LLM.chat`; `adapter=` takes names.

    lora_name     the adapter's name; it is loaded at the first use of a name that is not known
    lora_int_id   from 1 on, as in vLLM, where it tells adapters apart; here the name does
    lora_path     its directory in PEFT's format; '' for an adapter that is loaded
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name={self.lora_name!r} must be an adapter's name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(f"lora_int_id={self.lora_int_id!r} must be an integer from 1 on")

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
