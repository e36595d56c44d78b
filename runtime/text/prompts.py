"""What callers may pass as prompts, sampling parameters and adapters, turned into requests; every fault is found
before any work starts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.engine import Request
from ..requests.errors import RequestError
from ..requests.sampling_params import SamplingParams
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
_KEYS = ("prompt", "prompt_token_ids")


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list: text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "tolist"):
        raise RequestError(f"prompts must be text, token ids or a list of these, not {type(prompts).__name__}")
    values = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return [values] if values and all(_is_id(value) for value in values) else values


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
) -> list[Request]:
    """One request a prompt, numbered from `first`.

    Raises RequestError naming the prompt that cannot be served and the remedy.
    """
    items = as_list(prompts)
    params = _each("sampling_params", sampling_params, SamplingParams, len(items), SamplingParams())
    chosen = _each("adapter", adapter, str, len(items), None)
    requests = []
    for index, item in enumerate(items):
        where = f"prompt {index}: " if len(items) > 1 else ""
        text, ids = _encode(item, tokenizer, where)
        _check_ids(ids, vocabulary, max_model_len, where)
        _check_params(params[index], tokenizer, vocabulary, where)
        if chosen[index] is not None and chosen[index] not in adapters:
            known = ", ".join(sorted(adapters)) or "none"
            raise RequestError(
                f"{where}adapter {chosen[index]!r} is not known (known: {known}); give it to LLM(adapters=...) or "
                "call add_adapter first"
            )
        requests.append(Request(str(first + index), text, ids, params[index], chosen[index]))
    return requests


def check_request(
    ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None, vocabulary: int, max_model_len: int
) -> None:
    """Raises RequestError for a tokenized prompt that cannot be served with these parameters."""
    _check_ids(ids, vocabulary, max_model_len, "")
    _check_params(params, tokenizer, vocabulary, "")


def _each(name: str, value: Any, kind: type, count: int, default: Any) -> list[Any]:
    """One value for each prompt, from one for all or a list."""
    if value is None or isinstance(value, kind):
        return [default if value is None else value] * count
    if not isinstance(value, Sequence):
        raise RequestError(
            f"{name} must be a {kind.__name__}, a list of them (one a prompt) or None, not {type(value).__name__}"
        )
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts; give one for each, or a single one for all"
        )
    for index, entry in enumerate(value):
        if entry is not None and not isinstance(entry, kind):
            raise RequestError(f"{name}[{index}] must be a {kind.__name__} or None, not {type(entry).__name__}")
    return [default if entry is None else entry for entry in value]


def _encode(item: Any, tokenizer: Tokenizer | None, where: str) -> tuple[str | None, list[int]]:
    if isinstance(item, Mapping):
        given = [key for key in _KEYS if item.get(key) is not None]
        unknown = sorted(set(item) - set(_KEYS))
        if unknown or len(given) != 1:
            raise RequestError(
                f"{where}a prompt given as a dict has exactly one of the keys {' and '.join(_KEYS)}; this one has "
                f"{sorted(map(str, item))}"
            )
        item = item[given[0]]
        if given[0] == "prompt" and not isinstance(item, str):
            raise RequestError(f"{where}the value of 'prompt' must be text; use 'prompt_token_ids' for token ids")
    if isinstance(item, str):
        if tokenizer is None:
            raise RequestError(
                f"{where}text needs a tokenizer, and the model's directory has neither tokenizer.json nor "
                "tokenizer.model; pass token ids instead"
            )
        return item, tokenizer.encode(item)
    values = item.tolist() if hasattr(item, "tolist") else item
    if not isinstance(values, Sequence) or not all(_is_id(value) for value in values):
        raise RequestError(f"{where}a prompt is text or a list of token ids, not {type(item).__name__}")
    return None, [int(value) for value in values]


def _check_ids(ids: list[int], vocabulary: int, max_model_len: int, where: str) -> None:
    if not ids:
        raise RequestError(f"{where}the prompt is empty; give at least one token")
    if len(ids) >= max_model_len:
        raise RequestError(
            f"{where}the prompt has {len(ids)} tokens, which leaves no room for output within "
            f"max_model_len={max_model_len}; shorten it or raise max_model_len"
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary:
        raise RequestError(
            f"{where}token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary}; is this "
            "another model's tokenizer?"
        )


def _check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocabulary: int, where: str) -> None:
    if params.stop_strings and tokenizer is None:
        raise RequestError(f"{where}stop strings need a tokenizer, and this model has none; use stop_token_ids")
    for name, ids in (("stop_token_ids", params.stop_ids), ("logit_bias", params.biases)):
        outside = [token for token in ids if token >= vocabulary]
        if outside:
            raise RequestError(
                f"{where}{name} names token {outside[0]}, which is outside the model's vocabulary of {vocabulary}"
            )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
