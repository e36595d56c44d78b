"""What a caller passes and gets: parameters, requests, outputs, errors. Imports nothing else of runtime.

sampling_params     sampling of one request
sampling_defaults   sampling defaults of a model's generation_config.json
checks              checks of single fields
beam_search         parameters and outputs of `LLM.beam_search`
structured_outputs  constraints on an answer
request             a request to the engine, and what a step adds to its output
lora_request        vLLM's LoRARequest
outputs             outputs and log-probabilities
errors              errors that a caller can cause or must handle
"""
