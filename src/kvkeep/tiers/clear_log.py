"""What hosts tell each other through a shared tier: which tenants were cleared, and which host has
carried that out.

    v1/control/clears/1    [START, token]: the log begins
    v1/control/clears/2    [digest of a tenant, token]
    v1/control/hosts/1     [host, token]: that host uses the tier; [host, "-" + token]: no longer
    v1/control/done/<host>/2-<digest>    that host has carried out clear 2, and all before it
    v1/control/known/<host>/<0 or 1>     how many entries that host knows: what a shorter log has lost

An entry is written once and stays (`SharedLog`). A tenant's generation is the last entry that names
it, ALL or START: its number and a digest of it are part of the names of the tenant's blocks. So what
was stored before a clear is found no more, and neither is what a late or cut-off host still writes
under an old generation. START stands for clears that are not known: it ends all generations.

A service may lose entries: it evicts, or starts again empty. So every reading looks whether the last
entry is still what it was. If not, the process reads the log anew and appends what it lacks, one
entry after the other. What is on the tier by then stays, so numbers may change; a digest of the log
up to a number tells whether two readers mean the same by it.

All of this has the format CONTROL_VERSION of `checked_tier`, whatever the format of blocks is."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import CONTROL_VERSION, CheckedTier
from kvkeep.tiers.tier import Part

ALL = "*"
START = "^"  # clears that are not known: the log begins here, or has lost entries
CLEARS, HOSTS = "v1/control/clears", "v1/control/hosts"
_DONE = "v1/control/done"
_KNOWN = "v1/control/known"
_KNOWN_BYTES = 16
_MOST_DONE = 64  # entries of one reading that are confirmed one by one
_ENTRY_BYTES = 128
_AT_ONCE = 64
_CHECK_EVERY = 60  # readings: then all entries are compared
_CHECK_SOON = 3  # readings of the list of hosts; and while hosts may not see a clear
_DIGEST_BYTES = 16
_GENERATION_BYTES = 8


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry: the digest of a tenant, ALL or START, or the name of a host; and by what its writer
    knows it again."""

    name: str
    token: str = ""


def chained(digest: str, entry: Entry) -> str:
    """The digest of a log that has this entry after those of that digest; "": after none."""
    content = digest.encode() + msgspec.json.encode(entry)
    return blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def generation(number: int, entry: Entry) -> str:
    """The name of the generation that begins with this entry. A number that was given again, because
    the service had lost the entry, is another generation."""
    digest = blake2b(msgspec.json.encode(entry), digest_size=_GENERATION_BYTES).hexdigest()
    return f"{number}-{digest}"


class SharedLog:
    """Entries in an order on which all hosts agree, as far as this process has read them. Calls
    block."""

    def __init__(self, tier: CheckedTier, place: str = CLEARS) -> None:
        self.has_lost = False  # entries that this process knew; for its user to set back
        self._place = place
        self._tier = tier
        self._known: list[Entry] = []
        self._digests = [""]  # up to each number
        self._lost: list[Entry] = []  # to be appended again
        self._lock = threading.Lock()
        self._readings = 0

    def sync(
        self, entries: Sequence[Entry], after: int, *, check_soon: bool = False
    ) -> list[Entry]:
        """Appends these, unless they are there, and returns all entries after number `after`."""
        with self._lock:
            self._readings += 1
            every = _CHECK_SOON if check_soon else _CHECK_EVERY
            if self._readings % every == 0 or self._has_lost_its_end():
                self._read_anew()
            self._read()
            while self._lost:
                self._append(self._lost[0])
                del self._lost[0]
            for entry in entries:
                self._append(entry)
            return self._known[after:]

    def begin(self) -> None:
        """Appends START to a log without entries: what is on the tier is older than the log."""
        with self._lock:
            if self._known or self._lost:
                return
            self._read()
            if not self._known:
                start = Entry(START, secrets.token_hex(_DIGEST_BYTES))
                self._tier.write([_part(self._place, 1, start)])
                self._read()  # that of another host, if it was first
                if not self._known:
                    raise _no_room()

    def has_more(self) -> bool:
        """Whether there are entries after one that is missing."""
        with self._lock:
            first = len(self._known) + 1
            parts = [_part(self._place, number) for number in range(first, first + _AT_ONCE)]
            found = [nbytes == _ENTRY_BYTES for nbytes in self._tier.read(parts)]
            self._read()  # another host may have appended some meanwhile
            return any(found) and len(self._known) < first

    def __len__(self) -> int:
        with self._lock:
            return len(self._known)

    def digest(self, number: int) -> str | None:
        """Of all entries up to that number. None: there are fewer."""
        with self._lock:
            return self._digests[number] if number < len(self._digests) else None

    def mark(self, number: int) -> str:
        """A name of that entry, which no entry of another log has."""
        return f"{number}-{self.digest(number)}"

    def generations(self, tenant: str) -> list[str]:
        """All generations that a tenant has had, the present one last."""
        with self._lock:
            entries = enumerate(self._known, start=1)
            ends = (tenant, ALL, START)
            return ["0", *(generation(at, each) for at, each in entries if each.name in ends)]

    def _append(self, clear: Entry) -> None:
        while clear not in self._known:
            number = len(self._known) + 1
            if self._tier.write([_part(self._place, number, clear)]) != [True]:
                raise _no_room()
            self._read()  # what another host wrote first under this number stays
            if len(self._known) < number:
                raise TierError("an entry of the log of clears cannot be read back")

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
            raise _other_format(self._tier, name)

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
        lost = [each for each in known if each not in self._known]
        self.has_lost |= bool(lost)
        self._lost += [each for each in lost if each not in self._lost]


