"""What is compiled, and what is read from disk for it: Llama and LoRA as plain modules, checkpoints, PEFT adapters.

The model:
llama             Llama (and what differs from it) as readable PyTorch, with the parameter names of its checkpoints
lora              a linear layer with LoRA stacks, and the stacks' shape
head_layout       heads that are narrower than the kernels', filled up with zeros
rotary            rotary position embedding: frequencies and rotation
config            config.json: shapes, constants, and what is refused
families          which architectures are served, and in what each differs from Llama
stored_weights    projections that a checkpoint stores in eight bits already
config_fields     the fields of config.json, checked one by one; the types of RoPE

Files:
checkpoint        a model's weights: one file or shards, validated before they are loaded
model_directory   where a model or an adapter lies that was named: a directory, or a hub id in the local cache
safetensors_file  one .safetensors file through a memory map
regular_file      opening what somebody else put there: regular files, under the directories that are allowed; what an
                  error may say of them

PEFT adapters:
adapter           one adapter, read from its directory and checked against the base
adapter_config    adapter_config.json: what is honoured, harmless, refused
adapter_description  what an adapter's config and header say, checked against the base; needs no torch
tensor_layout     where the tensors lie in its .safetensors file
adapter_file      the adapter's .safetensors file, read once and whole
peft_patterns     how PEFT matches module names, in linear time
stack             an adapter as one slot of the stacks that the graph reads

Drafts:
draft             the wing of trained drafts: EAGLE-3 heads

A module imports those of its own group and of the groups above `adapter` only; none imports `adapter` but `stack`.
"""
