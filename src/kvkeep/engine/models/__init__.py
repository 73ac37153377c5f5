"""What computes: transformers in plain torch over KV that lies in blocks."""
