"""Where bytes are kept. So far: host memory.

memory.py        the pool in shared memory: made, filled, guarded, left or removed by the daemon
index_files.py   what is in it, beside it, for the next daemon
old_sessions.py  who was at work in it under the last one
"""
