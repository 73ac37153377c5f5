"""Moves blocks of engines whose KV is on a GPU. Needs torch and triton, which such engines have.

kernels.py    gather and scatter, checksums included
device.py     streams, events, copies and registered host memory, as the driver has them
pinned.py     which host memory is registered
staging.py    GPU memory that blocks pass through
copier.py     all of it together: stores and loads
"""
