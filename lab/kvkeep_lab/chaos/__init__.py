"""Clusters under faults: a plan drawn from a seed, a run of it, and the checks that no run may
fail."""
