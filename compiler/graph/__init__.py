"""FX graphs: how they are made, read and changed.

capture          a module becomes one graph in ATen's vocabulary
nodes            small facts and moves about nodes
branches         a linear with its bias and its LoRA branch
channels         which weights make a value's channels, and which read them
matcher          patterns that read like the maths; a near-miss says what differed
recipe           how a program's weights come from a checkpoint's tensors
slices           one rank's part of a recipe
"""
