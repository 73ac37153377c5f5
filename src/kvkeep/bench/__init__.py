"""Benchmarks: each module measures one thing and returns its figures; the command line prints them.

lookup.py           lookups against a ping
transfer.py         stores and loads against a plain copy
transfer_cuda.py    the same on a GPU
transfer_floor.py   plain copies on a GPU
transfer_worker.py  the scheduler and worker that transfers use
restart.py          restarts of a killed server
vllm.py             time to the first token of real vLLM
vllm_setup.py       a model, arguments and a connector for it
vllm_run.py         one vLLM engine in a process
vllm_session.py     several engines in turns
figures.py          figures with their units
"""
