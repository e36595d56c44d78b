"""FX graphs: how they are made, read and changed.

capture          a module becomes one graph in ATen's vocabulary
nodes            small facts and moves about nodes
matcher          patterns that read like the maths; a near-miss says what differed
recipe           how a program's weights come from a checkpoint's tensors
"""
