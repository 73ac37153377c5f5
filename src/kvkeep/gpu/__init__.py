"""Kernels for blocks that lie in GPU memory. Needs torch and triton."""
