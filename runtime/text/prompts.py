"""Checks of prompts and bad_words, and requests made from them.

`LLM` and the client use it, so it imports neither the engine nor torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..api.adapter_sum import sum_parts
from ..api.checks import check_text, plain
from ..api.errors import RequestError
from ..api.request import Constraint, Continuation, Request
from ..api.sampling_params import DEFAULT_MAX_LOGPROBS, SamplingParams
from ..api.structured_outputs import StructuredOutputsParams
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_CONTINUED_TOKENS = 1 << 18  # of all completions of a request
_KEYS = ("prompt", "prompt_token_ids")
_SPECIAL = "add_special_tokens"


def as_list(prompts: Any, name: str = "prompts") -> list[Prompt]:
    """Return one or several prompts as a list: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.

    "add_special_tokens": False omits BOS from a text, for example from a rendered chat. Raises RequestError otherwise,
    which calls them `name`.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    values = prompts.tolist() if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview) else prompts
    if not isinstance(values, Sequence) or isinstance(values, (bytes, bytearray, memoryview)):
        raise RequestError(f"{name} must be text, token ids or a list of these, not {type(prompts).__name__}")
    ids = [plain(value) for value in values] if values and not isinstance(values[0], (str, list)) else []
    return [ids] if ids and all(map(_is_id, ids)) else list(values)


def one_for_each(name: str, value: Any, kind: type, count: int, default: Any) -> list[Any]:
    """Return one value for each of `count` prompts, from one for all, a list, or None.

    Raises RequestError, which names `name`, for a value that is not a `kind` and for a list of another length.
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
            f"{name} has {len(value)} entries for {count} prompts; give one per prompt, or a single one for all"
        )
    for index, entry in enumerate(value):
        if entry is not None and not isinstance(entry, kind):
            raise RequestError(f"{name}[{index}] must be a {kind.__name__} or None, not {type(entry).__name__}")
    return [default if entry is None else entry for entry in value]


def text_or_ids(prompt: Any, where: str = "", noun: str = "prompt") -> tuple[str | None, list[int] | None]:
    """Return one prompt as (text, None) or (None, token ids). `where`: prefix of errors, which call it `noun`.

    Raises RequestError for other prompts.
    """
    if isinstance(prompt, Mapping):
        given = [key for key in _KEYS if prompt.get(key) is not None]
        unknown = set(prompt) - {*_KEYS, _SPECIAL}
        if unknown or len(given) != 1:
            raise RequestError(
                f"{where}a {noun} as a dict must have exactly one of the keys {' and '.join(_KEYS)}; this one has "
                f"{sorted(map(str, prompt))}"
            )
        if not isinstance(prompt.get(_SPECIAL, True), bool):
            raise RequestError(f"{where}the value of '{_SPECIAL}' must be True or False")
        prompt = prompt[given[0]]
        if given[0] == "prompt" and not isinstance(prompt, str):
            raise RequestError(f"{where}the value of 'prompt' must be text; use 'prompt_token_ids' for token ids")
    if isinstance(prompt, str):
        check_text(f"{where}the {noun}", prompt)
        return prompt, None
    values = prompt.tolist() if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview) else prompt
    if not isinstance(values, Sequence) or isinstance(values, (bytes, bytearray, memoryview)):
        raise RequestError(f"{where}a {noun} is text or a list of token ids, not {type(prompt).__name__}")
    if type(values) is list and set(map(type, values)) == {int}:  # the usual case, checked fast
        return None, values.copy()
    values = [plain(value) for value in values]
    wrong = next((value for value in values if not _is_id(value)), None)
    if wrong is not None:
        raise RequestError(f"{where}a {noun} is text or a list of token ids; this list holds a {type(wrong).__name__}")
    if not values:
        raise RequestError(f"{where}the {noun} is empty; give at least one token")
    return None, [int(value) for value in values]


def adds_special_tokens(prompt: Any) -> bool:
    """Return whether a checked text prompt gets the special tokens that the model expects at the start."""
    return not isinstance(prompt, Mapping) or bool(prompt.get(_SPECIAL, True))


def without_special_tokens(text: str) -> Prompt:
    """Return a rendered chat as a prompt: its text already has the special tokens."""
    return {"prompt": text, _SPECIAL: False}


def most_logprobs(max_logprobs: int, vocabulary: int) -> int:
    """Return the number of tokens that `logprobs` may ask for at each position under an engine's `max_logprobs`."""
    return vocabulary if max_logprobs == -1 else max_logprobs


def with_logprob_counts(params: SamplingParams, most: int, vocabulary: int, where: str = "") -> SamplingParams:
    """Return parameters with numbers in place of -1, the whole vocabulary. Raises RequestError above `most`."""
    if params.logprobs is None and params.prompt_logprobs is None:
        return params
    counts: list[int | None] = []
    for name in ("logprobs", "prompt_logprobs"):
        given: int | None = getattr(params, name)
        count = vocabulary if given == -1 else given
        if count is not None and count > most:
            whole = f", the vocabulary of {vocabulary} tokens," if given == -1 else ""
            raise RequestError(
                f"{where}{name}={given}{whole} is more than max_logprobs={most}; ask for fewer, or raise max_logprobs"
            )
        counts.append(count)
    return replace(params, logprobs=counts[0], prompt_logprobs=counts[1])


