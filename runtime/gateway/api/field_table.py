"""Table of the fields of OpenAI's, vLLM's and SGLang's bodies that Sidestream does not have.

A field that a body declares is supported. The table holds all others: their values without an effect are accepted, and
the rest is refused with a remedy. `with_table_fields` adds them to a body. docs/http_fields.md shows the table.
"""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from ...api.unsupported import ANY, Unsupported, has_no_effect
from ..interfaces import GatewayError
from .body_types import Body, Ignored, Refused

T = TypeVar("T", bound=Body)
Endpoint = Literal["completions", "chat", "responses"]
ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat", "responses")
TEXTS: tuple[Endpoint, ...] = ("completions", "chat")
EMPTY: tuple[Any, ...] = (False, "", [], {})


class Row(NamedTuple):
    """Fields of `endpoints` with the same accepted values. `names` are separated by spaces."""

    names: str
    option: Unsupported
    endpoints: tuple[Endpoint, ...] = ENDPOINTS


def _accepted(names: str, reason: str, endpoints: tuple[Endpoint, ...] = ENDPOINTS) -> Row:
    return Row(names, Unsupported((ANY,), reason), endpoints)


def _refused(
    names: str, remedy: str, accepted: tuple[Any, ...] = EMPTY, endpoints: tuple[Endpoint, ...] = ENDPOINTS
) -> Row:
    return Row(names, Unsupported(accepted, remedy), endpoints)


ROWS = (
    _accepted("user safety_identifier session_id custom_labels extra_key", "usage is recorded by API key"),
    _accepted("metadata", "it is not stored", TEXTS),
    _accepted("request_id rid", "the header X-Request-Id sets the id"),
    _accepted("store", "completions and chats are not stored", TEXTS),
    _accepted("service_tier", "all requests have the same tier"),
    _accepted(
        "prompt_cache_key prompt_cache_options prompt_cache_retention prediction",
        "the prefix cache and speculation need no hints",
    ),
    _accepted("max_tool_calls", "the client calls the tools", ("responses",)),
    _accepted("data_parallel_rank routed_dp_rank", "the gateway chooses the engine"),
    _accepted(
        "mm_processor_kwargs media_io_kwargs return_mm_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video "
        "images_config video_config",
        "the model reads text only",
    ),
    _accepted("guided_decoding_backend", "llguidance constrains answers"),
    _accepted("stream_interval", "events are sent as tokens arrive"),
    _accepted("return_cached_tokens_details return_spec_tokens_details", "usage has these details"),
    _accepted(
        "routed_experts_start_len routed_experts_prompt_start return_flat_raw_top_logprobs_b64",
        "they modify fields that are refused",
    ),
    _accepted("separate_reasoning stream_reasoning", "--reasoning-parser of the server decides"),
    _refused("spaces_between_special_tokens", "leave it out", (True,)),
    _refused("include_reasoning", "drop the reasoning of the answer", (True,), ("completions", "responses")),
    _refused("thinking_token_budget", "use /v1/chat/completions", (-1,), ("completions",)),
    _refused("reasoning_effort", "use /v1/chat/completions", ("none",), ("completions",)),
    _refused("thinking task", "use chat_template_kwargs", endpoints=("chat",)),
    _accepted("early_stopping", "a beam search ends when no open continuation can become one of the best"),
    _accepted("length_penalty", "it modifies a field that is refused", ("responses",)),
    _refused("use_beam_search", "use /v1/chat/completions", endpoints=("responses",)),
    _refused("logits_processors custom_logit_processor custom_params vllm_xargs", "use logit_bias or bad_words"),
    _refused(
        "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern json_schema regex ebnf "
        "structural_tag",
        "use structured_outputs",
    ),
    _refused("stop_regex", "use stop"),
    _refused("no_stop_trim", "use include_stop_str_in_output"),
    _refused("repetition_detection", "use repetition_penalty"),
    _refused("truncate_prompt_tokens", "shorten the input", (-1,), ("responses",)),
    _accepted("truncation_side", "it modifies a field that is refused", ("responses",)),
    _refused("suffix", "put the text that follows into the prompt", endpoints=("completions",)),
    _refused("prompt_embeds", "send a text or token ids as prompt", endpoints=("completions",)),
    _refused("input_ids", "use /v1/completions with token ids as prompt", endpoints=("chat",)),
    _refused("logprob_token_ids", "use /v1/chat/completions", endpoints=("responses",)),
    _refused(
        "return_token_ids return_tokens_as_token_ids", "use /v1/chat/completions or /tokenize", endpoints=("responses",)
    ),
    _refused(
        "return_prompt_token_ids return_prompt_text return_meta_info "
        "return_assistant_tokens_mask return_input_ids_in_sglext return_output_ids_in_sglext",
        "use return_token_ids or /tokenize",
    ),
    _refused(
        "return_hidden_states return_routed_experts return_sampling_mask sampling_logprobs_mode "
        "return_flat_raw_output_top_logprobs",
        "use logprobs or prompt_logprobs",
    ),
    _refused("cache_salt", "start the server with --no-prefix-caching to keep prompts apart"),
    _refused("session_params", "send the whole prompt; the prefix cache finds its beginning"),
    _refused("kv_transfer_params", "leave it out", endpoints=("completions", "responses")),
    _refused(
        "ec_transfer_params bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank",
        "leave it out; an engine computes prompts and answers",
    ),
    _refused("watermark watermarking", "leave it out; answers have no watermark"),
    _refused("moderation", "moderate the answer yourself"),
    _refused("chat_template", "use /v1/chat/completions", endpoints=("completions",)),
    _refused("functions", "use tools", endpoints=("chat",)),
    _refused("function_call", "use tool_choice", (*EMPTY, "none", "auto"), ("chat",)),
    _refused("audio", "the model writes text only", endpoints=("chat",)),
    _refused("modalities", "the model writes text only", (["text"], []), ("chat",)),
    _refused("verbosity", "ask for it in a message", ("medium",), ("chat",)),
    _refused("web_search_options", "offer a function in tools", endpoints=("chat",)),
    _refused(
        "conversation previous_input_messages previous_response prompt",
        "these are not stored; use previous_response_id, or send the whole conversation in input",
        endpoints=("responses",),
    ),
    _refused("context_management", "shorten the input", endpoints=("responses",)),
)
_OPTIONS = {name: row.option for row in ROWS for name in row.names.split()}
_OTHER = Unsupported(EMPTY, "leave it out")


