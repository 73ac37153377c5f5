"""The seam between an engine and its external cache: written once, for the reference engine and for
vLLM."""
