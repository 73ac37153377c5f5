"""Research benchmarks: each module measures one thing and returns its figures.

engine.py              the reference engine with and without a cache
index.py               memory and speed of the index
turns.py               the longest turns of the server's loop
turns_tiers.py         those of work for tiers, and of many tenants on them
turns_world.py         a store that is filled for them
observe.py             the cost of attribution, metrics, reports and events
security.py            the cost of TLS, and timing between tenants
vllm_load.py           real vLLM under load
vllm_stations.py       its scenarios and engines
vllm_traffic.py        its requests
vllm_lanes.py          an engine with many requests at a time
vllm_fit.py            how much traffic fits the GPU and the host
vllm_conversations.py  conversations with real vLLM
vllm_paused.py         real vLLM while the server hangs
"""
