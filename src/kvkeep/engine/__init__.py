"""The reference engine: serving with an external KV cache, small enough to be read in an
evening."""
