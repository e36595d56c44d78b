"""Convert vLLM's LoRARequests to adapter names."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...graphs.adapter_config import AdapterError
from ...graphs.model_directory import adapter_directory
from ..api.errors import RequestError
from ..api.lora_request import LoRARequest
from .registry import AdapterRegistry


def adapter_names(
    requests: Sequence[Any], registry: AdapterRegistry, add_adapter: Callable[[str, str], None]
) -> list[str | None]:
    """Return the adapter's name of each LoRARequest (None: the base model); add unregistered ones from their paths.

    Raises RequestError for another type or a name that was loaded from another directory, and what `add_adapter`
    raises.
    """
    wrong = next((each for each in requests if each is not None and not isinstance(each, LoRARequest)), None)
    if wrong is not None:
        raise RequestError(f"lora_request must be a LoRARequest, a list of them or None, not {type(wrong).__name__}")
    for each in dict.fromkeys(each for each in requests if each is not None and each.lora_path):
        number = registry.numbers.get(each.lora_name)
        if number is None:
            add_adapter(each.lora_name, each.lora_path)
        elif _directory(each.lora_path).resolve() != registry.by_number(number).path.resolve():
            raise RequestError(
                f"adapter {each.lora_name!r} was loaded from another directory than {each.lora_path!r}; use another "
                "name, or add_adapter(..., replace=True)"
            )
    return [None if each is None else each.lora_name for each in requests]


def _directory(path: str) -> Path:
    """Return the directory of a path or hub id; the path itself if the adapter no longer exists."""
    try:
        return adapter_directory(path)
    except AdapterError:
        return Path(path)
