"""Text to tokens and back.

tokenizer        tokenizer.json, tokenizer.model, or nothing but ids
detokenizer, byte_pieces  text that grows token by token, never half a character
prompts          what callers may pass, turned into requests
encoder          text to ids on threads of its own
chat_template    messages to text; chat_worker is the child process that renders them
"""
