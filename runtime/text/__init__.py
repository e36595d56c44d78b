"""Text to tokens and back.

tokenizer        tokenizer.json, tokenizer.model, or nothing but ids
token_bytes      the bytes of every token of a vocabulary
generation_config  the tokens that end a text, and a model's own sampling defaults
detokenizer      text that grows token by token, never half a character
prompts          what callers may pass as prompts
bad_words        words that must not be generated, as tokens
requests         prompts as the engine's requests
encoder          text to ids on a thread of its own
chat             what callers may pass as conversations, as prompts
chat_template    messages to text; chat_worker is the child process that renders them
"""
