"""The OpenAPI document, made from the structs."""

from typing import Any, NamedTuple

import msgspec

from .chat import ChatChunk, ChatCompletion, ChatRequest
from .completions import Completion, CompletionRequest
from .errors import ErrorBody
from .models import AdapterChanged, LoadAdapter, ModelCard, ModelList, UnloadAdapter
from .responses import Response, ResponseEvent, ResponseRequest
from .status import Status, Version
from .tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

_REF = "#/components/schemas/{name}"
_EVENT = {
    "type": "object",
    "description": "one event; data is JSON, and [DONE] at the end",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


class Endpoint(NamedTuple):
    """One operation.

    event   what an event of its stream holds
    open    needs no key
    text    answers with this type of text
    """

    method: str
    path: str
    summary: str
    takes: type | None = None
    gives: type | None = None
    event: type | None = None
    open: bool = False
    text: str = ""


ENDPOINTS = (
    Endpoint("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, ChatCompletion, ChatChunk),
    Endpoint("post", "/v1/completions", "Continue prompts", CompletionRequest, Completion, Completion),
    Endpoint("post", "/v1/responses", "Answer a conversation", ResponseRequest, Response, ResponseEvent),
    Endpoint("get", "/v1/models", "The base model and its adapters", None, ModelList),
    Endpoint("get", "/v1/models/{model}", "The base model or one adapter", None, ModelCard),
    Endpoint("post", "/v1/load_lora_adapter", "Load an adapter (admin)", LoadAdapter, AdapterChanged),
    Endpoint("post", "/v1/unload_lora_adapter", "Unload an adapter (admin)", UnloadAdapter, AdapterChanged),
    Endpoint("post", "/tokenize", "Token ids of a text or a conversation", TokenizeRequest, Tokenized),
    Endpoint("post", "/detokenize", "Text of token ids", DetokenizeRequest, Detokenized),
    Endpoint("get", "/health", "Whether an engine is alive", None, Status, open=True),
    Endpoint("get", "/ready", "Whether requests are taken", None, Status, open=True),
    Endpoint("get", "/version", "The release", None, Version),
    Endpoint("get", "/metrics", "Counters and gauges for Prometheus", text="text/plain"),
    Endpoint("get", "/docs", "This document as a page", open=True, text="text/html"),
    Endpoint("get", "/openapi.json", "This document", open=True),
    Endpoint("get", "/", "The console: a page for people", open=True, text="text/html"),
)


def openapi_document(version: str) -> dict[str, Any]:
    """The whole document, for this release."""
    types = {kind for each in ENDPOINTS for kind in (each.takes, each.gives, each.event) if kind is not None}
    ordered = sorted(types | {ErrorBody}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    refs = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sidestream", "version": version, "description": "LoRA fine-tunes of one base model."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(each: Endpoint, refs: dict[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if each.text:
        content[each.text] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": {"type": "object"} if each.gives is None else refs[each.gives]}
    if each.event is not None:
        content["text/event-stream"] = {"schema": _EVENT, "x-data": refs[each.event]}
    problem = {"application/json": {"schema": refs[ErrorBody]}}
    made: dict[str, Any] = {
        "summary": each.summary,
        "operationId": each.path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_"),
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {"description": "what went wrong", "content": problem},
        },
        "security": [{}] if each.open else [{"key": []}, {}],
    }
    if each.gives is Status:
        made["responses"]["503"] = {"description": "it is not", "content": content}
    if each.takes is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[each.takes]}}}
    if "{model}" in each.path:
        schema = {"type": "string", "minLength": 1, "maxLength": 256}
        made["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    return made
