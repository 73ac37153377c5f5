"""What an engine tells its external cache, and when: written once, for the reference engine and for
vLLM.

planner.py        decides about lookups, loads and stores
request_state.py  what is known of one request
request_trace.py  its spans, if it is traced
step.py           jobs that go to the workers with a step, and their results
group_layout.py   what a hit needs of each kind of layer
reports.py        what a request was served from, as the server is told
cost_model.py     whether to load or to compute
recoveries.py     the log of failed loads
options.py        the options of a connector
checkpoint.py     the digest of a checkpoint
file_hashes.py    hashes of whole files, kept for each user
hub_cache.py      the cache directory of Hugging Face's hub
"""