def with_table_fields(endpoint: Endpoint) -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds the table's fields of an endpoint to its body."""

    def add(body: type[T]) -> type[T]:
        names = (name for row in ROWS if endpoint in row.endpoints for name in row.names.split())
        fields = [
            (name, Ignored if ANY in _OPTIONS[name].accepted else Refused, None)
            for name in names
            if name not in body.__struct_fields__
        ]
        # the same name and module: the process that decodes large bodies finds the body by them
        complete: Any = msgspec.defstruct(
            body.__name__,
            fields,
            bases=(body,),
            module=body.__module__,
            namespace={"__doc__": body.__doc__},
            frozen=True,
            kw_only=True,
        )
        made: type[T] = complete
        return made

    return add


@functools.cache
def _refused_fields(body_type: type[msgspec.Struct]) -> list[str]:
    hints = get_type_hints(body_type, include_extras=True)
    return [name for name, annotation in hints.items() if annotation == Refused]


@functools.cache
def _reader(body_type: type[msgspec.Struct]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of the fields of type `Refused`, and twice the type of the body."""
    return attrgetter("__class__", "__class__", *_refused_fields(body_type))  # of two names at least: a tuple


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raise GatewayError 400 if a field of type `Refused` has a value with an effect."""
    names, values = _refused_fields(type(body)), _reader(type(body))(body)[2:]
    if values.count(None) == len(names):  # nearly always, and faster than a loop
        return
    for name, value in zip(names, values, strict=True):
        refuse(name, value)


def refuse(name: str, value: Any) -> None:
    """Raise GatewayError 400 about an unsupported field, unless its value has no effect."""
    option = _OPTIONS.get(name, _OTHER)
    if not has_no_effect(option, value):
        raise GatewayError(400, f"{name} is not supported; {option.remedy}", code="unsupported_parameter", param=name)
