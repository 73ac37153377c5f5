"""The reference engine: serving with an external KV cache, small enough to be read in an evening.

llm.py         the public interface: a model, prompts, answers
engine.py      requests in, steps, answers out
scheduler.py   which tokens of which requests a step computes
request.py     one request
blocks.py      the engine's KV blocks and its prefix cache
recovery.py    what happens after a failed load
step.py        what goes to the workers and comes back
workers.py     ranks with their shards of the KV
config.py      the engine's options
offloading.py  the user's options for offloading
backends.py    the external cache that follows from them
demo_model.py  the model of `kvkeep demo` and of the engine benchmark
"""
