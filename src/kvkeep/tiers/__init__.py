"""Where bytes are kept. So far: host memory.

memory.py        the pool in shared memory: made, filled, guarded, left or removed by the daemon
free_memory.py   how large it can be (cgroups.py: memory limits; mounts.py: file systems)
index_files.py   what is in it, beside it, for the next daemon
old_sessions.py  who was at work in it under the last one
"""
