"""Tokenizer, prompts, chat templates and detokenizer.

tokenizer              text to token ids and back
tokenizer_files        reads tokenizer.json or tokenizer.model with the added tokens of a directory's other files
sentencepiece_model    reads tokenizer.model as a tokenizer of the tokenizers library
special_tokens         reads the special and added tokens of a directory
token_bytes            the bytes of every token of a vocabulary
generation_config      end-of-text tokens, and a model's sampling defaults
reasoning              splits generated text into reasoning and content
detokenizer            streams tokens as text, without incomplete characters; stop strings
prompts                checks prompts and bad_words, and makes requests of them
scoring                requests for the log-probabilities of known tokens, and their outputs
encoder_thread         tokenizes on a thread of its own
chat_messages          checks and normalizes messages
chat_files             reads chat templates of a model's or an adapter's directory
chat_renderer          asks child processes to render messages with a chat template
chat_template_process  the child process: renders a template with Jinja in a sandbox
structured             structured outputs: token masks from schemas, regular expressions and grammars
"""