def check_request(
    ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    max_model_len: int,
    where: str = "",
) -> None:
    """Raise RequestError for a tokenized prompt that cannot be served with these parameters."""
    _check_ids(ids, vocabulary, max_model_len, where)
    if params.stop_strings and tokenizer is None:
        raise RequestError(f"{where}stop strings need a tokenizer, and this model has none; use stop_token_ids")
    named = {
        "stop_token_ids": params.stop_ids,
        "logit_bias": params.biases,
        "allowed_token_ids": params.allowed_ids or (),
        "logprob_token_ids": params.reported_ids,
    }
    for name, tokens in named.items():
        outside = [token for token in tokens if token >= vocabulary]
        if outside:
            raise RequestError(
                f"{where}{name} names token {outside[0]}, which is outside the model's vocabulary of {vocabulary}"
            )


def check_scored(scored: Sequence[tuple[int, int]], prompt_length: int, params: SamplingParams) -> None:
    """Raise RequestError for `scored` ranges that are not ascending ranges of the prompt's tokens after the first."""
    if params.prompt_logprobs is None:
        raise RequestError("scored needs prompt_logprobs, the number of likeliest tokens to report; give 0 for none")
    last = 1
    for index, (begin, end) in enumerate(scored):
        if not last <= begin < end <= prompt_length:
            raise RequestError(
                f"scored[{index}]={[begin, end]} must be a range [begin, end) of prompt tokens from {last} to "
                f"{prompt_length}, after the ranges before it"
            )
        last = end


def check_continues(
    continues: Sequence[Continuation], prompt_length: int, params: SamplingParams, vocabulary: int, max_model_len: int
) -> None:
    """Raise RequestError for completions that cannot continue from their tokens."""
    if len(continues) != params.n:
        raise RequestError(f"continues has {len(continues)} entries for n={params.n} completions; give one each")
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
    """Return the error for a prompt that is too long."""
    return RequestError(
        f"{where}the prompt has {tokens} tokens, which leaves no room for output within "
        f"max_model_len={max_model_len}; shorten it or raise max_model_len"
    )


def _check_ids(ids: list[int], vocabulary: int, max_model_len: int, where: str) -> None:
    if not ids:
        raise RequestError(f"{where}the prompt is empty; give at least one token")
    if len(ids) >= max_model_len:
        raise too_long(len(ids), max_model_len, where)
    check_vocabulary(ids, vocabulary, where)


def check_vocabulary(ids: list[int], vocabulary: int, where: str = "") -> None:
    """Raise RequestError for token ids outside the vocabulary."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocabulary:
        raise RequestError(
            f"{where}token id {low if low < 0 else high} is out of vocabulary: the model has {vocabulary} tokens; is "
            "this another model's tokenizer?"
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def bad_word_ids(
    words: Sequence[str], tokenizer: Tokenizer | None, vocabulary: int, where: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of the words, as in vLLM. `where`: prefix of errors.

    A word is encoded without a leading space, and with one if that has another first token and as many tokens. Raises
    RequestError for words that cannot be banned.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError(f"{where}bad_words need a tokenizer, and this model has none; use logit_bias")
    sequences: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise RequestError(f"{where}bad_words: the tokenizer has no tokens for {word!r}; leave it out")
        sequences.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
        if max(map(max, sequences[-2:])) >= vocabulary:
            raise RequestError(
                f"{where}bad_words: {word!r} has a token outside the model's vocabulary of {vocabulary}; is this "
                "another model's tokenizer?"
            )
    if len({ids[0] for ids in sequences if len(ids) == 1}) >= vocabulary:
        raise RequestError(f"{where}bad_words bans every token of the vocabulary; leave some out")
    return tuple(map(tuple, sequences))


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
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    default_params: SamplingParams | None = None,
    priority: Any = None,
    compile_grammar: Callable[[StructuredOutputsParams], Constraint],
) -> list[Request]:
    """Return one request per prompt, numbered from `first`; `default_params`: for prompts without sampling_params.

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
            ids = encode(text, tokenizer, adds_special_tokens(item), where)
        check_request(ids or [], params[index], tokenizer, vocabulary, max_model_len, where)
        own = with_logprob_counts(params[index], max_logprobs, vocabulary, where)
        missing = next((part for part, _ in sum_parts(chosen[index] or "") if part and part not in adapters), None)
        if missing is not None:
            known = ", ".join(sorted(adapters)) or "none"
            raise RequestError(
                f"{where}adapter {missing!r} is not known (known: {known}); pass it to LLM(adapters=...) or "
                "call add_adapter first"
            )
        banned = bad_word_ids(params[index].banned_words, tokenizer, vocabulary, where)
        constraint = params[index].constraint
        requests.append(
            Request(
                str(first + index),
                text,
                ids or [],
                own,
                chosen[index],
                priorities[index],
                bad_words=banned,
                grammar=None if constraint is None else compile_grammar(constraint),
            )
        )
    return requests


def encode(text: str, tokenizer: Tokenizer | None, add_special_tokens: bool, where: str = "") -> list[int]:
    """Return a text's token ids. Raises RequestError without a tokenizer. `where`: prefix of errors."""
    if tokenizer is None:
        raise RequestError(
            f"{where}text needs a tokenizer, and the model's directory has neither tokenizer.json nor "
            "tokenizer.model; copy one there, or pass token ids instead"
        )
    return tokenizer.encode(text, add_special_tokens)
