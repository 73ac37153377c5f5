"""What goes between an engine and the daemon.

messages.py   the protocol: its prose, and every message as a typed struct
frames.py     a message as bytes and back; the only place that reads what a peer sent
stream.py     messages over a connected socket
segments.py   the pool's shared memory, as an engine maps it
pool_files.py the pool's files, opened and then checked
peers.py      which users of this host are trusted
peer_user.py  which user is at the other end of a connection
tls.py        mutual TLS for connections beyond this host
strangers.py  what a peer seems to be that does not speak our protocol
address.py    where a server listens, as text
auth.py       secrets and lists in files
liveness.py   a lock by which the kernel tells the daemon that a process is gone
"""
