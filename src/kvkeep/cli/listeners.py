"""Who listens on a port of this host, by the kernel's tables /proc/net/tcp and tcp6.

sl  local_address rem_address   st tx_queue:rx_queue tr:tm->when retrnsmt   uid
 0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 ...
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import Final

UNKNOWN_UID: Final = -1  # nobody's: the tables could not be read
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"


def listeners(host: str, port: int) -> set[int]:
    """User ids of all that a connection to `host`, a loopback address or localhost, could reach. Looked at before the
    connection is made: who takes the port in between is not seen. Only a port that is free can be taken."""
    found: set[int] = set()
    for table in _TABLES:
        try:
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
        except FileNotFoundError:  # no IPv6, or no Linux
            if table is _TABLES[0]:
                return {UNKNOWN_UID}
            continue
        except OSError:
            return {UNKNOWN_UID}
        for row in rows:
            address, _, number = row[1].partition(":")
            if row[3] == _LISTENS and int(number, 16) == port and _is_reached(host, _address(address)):
                found.add(int(row[7]))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address of the tables: words of 32 bits, each in the host's order of bytes."""
    words = (int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


def _is_reached(host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """A name may stand for either family, so whoever listens on any loopback address counts for it."""
    if address.is_unspecified:
        return True
    return address.is_loopback if host == "localhost" else address == ipaddress.ip_address(host)
