"""Chat templates on the wire: what fits into a message, and back."""

from ..text.chat_files import DEFAULT, ChatTemplates, SingleChatTemplate
from .messages import MAX_SHORT, MAX_SPECIAL_TOKENS, MAX_TEMPLATE_CHARACTERS, MAX_TEMPLATES, ChatTemplatesFound, Welcome

MAX_BYTES = 1 << 20
"""Of all templates of a message together."""


def fitting(templates: ChatTemplates) -> ChatTemplates:
    """Return the templates and tokens without what is too long for a message; "default" is kept first."""
    kept: dict[str, str] = {}
    left = MAX_BYTES
    for name in sorted(templates.templates, key=lambda name: (name != DEFAULT, name)):
        source = templates.templates[name]
        size = len(source.encode("utf-8", "replace"))
        if size <= left and len(source) <= MAX_TEMPLATE_CHARACTERS and _is_short(name) and len(kept) < MAX_TEMPLATES:
            kept[name] = source
            left -= size
    tokens = {name: text for name, text in templates.tokens.items() if _is_short(name) and _is_short(text)}
    return ChatTemplates(kept, dict(list(tokens.items())[:MAX_SPECIAL_TOKENS]))


def welcome_templates(welcome: Welcome) -> ChatTemplates:
    """Return the templates of the model that a server serves."""
    single = SingleChatTemplate(welcome.chat_template, welcome.bos_token, welcome.eos_token)
    return ChatTemplates(welcome.chat_templates or single.templates, welcome.special_tokens or single.tokens)


def adapter_templates(found: ChatTemplatesFound) -> ChatTemplates:
    """Return the templates of an adapter."""
    return ChatTemplates(found.chat_templates, found.special_tokens)


def _is_short(text: str) -> bool:
    return len(text) <= MAX_SHORT
