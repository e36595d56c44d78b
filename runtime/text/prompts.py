"""What callers may pass as prompts, and as one value for all of them or one for each; every fault is found before any
work starts. `LLM` and the client share it, so it imports neither the engine nor torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..api.checks import check_text, plain
from ..api.errors import RequestError
from ..api.request import Continuation
from ..api.sampling_params import SamplingParams
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_CONTINUED_TOKENS = 1 << 18
"""Of all completions of a request together."""
_KEYS = ("prompt", "prompt_token_ids")
_SPECIAL = "add_special_tokens"


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list: text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}. With
    "add_special_tokens": False a text gets no BOS, as one that a chat template made needs none.

    Raises RequestError for anything else.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    values = prompts.tolist() if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview) else prompts
    if not isinstance(values, Sequence) or isinstance(values, (bytes, bytearray, memoryview)):
        raise RequestError(f"prompts must be text, token ids or a list of these, not {type(prompts).__name__}")
    ids = [plain(value) for value in values] if values and not isinstance(values[0], (str, list)) else []
    return [ids] if ids and all(map(_is_id, ids)) else list(values)


def one_for_each(name: str, value: Any, kind: type, count: int, default: Any) -> list[Any]:
    """One value for each of `count` prompts, from one for all, a list, or None.

    Raises RequestError, which calls it `name`, for a value that is no `kind` and for a list of another length.
    """
    value = plain(value)
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


def text_or_ids(prompt: Any, where: str = "") -> tuple[str | None, list[int] | None]:
    """One prompt as text or as token ids; the other is None. `where` begins the text of an error.

    Raises RequestError for what is neither.
    """
    if isinstance(prompt, Mapping):
        given = [key for key in _KEYS if prompt.get(key) is not None]
        unknown = set(prompt) - {*_KEYS, _SPECIAL}
        if unknown or len(given) != 1:
            raise RequestError(
                f"{where}a prompt given as a dict has exactly one of the keys {' and '.join(_KEYS)}; this one has "
                f"{sorted(map(str, prompt))}"
            )
        if not isinstance(prompt.get(_SPECIAL, True), bool):
            raise RequestError(f"{where}the value of '{_SPECIAL}' must be True or False")
        prompt = prompt[given[0]]
        if given[0] == "prompt" and not isinstance(prompt, str):
            raise RequestError(f"{where}the value of 'prompt' must be text; use 'prompt_token_ids' for token ids")
    if isinstance(prompt, str):
        check_text(f"{where}the prompt", prompt)
        return prompt, None
    values = prompt.tolist() if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview) else prompt
    if not isinstance(values, Sequence) or isinstance(values, (bytes, bytearray, memoryview)):
        raise RequestError(f"{where}a prompt is text or a list of token ids, not {type(prompt).__name__}")
    if type(values) is list and set(map(type, values)) == {int}:  # as nearly all are, however long
        return None, values.copy()
    values = [plain(value) for value in values]
    wrong = next((value for value in values if not _is_id(value)), None)
    if wrong is not None:
        raise RequestError(f"{where}a prompt is text or a list of token ids; this list holds a {type(wrong).__name__}")
    if not values:
        raise RequestError(f"{where}the prompt is empty; give at least one token")
    return None, [int(value) for value in values]


def adds_special_tokens(prompt: Any) -> bool:
    """Whether a checked prompt, if it is text, gets the special tokens that the model expects at the start."""
    return not isinstance(prompt, Mapping) or bool(prompt.get(_SPECIAL, True))


def without_special_tokens(text: str) -> Prompt:
    """What a chat template made, as a prompt: the text holds its special tokens itself."""
    return {"prompt": text, _SPECIAL: False}


def check_request(
    ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    max_model_len: int,
    where: str = "",
) -> None:
    """Raises RequestError for a tokenized prompt that cannot be served with these parameters."""
    _check_ids(ids, vocabulary, max_model_len, where)
    if params.stop_strings and tokenizer is None:
        raise RequestError(f"{where}stop strings need a tokenizer, and this model has none; use stop_token_ids")
    named = {
        "stop_token_ids": params.stop_ids,
        "logit_bias": params.biases,
        "allowed_token_ids": params.allowed_ids or (),
    }
    for name, tokens in named.items():
        outside = [token for token in tokens if token >= vocabulary]
        if outside:
            raise RequestError(
                f"{where}{name} names token {outside[0]}, which is outside the model's vocabulary of {vocabulary}"
            )


def check_continues(
    continues: Sequence[Continuation], prompt_length: int, params: SamplingParams, vocabulary: int, max_model_len: int
) -> None:
    """Raises RequestError for completions that cannot go on from what there is of them."""
    if len(continues) != params.n:
        raise RequestError(f"continues has {len(continues)} entries for n={params.n} completions; give one for each")
    if all(so_far.finished for so_far in continues):
        raise RequestError("every completion in continues is finished; there is nothing left to do")
    room = max_model_len - prompt_length
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    if sum(len(so_far.token_ids) for so_far in continues) > MAX_CONTINUED_TOKENS:
        raise RequestError(f"continues has more than {MAX_CONTINUED_TOKENS} tokens; send the request without it")
    for index, so_far in enumerate(continues):
        if not so_far.finished and len(so_far.token_ids) >= limit:
            raise RequestError(
                f"continues[{index}] has {len(so_far.token_ids)} tokens, which leaves no room for more within "
                f"max_tokens={params.max_tokens} and max_model_len={max_model_len}"
            )
        if so_far.token_ids and not 0 <= min(so_far.token_ids) <= max(so_far.token_ids) < vocabulary:
            raise RequestError(f"continues[{index}] names a token outside the model's vocabulary of {vocabulary}")


def too_long(tokens: int, max_model_len: int, where: str = "") -> RequestError:
    """The error of a prompt of so many tokens."""
    return RequestError(
        f"{where}the prompt has {tokens} tokens, which leaves no room for output within "
        f"max_model_len={max_model_len}; shorten it or raise max_model_len"
    )


def _check_ids(ids: list[int], vocabulary: int, max_model_len: int, where: str) -> None:
    if not ids:
        raise RequestError(f"{where}the prompt is empty; give at least one token")
    if len(ids) >= max_model_len:
        raise too_long(len(ids), max_model_len, where)
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary:
        raise RequestError(
            f"{where}token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary}; is this "
            "another model's tokenizer?"
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
