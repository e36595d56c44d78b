"""Text to tokens and back.

tokenizer        text to ids and back, or nothing but ids
tokenizer_files  a directory's tokenizer.json or tokenizer.model, with the added tokens that its other files name
sentencepiece_model  tokenizer.model, as a tokenizer of the tokenizers library
special_tokens   the special and added tokens that a directory's files name
token_bytes      the bytes of every token of a vocabulary
generation_config  the tokens that end a text, and a model's own sampling defaults
detokenizer      text that grows token by token, never half a character
prompts          what callers may pass as prompts
bad_words        words that must not be generated, as tokens
requests         prompts as the engine's requests
encoder          text to ids on a thread of its own
chat             what callers may pass as conversations, as prompts
chat_messages    messages in one form, whoever wrote them
chat_files       the chat templates in a model's directory
adapter_chat     the same of an adapter's directory, which somebody else wrote
chat_template    messages to text; chat_worker is the child process that renders them
"""
