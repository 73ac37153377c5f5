"""Moves blocks of engines whose KV is on a GPU. Needs torch and triton, which such engines have.

kernels.py       gather and scatter, checksums included
driver.py        the CUDA driver: streams, events, host memory, batches of work
registration.py  host memory that the bus reaches directly, and the server's pool in it
streams.py       copies over the bus in slices, so that an engine's own copies interleave
staging.py       staging buffers of the two lanes, and a place for evacuated blocks
loads.py         loads
copier.py        all of it together, and stores
"""
