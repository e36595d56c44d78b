"""What is asked and answered; imports nothing of runtime.

sampling_params     how one request samples
sampling_defaults   what a model's authors want it sampled with
checks              of its fields, one by one
beam_search         the same for `LLM.beam_search`
structured_outputs  what an answer must look like
request             what is asked of the engine, and what a step adds to an answer
lora_request        an adapter as vLLM's users name it
outputs             what a caller gets back
errors              what goes wrong through a caller's doing
"""
