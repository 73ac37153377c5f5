"""What hosts tell each other through a shared tier: which tenants were cleared, and which host has
carried that out.

    v1/control/clears/1    [START, token]: the log begins
    v1/control/clears/2    [digest of a tenant, token]
    v1/control/hosts/1     [host, ""]: a host that uses the tier
    v1/control/done/<host>/2-<digest>    that host has carried out clear 2, and all before it

An entry is written once and stays (`SharedLog`). A tenant's generation is the last entry that names
it, ALL or START: its number, and a digest of the log up to it, are part of the names of the tenant's
blocks. So what was stored before a clear is found no more, and neither is what a late or cut-off
host still writes under an old generation. A number that is given again, because the service lost
the entry, begins another generation. START stands for clears that are not known: it ends all
generations, and nothing else.

A service may lose entries: it evicts, or starts again empty. So every reading looks whether the last
entry is still what it was. If not, the process reads the log anew and appends what it lacks, one
entry after the other. What is on the tier by then stays, so numbers may change; the digest tells
whether two readers mean the same by a number."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from kvkeep.errors import TierError
from kvkeep.tiers.tier import Part, Tier

ALL = "*"
START = "^"  # clears that are not known: the log begins here, or has lost entries
CLEARS, HOSTS = "v1/control/clears", "v1/control/hosts"
_DONE = "v1/control/done"
_MOST_DONE = 64  # entries of one reading that are confirmed one by one
_ENTRY_BYTES = 128
_AT_ONCE = 64
_CHECK_EVERY = 60  # readings of the log of clears: then all entries are compared
_CHECK_HOSTS_EVERY = 3  # readings of the list of hosts: a clear waits for those that are in it
_DIGEST_BYTES = 16


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry: the digest of a tenant, ALL or START, or the name of a host; and by what its writer
    knows it again."""

    name: str
    token: str = ""


def chained(digest: str, entry: Entry) -> str:
    """The digest of a log that has this entry after those of that digest; "": after none."""
    content = digest.encode() + msgspec.json.encode(entry)
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def new_start() -> Entry:
    """A START that no other host has written."""
    return Entry(START, secrets.token_hex(_DIGEST_BYTES))


def mark(number: int, digest: str) -> str:
    """The name of an entry, which no entry of another log has, and of the generation that begins
    with it. `digest`: of the log up to it (`chained`)."""
    return f"{number}-{digest}"


class SharedLog:
    """Entries in an order on which all hosts agree, as far as this process has read them. Each
    `check_every` readings, all of them are compared. Calls block."""

    def __init__(self, tier: Tier, place: str = CLEARS, check_every: int = _CHECK_EVERY) -> None:
        self._place = place
        self._tier = tier
        self._check_every = check_every
        self._known: list[Entry] = []
        self._digests = [""]  # up to each number
        self._lost: list[Entry] = []  # to be appended again
        self._lock = threading.Lock()
        self._readings = 0

    def sync(self, entries: Sequence[Entry], after: int) -> list[Entry]:
        """Appends these, unless they are there, and returns all entries after number `after`."""
        with self._lock:
            self._readings += 1
            if self._readings % self._check_every == 0 or self._has_lost_its_end():
                self._read_anew()
            self._read()
            while self._lost:
                self._append(self._lost[0])
                del self._lost[0]
            for entry in entries:
                self._append(entry)
            return self._known[after:]

    def begin(self) -> None:
        """Appends START to a log without entries, because what is on the tier is older than the log;
        and where an entry is missing before others, because clears behind it would be overlooked."""
        with self._lock:
            self._read()
            while not self._known or self._has_gap():
                self._write(new_start())  # what another host writes first stays

    def digest(self, number: int) -> str | None:
        """Of all entries up to that number. None: there are fewer."""
        with self._lock:
            return self._digests[number] if number < len(self._digests) else None

    def mark(self, number: int) -> str:
        """The name of that entry."""
        return mark(number, self.digest(number) or "")

    def generations(self, tenant: str) -> list[str]:
        """All generations that a tenant has had, the present one last."""
        with self._lock:
            entries = enumerate(self._known, start=1)
            ends = (tenant, ALL, START)
            return [mark(at, self._digests[at]) for at, each in entries if each.name in ends]

    def _append(self, clear: Entry) -> None:
        while clear not in self._known:
            self._write(clear)

    def _write(self, entry: Entry) -> None:
        """Writes it under the next number, unless another host has done so, and reads on."""
        number = len(self._known) + 1
        if self._tier.write([_part(self._place, number, entry)]) != [True]:
            raise TierError("the shared tier has no room to note a clear", "make room on it")
        self._read()
        if len(self._known) < number:
            raise TierError("an entry of the log of clears cannot be read back")

    def _has_gap(self) -> bool:
        """Whether there are entries behind the next one, which is missing."""
        first = len(self._known) + 2
        parts = [_part(self._place, number) for number in range(first, first + _AT_ONCE)]
        return any(nbytes == _ENTRY_BYTES for nbytes in self._tier.read(parts))

    def _read(self) -> None:
        at_once = 1  # mostly there is nothing new
        while True:
            first = len(self._known) + 1
            parts = [_part(self._place, number) for number in range(first, first + at_once)]
            count = self._tier.leading([part.name for part in parts])
            found = self._tier.read(parts[:count])
            for part, nbytes in zip(parts, found, strict=False):
                if nbytes != _ENTRY_BYTES:
                    self._check_gone(part.name)
                    return
                self._known.append(_decode(bytes(part.views[0])))
                self._digests.append(chained(self._digests[-1], self._known[-1]))
            if count < at_once:
                return
            at_once = _AT_ONCE

    def _check_gone(self, name: str) -> None:
        """TierError for an entry that is there and cannot be read: the clears after it would be
        overlooked."""
        if self._tier.leading([name]):
            raise TierError(
                "an entry of the log of clears cannot be read: another release of kvkeep wrote it",
                "use the same release on all hosts",
            )

    def _has_lost_its_end(self) -> bool:
        """Whether the last entry is not what it was."""
        if not self._known:
            return False
        number = len(self._known)
        written, read = _part(self._place, number, self._known[-1]), _part(self._place, number)
        return self._tier.read([read]) != [_ENTRY_BYTES] or read.views[0] != written.views[0]

    def _read_anew(self) -> None:
        """What is on the tier counts. What it lacks is noted."""
        known, digests = self._known, self._digests
        self._known, self._digests = [], [""]
        try:
            self._read()
        except TierError:
            self._known, self._digests = known, digests
            raise
        self._lost += [each for each in known if each not in self._known]


