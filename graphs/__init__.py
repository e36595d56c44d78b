"""Models, checkpoints and PEFT adapters.

The model:
llama               Llama and what other families add, as readable PyTorch with the parameter names of its checkpoints
moe/                mixtures of experts: the module, and experts in checkpoints
lora                a linear layer with LoRA stacks, and the stacks' shape
head_layout         smaller heads of a checkpoint, zero-padded to the kernels' head dimension
rotary              rotary position embedding: frequencies and rotation
config              config.json: shapes, constants, refused fields
families            supported architectures and their differences from Llama
quantization_config checkpoints with projections in eight bits
config_fields       checks of single fields of config.json; types of RoPE

Files:
checkpoint          a model's weights: one file or shards, validated before they are loaded
model_directory     directory of a named model or adapter: a path, or a hub id in the local cache
files/              opening and checking files that may be hostile

PEFT adapters:
adapter             one adapter, read from its directory and checked against the base
adapter_names       names of tensors, and settings of mlx_lm, in PEFT's spelling
adapter_config      adapter_config.json: honoured, harmless and refused fields
adapter_description an adapter's config and header, checked against the base; needs no torch
ia3                 vectors of IA3: the outputs that they multiply
adapter_vocabulary  an adapter's whole matrices and trained tokens of the embedding and the output head
peft_patterns       PEFT's matching of module names, in linear time
vocabulary_rows     changed rows of the embedding and the output head as low-rank updates
lora_stacks         an adapter as one slot of the stacks that the graph reads; gains of DoRA and IA3, shifts of biases

draft/              trained drafts: EAGLE-3 heads

A module imports modules of its own group and of the groups above it. Only `lora_stacks` imports `adapter`.
"""
