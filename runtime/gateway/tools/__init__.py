"""Tools, as OpenAI's clients know them: how a model spells its calls, what it may say, and what it has said.

formats      the spellings of Llama 3 and of Hermes and Qwen, by chat template
grammar      what an answer with calls may look like
parser       an answer's text, piece by piece -> content and calls
"""
