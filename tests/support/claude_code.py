"""The body and the headers of a request as Claude Code 2.1 sends them, with shorter texts."""

from typing import Any

HEADERS = {
    "authorization": "Bearer key",
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
BASH: dict[str, Any] = {
    "name": "Bash",
    "description": "Executes a command and returns its output.",
    "input_schema": {
        "$schema": SCHEMA,
        "type": "object",
        "properties": {
            "command": {"description": "The command to execute", "type": "string"},
            "timeout": {"description": "Milliseconds", "type": "number"},
            "run_in_background": {"type": "boolean"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
SEND_MESSAGE: dict[str, Any] = {
    "name": "SendMessage",
    "description": "Sends a message to another agent.",
    "input_schema": {
        "$schema": SCHEMA,
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "answers": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "string"},
            },
        },
        "required": ["to"],
        "additionalProperties": False,
    },
}
TURN: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-27.\n</system-reminder>\n\n"},
            {"type": "text", "text": "What is 6*7?", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"role": "system", "content": "Available agent types for the Agent tool: none."},
]


def body(model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of a request in a conversation."""
    return {
        "model": model,
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\n# Harness\nUse tools.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [BASH, SEND_MESSAGE],
        "metadata": {"user_id": '{"device_id":"00","account_uuid":"","session_id":"00"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def next_turn(answer: list[dict[str, Any]], result: str) -> list[dict[str, Any]]:
    """The conversation after an answer whose last block calls a tool."""
    block = {"type": "tool_result", "tool_use_id": answer[-1]["id"], "content": result, "is_error": False}
    return [
        *TURN,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{**block, "cache_control": {"type": "ephemeral"}}]},
    ]
