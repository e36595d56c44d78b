"""Level 3: runs programs for requests. Each folder imports only folders above it in this list.

processes      child processes, their watchdog, and threads that end with the interpreter
api            public data types: sampling parameters, outputs, errors
text           text to tokens and back: prompts, tokenizers, chat templates, structured outputs
scheduler      batching: chooses the tokens that the next step computes; step plans
quantization   calibration results and rounded weights
engine         the loop scheduler -> worker -> text, and its options
adapters       adapters from disk to host memory to a GPU slot
protocol       messages between a server and its clients
receipts       signed receipts of answers
worker         tensors, CUDA graphs, sampling: executes step plans; tensor parallelism
demo_model     location of the embedded demo model
straight_through  exact values with the gradient of an approximation
llm            `LLM`: an engine in the caller's process
server         supervisor, batcher process, GPU process
client         `Client` and `AsyncClient`
gateway        OpenAI-compatible HTTP front for one or several servers
fleet          many engines on Ray Serve
"""