class Hosts:
    """The hosts that use a shared tier, and what they have carried out. `mark` names an entry of the
    log of clears."""

    def __init__(self, tier: Tier, host: str, mark: Callable[[int], str] = str) -> None:
        self._mark = mark
        self._confirmed_mark = ""
        self._tier = tier
        self._host = host
        self._log = SharedLog(tier, HOSTS, _CHECK_HOSTS_EVERY)
        self._confirmed = 0

    def join(self, others: Sequence[str] = ()) -> list[str]:
        """Enters this host into the list, and others that it knows: the tier may have lost them.
        Clears wait for a host from then on, so it reads the log of clears after this. Returns all
        hosts."""
        entries = self._log.sync([Entry(name) for name in (self._host, *others)], 0)
        return [each.name for each in entries]

    def confirm(self, carried_out: int) -> None:
        """Tells the other hosts that this one has carried out the clears up to that number."""
        if self._confirmed > 0 and self._mark(self._confirmed) != self._confirmed_mark:
            self._confirmed = 0  # it was another log
        first = max(self._confirmed, carried_out - _MOST_DONE) + 1
        if first <= carried_out:
            marks = [self._mark(number) for number in range(first, carried_out + 1)]
            self._tier.write([Part(_done(self._host, mark), [memoryview(b"1")]) for mark in marks])
        self._confirmed = carried_out
        self._confirmed_mark = self._mark(self._confirmed)

    def names(self) -> list[str]:
        """All hosts, this one among them."""
        return [each.name for each in self._log.sync([], 0)]

    def lacking(self, number: int) -> list[str]:
        """The other hosts that have not carried out that clear."""
        hosts = [name for name in self.names() if name != self._host]
        # Read, not only looked up: what does not verify confirms nothing.
        found = self._tier.read(
            [Part(_done(host, self._mark(number)), [memoryview(bytearray(1))]) for host in hosts]
        )
        return [host for host, nbytes in zip(hosts, found, strict=True) if nbytes != 1]


def _done(host: str, mark: str) -> str:
    return f"{_DONE}/{host}/{mark}"


def _part(place: str, number: int, clear: Entry | None = None) -> Part:
    content = b"" if clear is None else msgspec.json.encode(clear)
    return Part(f"{place}/{number}", [memoryview(bytearray(content.ljust(_ENTRY_BYTES)))])


def _decode(content: bytes) -> Entry:
    try:
        return msgspec.json.decode(content, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TierError(f"an entry of the log of clears cannot be read: {error}") from error
