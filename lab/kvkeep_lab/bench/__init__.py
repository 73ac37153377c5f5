"""Research benchmarks: each module measures one thing and returns its figures."""
