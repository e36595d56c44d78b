"""Floor 3: runs programs for requests. An arrow of imports goes from a lower line of this map to an upper one.

child_process  a child that answers one line with one line
threads        threads that are stopped and joined when the interpreter exits
requests       what is asked and answered: sampling parameters, outputs, errors
steps          what crosses between scheduler and device: plans and results
text           text to tokens and back: prompts, tokenizers, chat templates
structured     answers that fit a schema or a grammar
scheduling     which tokens of which sequences the next step computes; pure bookkeeping
engine         the loop scheduler -> runner -> text, and its options
adapters       adapters from disk to host memory to a slot on the device
device         tensors, CUDA graphs, sampling: executes plans
calibrate      a model read and measured, for a command or at a first start
demo_model     where the model is that comes with the package
wire           the protocol between a server and its clients
processes      processes that are started, and watched while they run
ranks          one model over several processes, one a rank
llm            `LLM`: all of these in the caller's process
server         supervisor, batcher process, GPU process
client         `Client` and `AsyncClient`
gateway        an HTTP front as OpenAI spells it, for one or several servers
fleet          many engines on Ray Serve
"""
