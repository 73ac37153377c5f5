"""Where bytes are kept. So far: host memory.

memory.py   the pool in shared memory: made, filled, guarded and removed by the daemon
"""
