"""/tokenize and /detokenize, as vLLM spells them."""

from typing import Annotated, Any

from msgspec import Meta

from ..contracts import GatewayError
from .chat import MAX_MESSAGES, ChatMessage, plain_message
from .common import Answer, Body, ModelName, Text, TokenIds


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """A text, or a conversation, which the model's chat template makes a text of."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None

    def conversation(self) -> list[dict[str, Any]] | None:
        """The messages, None for a text. Raises GatewayError 400 unless there is exactly one of both."""
        if (self.prompt is None) == (self.messages is None):
            raise GatewayError(400, "give exactly one of prompt and messages", param="prompt")
        if self.messages is None:
            return None
        return [plain_message(message, f"messages[{place}]") for place, message in enumerate(self.messages)]


class Tokenized(Answer, frozen=True, kw_only=True):
    """The ids, as an engine makes them of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """Token ids."""

    tokens: TokenIds
    model: ModelName | None = None


class Detokenized(Answer, frozen=True, kw_only=True):
    """Their text, special tokens included."""

    prompt: str
