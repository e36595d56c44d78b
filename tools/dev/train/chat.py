"""The demo model's chat template, and its tokenizer_config.json."""

import json
from pathlib import Path

TEMPLATE = """\
{#- The model was trained on questions that stand alone: the prompt is the last one, and what there is of its answer. It
    knows no tools either; where a request has tools, its calls are spelled as Hermes' are, with <tool_call>. #}
{%- set said = namespace(question=none, answer='') -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {%- if message.content -%}{%- set said.answer = ' ' ~ message.content | trim -%}{%- endif -%}
  {%- elif message.role not in ('system', 'tool') -%}
    {%- set said.question = message.content | trim -%}
    {%- set said.answer = '' -%}
  {%- endif -%}
{%- endfor -%}
{%- if said.question is none -%}
  {{- raise_exception('the model answers a user message, and there is none') -}}
{%- endif -%}
{{- bos_token ~ said.question ~ said.answer -}}
"""
TOKENIZER = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}


def save_chat(directory: Path) -> None:
    """Write both next to a model."""
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=2, sort_keys=True) + "\n")
