"""Parameters, requests, outputs and errors of callers. Imports no other folder of runtime.

sampling_params     sampling of one request
sampling_defaults   sampling defaults of a model's generation_config.json
checks              checks of single fields
adapter_sum         names and content hashes of weighted sums of adapters
adapter_versions    names of the versions of adapters that are updated from memory
adapter_update      an update as a file, which clients and `LLM` write
beam_search         parameters and outputs of `LLM.beam_search`
structured_outputs  constraints on an answer
request             a request to the engine, and the output of one step for it
lora_request        vLLM's LoRARequest
outputs             outputs and log-probabilities
unsupported         options of other servers: accepted values and remedies
errors              errors that a caller can cause or must handle
"""
