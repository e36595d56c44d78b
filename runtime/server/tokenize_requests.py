"""Texts that clients have tokenized, and token ids that they have made texts of."""

import itertools
from functools import partial
from typing import Any

from ..protocol.messages import MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS, Detokenize, Error, Text, Tokenize, Tokens
from ..text.encoder_thread import Encoder
from ..text.tokenizer import Tokenizer, TooManyTokens
from .connections import Client, Connections
from .submissions import OVERLOAD_RETRY

CHARACTERS_PER_TOKEN = 8


class TokenDesk:
    """The encoder's thread does the work, in turns with the prompts. Both are None where the model has no tokenizer."""

    def __init__(self, connections: Connections, tokenizer: Tokenizer | None, encoder: Encoder | None) -> None:
        self._connections, self._tokenizer, self._encoder = connections, tokenizer, encoder
        self._calls: dict[str, tuple[Client, int]] = {}
        self._numbers = itertools.count()

    def ask(self, client: Client, message: Tokenize | Detokenize) -> None:
        """Have it done, or answer why not."""
        if self._tokenizer is None or self._encoder is None:
            self._connections.say(client, Error("invalid_request", "this model has no tokenizer", call=message.call))
            return
        if isinstance(message, Tokenize):
            work: partial[Any] = partial(
                self._tokenizer.encode, message.text, message.add_special_tokens, MAX_PROMPT_TOKENS
            )
            size = len(message.text)
        else:
            work = partial(self._tokenizer.decode, message.token_ids, skip_special_tokens=False)
            size = CHARACTERS_PER_TOKEN * len(message.token_ids)
        if not self._encoder.has_room_for(size):
            text = "too much text waits to be tokenized"
            self._connections.say(client, Error("overloaded", text, call=message.call, retry_after=OVERLOAD_RETRY))
            return
        key = f"call {next(self._numbers)}"
        self._calls[key] = client, message.call
        self._encoder.put_work(key, work, size, client.number)

    def answered(self, key: str, outcome: list[int] | str | Exception) -> bool:
        """Tell the client what the encoder found; False if the key is not one of these calls."""
        entry = self._calls.pop(key, None)
        if entry is None:
            return False
        client, call = entry
        too_long = isinstance(outcome, TooManyTokens) or (
            isinstance(outcome, str) and len(outcome) > MAX_PROMPT_CHARACTERS
        )
        if too_long:
            text = f"the answer has more than {MAX_PROMPT_TOKENS} tokens or {MAX_PROMPT_CHARACTERS} characters"
            self._connections.say(client, Error("invalid_request", text, call=call))
        elif isinstance(outcome, Exception):
            self._connections.say(client, Error("request_failed", "this could not be tokenized", call=call))
        else:
            self._connections.say(client, Text(call, outcome) if isinstance(outcome, str) else Tokens(call, outcome))
        return True
