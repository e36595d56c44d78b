"""Chat templates in messages: drop templates that exceed the limits, and decode received ones."""

from ..text.chat_files import DEFAULT, ChatTemplates, SingleChatTemplate
from .messages import MAX_SHORT, MAX_SPECIAL_TOKENS, MAX_TEMPLATE_CHARACTERS, MAX_TEMPLATES, ChatTemplatesFound, Welcome

MAX_BYTES = 1 << 20
"""Limit on all templates of a message together."""


def within_limits(templates: ChatTemplates) -> ChatTemplates:
    """Return the templates and tokens that fit into a message; "default" has priority."""
    fitting: dict[str, str] = {}
    free = MAX_BYTES
    for name in sorted(templates.templates, key=lambda name: (name != DEFAULT, name)):
        source = templates.templates[name]
        size = len(source.encode("utf-8", "replace"))
        fits = size <= free and len(source) <= MAX_TEMPLATE_CHARACTERS and _is_short(name)
        if fits and len(fitting) < MAX_TEMPLATES:
            fitting[name] = source
            free -= size

    tokens = {name: text for name, text in templates.tokens.items() if _is_short(name) and _is_short(text)}
    return ChatTemplates(fitting, dict(list(tokens.items())[:MAX_SPECIAL_TOKENS]))


def welcome_templates(welcome: Welcome) -> ChatTemplates:
    single = SingleChatTemplate(welcome.chat_template, welcome.bos_token, welcome.eos_token)
    return ChatTemplates(welcome.chat_templates or single.templates, welcome.special_tokens or single.tokens)


def adapter_templates(found: ChatTemplatesFound) -> ChatTemplates:
    return ChatTemplates(found.chat_templates, found.special_tokens)


def _is_short(text: str) -> bool:
    return len(text) <= MAX_SHORT
