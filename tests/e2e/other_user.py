"""What a process of another user does, with the standard library alone: it runs where nothing of
ours can be imported.

    setpriv --reuid UID --clear-groups python -S other_user.py be_the_server TCP_PORT UNIX_NAME POOL
    BODY setpriv --reuid UID --clear-groups python -S other_user.py say WHERE HEX

Each prints lines of JSON. A Unix name that begins with @ has no file.
"""

import contextlib
import json
import os
import pathlib
import select
import socket
import struct
import sys
import threading
import zlib

HEADER = struct.Struct("<4sHHQQIII")


def tell(**what):
    print(json.dumps(what), flush=True)


def be_the_server(port, name, pool, body):
    """Listens in a server's place and answers whatever asks with a Welcome to a pool that all can
    write."""
    os.umask(0)
    make_pool(pathlib.Path(pool))
    heard = {"tcp": 0, "unix": 0}
    accepted = {"tcp": 0, "unix": 0}
    listening = {}
    if port:
        listening[socket.create_server(("127.0.0.1", int(port)))] = "tcp"
    if name:
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("\0" + name[1:] if name.startswith("@") else name)
        unix.listen(64)
        listening[unix] = "unix"
    tell(ready=True)
    threading.Thread(target=report, args=(heard, accepted), daemon=True).start()
    connected = {}
    while True:
        for one in select.select([*listening, *connected], [], [])[0]:
            if one in listening:
                new, _ = one.accept()
                connected[new] = (listening[one], bytearray())
                accepted[listening[one]] += 1
                continue
            kind, said = connected[one]
            data = b""
            with contextlib.suppress(OSError):
                data = one.recv(1 << 16)
            if not data:
                del connected[one]
                one.close()
                continue
            heard[kind] += len(data)
            said += data
            if len(said) >= HEADER.size:
                with contextlib.suppress(OSError):
                    one.sendall(welcome(said, bytes.fromhex(body)))
                said.clear()


def welcome(said, body):
    _, version, _, session, number, *_ = HEADER.unpack_from(said)
    head = HEADER.pack(b"KVKP", version, 0, session, number, len(body), 0, 0)
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def make_pool(pool):
    """As a server of ours makes it, but for all to write: epoch 1."""
    pool.mkdir(mode=0o777)
    (pool / "epoch").write_text(f"{1:016x}")
    for name in ("daemon.lock", "session-1.lock", "segment-0"):
        (pool / name).write_bytes(bytes(1 << 20))


def report(heard, accepted):
    """What was heard, for each line on standard input."""
    for _ in sys.stdin:
        tell(heard=heard, accepted=accepted)
    os._exit(0)


def say(where, data):
    """Connects, says the bytes, and tells all that comes back until the other side closes."""
    host, _, port = where.rpartition(":")
    is_unix = where[0] in "@/"
    try:
        connected = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        connected.settimeout(20)
        connected.connect(
            ("\0" + where[1:] if where[0] == "@" else where) if is_unix else (host, int(port))
        )
    except OSError as error:
        tell(refused=type(error).__name__)
        return
    came, is_closed = b"", True
    try:
        connected.sendall(bytes.fromhex(data))
        while more := connected.recv(1 << 16):
            came += more
            if len(came) > HEADER.size:
                is_closed = False
                break
    except ConnectionError:
        pass
    tell(came=came.hex(), closed=is_closed)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
