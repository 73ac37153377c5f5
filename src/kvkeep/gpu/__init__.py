"""Moves blocks of engines whose KV is on a GPU. Needs torch and triton, which such engines have.

kernels.py      gather and scatter, checksums included
device.py       streams, events, copies and registered host memory, as the driver has them
batch.py        work for the driver, given to it in one go
pinned.py       which host memory is registered
copies.py       copies over the bus, in turns that let an engine's own through
staging.py      GPU memory that blocks pass through
scattering.py   loads
copier.py       all of it together, and stores
"""
