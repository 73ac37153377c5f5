"""kvkeep: a KV-cache server for LLM inference."""

__version__ = "0.1.0"
