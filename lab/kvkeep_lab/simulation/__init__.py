"""Simulated time, threads, network, server and cache: the same seed gives the same run.

simulation.py       time and processes; a seed decides which thread runs
threads.py          `threading` in simulated time
wire.py             a network in memory with faults
server.py           a server without sockets and threads
tiers.py            a tier below that server
disk.py             files that lose what was not synced in a power cut
cache.py            an external cache for the reference engine
oracle.py           the model whose KV bytes are known
given.py            how many tokens the cache gave each request
store_integrity.py  what must hold between two operations of the store
store_model.py      the naive model of the store
peer.py             a client that sends what it is told
relay.py            a wire that tests read or slow down
strange.py          servers with faults
collector.py        a collector of spans, with faults
"""
