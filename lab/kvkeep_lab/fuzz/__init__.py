"""Fuzzers: for each part that reads input, a target that turns bytes into a test of it."""
