"""Transformers in plain torch over KV that lies in blocks.

model.py      what the engine asks of a model
settings.py   the sizes of a model
weights.py    weights, drawn from a seed or read from a checkpoint
decoder.py    what all models share
gqa.py        grouped-query attention
mla.py        multi-head latent attention
attention.py  attention over blocks
sampling.py   from logits to the next token
"""
