"""What goes between an engine and the daemon.

messages.py      the protocol: its prose, and every message as a typed struct
frames.py        a message as bytes and back; the only place that reads what a peer sent
stream.py        messages over a connected socket
segments.py      the pool's shared memory, as an engine maps it
pool_files.py    the pool's files, opened and checked; locks that prove that a process lives
peers.py         the other end of a connection: its user, whether it is trusted, strangers
tls.py           mutual TLS for connections beyond this host
tracing.py       spans for a collector of OpenTelemetry; an extra
address.py       where a server listens, as text
secret_files.py  secrets and lists in files
"""
