"""Floor 3: runs programs for requests. An arrow of imports goes from a lower line of this map to an upper one.

child_process  a child that answers one line with one line
requests      what is asked and answered: sampling parameters, outputs, errors
steps         what crosses between scheduler and device: plans and results
text          text to tokens and back: prompts, tokenizers, chat templates
scheduling    which tokens of which sequences the next step computes; pure bookkeeping
engine        the loop scheduler -> runner -> text, and its options
adapters      adapters from disk to host memory to a slot on the device
device        tensors, CUDA graphs, sampling: executes plans
demo_model    where the model is that comes with the package
llm           `LLM`: all of these in the caller's process
wire          the protocol between a server and its clients
server        supervisor, batcher process, GPU process
client        `Client` and `AsyncClient`
gateway       an HTTP front as OpenAI spells it, for one or several servers
"""
