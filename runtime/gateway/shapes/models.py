"""/v1/models, /v1/load_lora_adapter, /v1/unload_lora_adapter."""

from typing import Annotated, Literal

from msgspec import Meta

from .common import AdapterName, Answer, Body, Ignored


class ModelCard(Answer, frozen=True, kw_only=True):
    """The base model, or an adapter, which has the base as `parent`.

    content   a hash of the adapter's config and weights
    places    engine -> where the adapter is: `gpu`, `cpu`, `disk` or `loading`
    """

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "sidestream"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    rank: int | None = None
    content: str | None = None
    places: dict[str, str] | None = None


class ModelList(Answer, frozen=True, kw_only=True):
    """The base model, and the adapters that the caller may use."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class LoadAdapter(Body, frozen=True, kw_only=True):
    """Makes a PEFT adapter, in a directory on the engine's machine, usable as `lora_name`."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    load_inplace: Annotated[bool, Meta(description="also when the name is taken")] | None = None


class UnloadAdapter(Body, frozen=True, kw_only=True):
    """Forgets an adapter."""

    lora_name: AdapterName
    lora_int_id: Ignored = None


class AdapterChanged(Answer, frozen=True, kw_only=True):
    """What was done."""

    message: str
