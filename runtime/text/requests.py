"""What `LLM.generate` is given, as the engine's requests."""

from collections.abc import Callable, Mapping
from typing import Any

from ..api.errors import RequestError
from ..api.request import Constraint, Request
from ..api.sampling_params import SamplingParams
from ..api.structured_outputs import StructuredOutputsParams
from .bad_words import bad_word_ids
from .prompts import adds_special_tokens, as_list, check_request, one_for_each, text_or_ids
from .tokenizer import Tokenizer


def make_requests(
    prompts: Any,
    sampling_params: Any,
    adapter: Any,
    *,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    max_model_len: int,
    adapters: Mapping[str, int],
    first: int,
    default_params: SamplingParams | None = None,
    priority: Any = None,
    compile_grammar: Callable[[StructuredOutputsParams], Constraint],
) -> list[Request]:
    """One request a prompt, numbered from `first`; `default_params`: of prompts without sampling_params.

    Raises RequestError naming the prompt that cannot be served and the remedy.
    """
    items = as_list(prompts)
    params = one_for_each(
        "sampling_params", sampling_params, SamplingParams, len(items), default_params or SamplingParams()
    )
    chosen = one_for_each("adapter", adapter, str, len(items), None)
    priorities = one_for_each("priority", priority, int, len(items), 0)
    requests = []
    for index, item in enumerate(items):
        where = f"prompt {index}: " if len(items) > 1 else ""
        text, ids = text_or_ids(item, where)
        if text is not None:
            ids = _encode(text, tokenizer, adds_special_tokens(item), where)
        check_request(ids or [], params[index], tokenizer, vocabulary, max_model_len, where)
        if chosen[index] is not None and chosen[index] not in adapters:
            known = ", ".join(sorted(adapters)) or "none"
            raise RequestError(
                f"{where}adapter {chosen[index]!r} is not known (known: {known}); give it to LLM(adapters=...) or "
                "call add_adapter first"
            )
        banned = bad_word_ids(params[index].banned_words, tokenizer, vocabulary, where)
        constraint = params[index].constraint
        requests.append(
            Request(
                str(first + index),
                text,
                ids or [],
                params[index],
                chosen[index],
                priorities[index],
                bad_words=banned,
                grammar=None if constraint is None else compile_grammar(constraint),
            )
        )
    return requests


def _encode(text: str, tokenizer: Tokenizer | None, add_special_tokens: bool, where: str) -> list[int]:
    if tokenizer is None:
        raise RequestError(
            f"{where}text needs a tokenizer, and the model's directory has neither tokenizer.json nor "
            "tokenizer.model; copy one there, or pass token ids instead"
        )
    return tokenizer.encode(text, add_special_tokens)
