"""The evaluation models: a 30M model of our own with six adapters, and questions with exact answers.

train          `python -m sidestream.tools.dev.eval30m.train -o DIR`: train tokenizer, base model and adapters
train_data     rows of token ids for training, made by all cores
__main__       `python -m sidestream.tools.dev.eval30m DIR`: run the arms of `sidestream eval` over all tasks
mixture        `python -m sidestream.tools.dev.eval30m.mixture -o DIR`: int8 on a small mixture of experts
mixture_train  train the mixture and a dense model of its size
suite          documents, questions and needles of an evaluation
verdict        conditions for "identical to bf16"
tasks          `TASKS`: one task for each adapter; seeded, split in training and test
needles        codes hidden in long texts
"""
