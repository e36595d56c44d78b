"""Trains a draft for a model, and its LoRAs for the model's adapters.

train   `python -m sidestream.tools.dev.drafts.train MODEL --adapters DIR -o HEAD`
data    the model's own answers, and what it thinks of each token of them
head    EAGLE-3's layer over whole sequences, its chain unrolled, and how it is written
"""
