"""Benchmarks: each module measures one thing and returns its numbers; the command line prints
them."""
