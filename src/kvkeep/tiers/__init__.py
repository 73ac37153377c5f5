"""Where bytes are kept. So far: host memory.

memory.py         the pool in shared memory: made, filled, guarded, left or removed by the server
ownership.py      one server at a time owns the pool's directory
free_memory.py    how large a pool can be: file systems, memory limits
index_files.py    the index beside the pool, for the next server
session_locks.py  which processes may still be at work in the pool
"""
