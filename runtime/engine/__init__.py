"""The loop scheduler -> runner -> text, and the options of `LLM`.

engine            run requests to their end
adapter_switch    running requests -> the new version of their adapter
completion_state  text and stop strings of one completion
logprobs          log-probabilities of outputs and prompts
beam_search       one token at a time for every beam
options           the options of `LLM`, checked before any work
resolve           their values for a given model and device
exact             what an engine with exact=True refuses
llm_keywords      the same options for type checkers
flag_spelling     options in error messages as Python keywords or as flags
vllm_keywords     keywords of vLLM's `LLM` that are translated, refused or have no effect
launcher_flags    the same for flags of the launchers of vLLM, SGLang and LoRAX
"""
