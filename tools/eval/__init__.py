"""`sidestream eval`: compare quantized serving with bf16 on your prompts, or with transformers on a real model.

arms            named sets of engine options to compare
suite           prompts and documents: your file, the demo model's facts, or the standard library's sources
corpus          the standard library's sources as documents, split in training and held-out
demo_facts      the facts of the demo model, in its five styles
evaluate        run every arm next to a bf16 engine
processes       run arms one by one, or several at once in processes of their own
answers         accuracy of greedy answers, and how many differ from bf16's
teacher_forced  KL divergence, top-1 agreement and log-likelihood of every token of a document
divergence      means of these with bootstrap intervals
statistics      bootstrap by document, McNemar's exact test, bounds of a loss
report          tables for the terminal
real            `sidestream eval --real`: SmolLM2-135M-Instruct next to transformers in fp32
"""
