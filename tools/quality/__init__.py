"""Quality: do eight bits with adapters answer as bf16 does? The models, tasks and texts that are asked, and what
compares the answers.

tasks           `TASKS`: questions with exact answers, one adapter each; seeded, train and test never meet
task_numbers    how arithmetic, sorting and program questions are made
task_text       how string and extraction questions are made
needle          codes hidden in long texts: the retrieval task and `needle_items` (any length, any depths, one text)
corpus          `documents`: the standard library's own sources as texts, split in train and held-out
models          shape of the evaluation model and of its adapters (`tools/quality/adapter_training.py` writes them)
train_data      token ids for training, made by all cores
examine         accuracy in bfloat16 by transformers: the last part of the training
summary, page   docs/quality.md: its top, and the whole
train           `python -m sidestream.tools.quality.train -o DIR`: trains tokenizer, base and adapters, and measures
                their accuracy

arms            what is compared: named sets of engine options
suite           what they are asked; exact (questions), teacher_forced (documents) ask it
evaluate        runs the arms; divergence and statistics make figures, verdict says what they allow
report, plot, page   the figures as tables, as a picture, as docs/quality.md
real/                a real model next to transformers: `sidestream eval --real`
emulation, outliers  what is measured for comparison: other ways to quantize, planted faults, a checkpoint with outliers
"""
