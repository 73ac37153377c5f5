"""Simulated time, threads, network, server and cache: the same seed gives the same run. `oracle` is
the model whose KV bytes are known."""
