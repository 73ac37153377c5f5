"""What goes between an engine and the daemon.

messages.py   the protocol: its prose, and every message as a typed struct
frames.py     a message as bytes and back; the only place that reads what a peer sent
segments.py   the pool's shared memory, as an engine maps it
pool_files.py the pool's files, opened and then checked
peers.py      which users of this host are trusted
address.py    where a server listens, as text
auth.py       keys and tokens in files
liveness.py   a lock by which the kernel tells the daemon that a process is gone
"""