class Hosts:
    """The hosts that use a shared tier, and what they have carried out. `mark` names an entry of the
    log of clears."""

    def __init__(self, tier: CheckedTier, host: str, mark: Callable[[int], str] = str) -> None:
        self._mark = mark
        self._confirmed_mark = ""
        self._tier = tier
        self._host = host
        self._log = SharedLog(tier, HOSTS)
        self._confirmed = -1
        self._has_joined = False
        self._said = -1  # how many entries this host knows
        self._slot = 0

    def join(self) -> None:
        """Enters this host into the list. From then on clears wait for it, so it reads the log of
        clears after this."""
        if not self._has_joined:
            if self._host not in self.names():
                self._log.sync([Entry(self._host, secrets.token_hex(_GENERATION_BYTES))], 0)
            self._has_joined = True

    def leave(self) -> None:
        """Takes this host out of the list: no clear waits for it, or names it, until it joins."""
        entries = self._log.sync([], 0)
        tokens = _tokens(entries).get(self._host, ())
        self._log.sync([Entry(self._host, f"-{token}") for token in tokens], 0)

    def confirm(self, carried_out: int) -> None:
        """Tells the other hosts that this one has carried out the clears up to that number."""
        self.join()
        if self._confirmed > 0 and self._mark(self._confirmed) != self._confirmed_mark:
            self._confirmed = 0  # it was another log
        first = max(self._confirmed, carried_out - _MOST_DONE) + 1
        if first <= carried_out:
            marks = [self._mark(number) for number in range(first, carried_out + 1)]
            self._tier.write([Part(_done(self._host, mark), [memoryview(b"1")]) for mark in marks])
        self._confirmed = max(carried_out, 0)
        self._confirmed_mark = self._mark(self._confirmed)

    def names(self) -> list[str]:
        """All hosts that have joined and not left, this one among them."""
        return self.present_and_gone()[0]

    def present_and_gone(self) -> tuple[list[str], list[str]]:
        """The same, and those that have left, the last one first: what they wrote is still there."""
        entries = self._log.sync([], 0, check_soon=True)
        present = list(_tokens(entries))
        names = dict.fromkeys(each.name for each in reversed(entries))
        return present, [name for name in names if name not in present]

    def lacking(self, number: int, others: Sequence[str] = ()) -> list[str]:
        """The other hosts that have not carried out that clear; `others` are asked even if they are
        not in the list."""
        hosts = [host for host in dict.fromkeys([*self.names(), *others]) if host != self._host]
        # Read, not only looked up: what does not verify confirms nothing.
        found = self._tier.read(
            [Part(_done(host, self._mark(number)), [memoryview(bytearray(1))]) for host in hosts]
        )
        return [host for host, nbytes in zip(hosts, found, strict=True) if nbytes != 1]

    def say_known(self, entries: int) -> None:
        """Tells other hosts how many entries of the log of clears there are. One of the two names is
        always there."""
        if entries == self._said:
            return
        name = _known(self._host, self._slot)
        self._tier.drop([name])
        content = msgspec.json.encode(entries).ljust(_KNOWN_BYTES)
        if self._tier.write([Part(name, [memoryview(content)])]) == [True]:
            self._slot = 1 - self._slot
            self._said = entries

    def most_known(self) -> dict[str, int]:
        """How many entries of the log of clears each host has known, as far as that can be read."""
        names = [(host, _known(host, slot)) for host in self.names() for slot in (0, 1)]
        parts = [Part(name, [memoryview(bytearray(_KNOWN_BYTES))]) for _, name in names]
        most: dict[str, int] = {}
        for nbytes, part, (host, name) in zip(self._tier.read(parts), parts, names, strict=True):
            if nbytes == _KNOWN_BYTES:
                most[host] = max(most.get(host, 0), _count_in(bytes(part.views[0])))
            elif self._tier.version(name) not in (None, CONTROL_VERSION):
                raise _other_format(self._tier, name)
        return most

    def forget_known(self, hosts: Sequence[str]) -> None:
        """What these hosts have known counts no longer. They say it again if they are there."""
        self._tier.drop([_known(host, slot) for host in hosts for slot in (0, 1)])


def _tokens(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """By which entries each host is in the list."""
    left = {(each.name, each.token[1:]) for each in entries if each.token.startswith("-")}
    hosts: dict[str, list[str]] = {}
    for each in entries:
        if not each.token.startswith("-") and (each.name, each.token) not in left:
            hosts.setdefault(each.name, []).append(each.token)
    return hosts


def _no_room() -> TierError:
    return TierError("the shared tier has no room to note a clear", "make room on it")


def _other_format(tier: CheckedTier, name: str) -> TierError:
    return TierError(
        "what hosts tell each other cannot be read: another release of kvkeep wrote it (format "
        f"{tier.version(name)}, this release reads {CONTROL_VERSION})",
        "use the same release on all hosts",
    )


def _known(host: str, slot: int) -> str:
    return f"{_KNOWN}/{host}/{slot}"


def _count_in(content: bytes) -> int:
    try:
        return msgspec.json.decode(content, type=int)
    except msgspec.DecodeError as error:
        raise TierError(f"what a host knows cannot be read: {error}") from error


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
