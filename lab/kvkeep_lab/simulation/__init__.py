"""Simulated time, threads, network, server and cache: the same seed gives the same run."""
