"""Benchmarks: each module measures one thing and returns its figures; the command line prints them.

lookup.py           lookups against a ping
transfer.py         stores and loads against a plain copy
transfer_cuda.py    the same on a GPU
transfer_floor.py   plain copies on a GPU
transfer_worker.py  the scheduler and worker that transfers use
restart.py          restarts of a killed server
tier.py             reads and writes of a disk tier against fio
shared_tier.py      reads and writes of a shared tier against its client library
shared_floor.py     the client library alone
replay.py           hit rates and disk writes on a trace of requests
plan.py             what memory and disk a trace is worth
plan_chart.py       that as a picture
traces.py           traces, and the bounds of any cache on them
recordings.py       what a recording of requests says, and its replay
tier_floor.py       reads and writes of fio
tier_lookup.py      lookups while a disk tier moves blocks
tier_hits.py        hits of blocks that only a disk tier has
vllm.py             time to the first token of real vLLM
vllm_setup.py       a model, arguments and a connector for it
vllm_run.py         one vLLM engine in a process
vllm_session.py     several engines in turns
progress.py         how far a benchmark has come, on stderr
figures.py          figures with their units
"""
