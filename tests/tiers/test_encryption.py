"""An encrypted tier against an adversary who can read and change all that the medium holds, and
against hosts with other keys or none."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
from random import Random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from dictionary_medium import Dictionary
from secret_keys import secret

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import (
    FRAME_BYTES,
    HEAD,
    SEGMENT_BYTES,
    CheckedTier,
    Checksums,
    Verdict,
)
from kvkeep.tiers.clear_log import ALL, Entry, Hosts, SharedLog
from kvkeep.tiers.encryption import Encryption
from kvkeep.tiers.tier import Part
from kvkeep.tiers.tier_keys import TierKeys, id_of

NAME = "v1/alice/0/layout/key"


def keys_of(*keys: str, log: str = "log") -> TierKeys:
    return TierKeys(bytes.fromhex(secret(log)), tuple(bytes.fromhex(secret(key)) for key in keys))


def host(medium: Dictionary, *keys: str, log: str = "log") -> CheckedTier:
    """A host with these keys; without any, one that does not encrypt."""
    found = keys_of(*keys, log=log)
    return CheckedTier(medium, Encryption(lambda: found) if keys else None)


def write(tier: CheckedTier, data: bytes, name: str = NAME) -> None:
    assert tier.write([Part(name, [memoryview(data)])]) == [True]


def read(tier: CheckedTier, nbytes: int, name: str = NAME, offset: int = 0) -> bytes | None:
    view = memoryview(bytearray(nbytes))
    (found,) = tier.read([Part(name, [view], offset)])
    return None if found < 0 else bytes(view[:found])


def only(medium: Dictionary) -> str:
    (name,) = medium.values
    return name


# -- what is written


@pytest.mark.parametrize("seed", range(20))
def test_any_range_of_any_length_is_what_was_written(seed: int) -> None:
    random = Random(seed)
    edges = [0, 1, 100, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1]
    tier = host(Dictionary(), "a")
    data = random.randbytes(random.choice([*edges, random.randrange(3 * SEGMENT_BYTES)]))
    write(tier, data)
    for _ in range(10):
        offset = min(len(data), random.choice([*edges, random.randrange(len(data) + 1)]))
        nbytes = random.choice([1, 5000, *edges, 3 * SEGMENT_BYTES])
        assert read(tier, nbytes, offset=offset) == data[offset : offset + nbytes]


def test_nothing_that_is_stored_tells_what_it_is() -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    data = b"a known text of a prompt" * 5000
    for tenant in ("alice", "bob"):
        write(tier, data, f"v1/{tenant}/3/layout/key")
    SharedLog(tier).sync([Entry("alice", "token-of-it")], 0)
    Hosts(tier, "name-of-a-host").confirm(1)
    stored = [*medium.values.values(), *(name.encode() for name in medium.values)]
    for plain in (b"known text", b"alice", b"bob", b"layout", b"token-of", b"name-of", b"key"):
        for text in (plain, hashlib.sha256(plain).hexdigest()[:32].encode(), plain.hex().encode()):
            assert not any(text in each for each in stored), text
    bodies = [value[FRAME_BYTES:] for value in medium.values.values() if len(value) > 1000]
    assert len(bodies) == 2 and bodies[0] != bodies[1], "the same bytes look the same"


def test_the_same_bytes_written_twice_share_no_key() -> None:
    proofs = Encryption(lambda: keys_of("a"))
    (name,), head, data = proofs.names(NAME), bytes(HEAD.size), memoryview(bytes(64))
    sealed = [proofs.seal(name, head, data) for _ in range(500)]
    assert len({bytes(stored) for _, stored in sealed}) == len(sealed)
    assert len({proof for proof, _ in sealed}) == len(sealed)


def test_the_format_stays_what_the_decision_says() -> None:
    """Opened here step by step: hosts of two releases read each other's blocks."""

    def derived(purpose: str) -> bytes:
        pseudorandom = hmac.digest(bytes(32), bytes.fromhex(secret("a")), "sha256")
        return hmac.digest(pseudorandom, b"kvkeep tier 1: " + purpose.encode() + b"\1", "sha256")

    def hidden(path: str) -> str:
        return hashlib.blake2b(path.encode(), key=derived("names"), digest_size=16).hexdigest()

    medium = Dictionary()
    write(host(medium, "a"), b"some bytes")
    number = hashlib.blake2b(
        bytes.fromhex(secret("a")), digest_size=8, person=b"kvkeep.tierkey"
    ).hexdigest()
    parts = [number, *map(hidden, ("alice", "alice/0", "alice/0/layout", "alice/0/layout/key"))]
    name = only(medium)
    assert name == "/".join(["v1", *parts])
    value = medium.values[name]
    head, by, salt, tag = value[:24], value[24:32], value[32:48], value[48:64]
    assert by.hex() == number
    of_generation = derived("data " + "/".join(["v1", *parts[:3]]))
    key = hashlib.blake2b(salt + name.encode(), key=of_generation, digest_size=32).digest()
    plain = AESGCM(key).decrypt(bytes(12), value[64:] + tag, head + name.encode())
    assert plain == b"some bytes"


# -- forged


FIELDS = {
    "magic": 0,
    "kind": 5,
    "reserved": 6,
    "number": 8,
    "bytes of the whole": 12,
    "padding": 20,
    "id of the key": 24,
    "random bits": 32,
    "tag": 48,
    "data": FRAME_BYTES,
}


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("at", FIELDS.values(), ids=FIELDS)
def test_a_flipped_bit_is_a_miss_and_removed(at: int, segment: int) -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    write(tier, os.urandom(SEGMENT_BYTES + 5000))
    name = only(medium)
    value = bytearray(medium.values[name])
    value[segment * (FRAME_BYTES + SEGMENT_BYTES) + at] ^= 16
    medium.values[name] = bytes(value)
    assert read(tier, SEGMENT_BYTES + 5000) is None
    assert not medium.values, "it is in the way of the next write"


def test_another_version_is_a_miss_and_stays() -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    write(tier, b"newer")
    value = bytearray(medium.values[only(medium)])
    value[4] += 1
    medium.values[only(medium)] = bytes(value)
    assert read(tier, 5) is None and medium.values


@pytest.mark.parametrize("left", [0, 1, 63, 64, 100, FRAME_BYTES + SEGMENT_BYTES, -1])
def test_what_is_cut_off_is_a_miss_and_removed(left: int) -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    write(tier, os.urandom(SEGMENT_BYTES + 5000))
    medium.values[only(medium)] = medium.values[only(medium)][:left]
    assert read(tier, SEGMENT_BYTES + 5000) is None and not medium.values


@pytest.mark.parametrize(
    "other",
    [
        "v1/bob/0/layout/key",
        "v1/alice/1/layout/key",
        "v1/alice/0/other/key",
        "v1/alice/0/layout/k2",
    ],
)
def test_what_is_replayed_under_another_name_is_a_miss_and_removed(other: str) -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    write(tier, b"mine")
    (victim,) = Encryption(lambda: keys_of("a")).names(other)
    medium.values[victim] = medium.values[only(medium)]
    assert read(tier, 4, other) is None and victim not in medium.values
    assert read(tier, 4) == b"mine"


def test_segments_in_another_order_are_a_miss() -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    write(tier, os.urandom(2 * SEGMENT_BYTES))
    value = medium.values[only(medium)]
    half = len(value) // 2
    medium.values[only(medium)] = value[half:] + value[:half]
    assert read(tier, 2 * SEGMENT_BYTES) is None


def test_a_block_with_a_right_checksum_and_no_key_is_a_miss_and_removed() -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    write(tier, b"right")
    name = only(medium)
    head = HEAD.pack(b"kvkt", 1, Checksums.kind, 0, 0, 5)
    proof, data = Checksums().seal(name, head, memoryview(b"false"))
    medium.values[name] = head + proof + bytes(data)
    assert read(tier, 5) is None and not medium.values
    write(host(medium, "b"), b"false")  # with a key of the forger's own
    medium.values[name] = medium.values.pop(only(medium))
    assert read(tier, 5) is None and not medium.values


# -- other keys, and none


@pytest.mark.parametrize("strange", [(), ("b",)], ids=["no key", "another key"])
def test_hosts_with_other_keys_neither_find_nor_remove_each_others_blocks(
    strange: tuple[str, ...],
) -> None:
    medium = Dictionary()
    one, other = host(medium, "a"), host(medium, *strange, log="other")
    write(one, b"of one")
    assert other.leading([NAME]) == 0 and read(other, 6) is None
    write(other, b"of the other")
    assert read(one, 100) == b"of one" and read(other, 100) == b"of the other"
    assert other.delete("v1/alice/0/") == 1
    assert read(one, 100) == b"of one"
    SharedLog(other).sync([Entry(ALL, "1")], 0)
    assert SharedLog(one).sync([], 0) == [], "a clear without the key"


STEPS = [("a",), ("a", "b"), ("b", "a"), ("b",)]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(STEPS, 2)), ids=str)
def test_two_hosts_at_any_two_steps_of_a_rotation(
    first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """Each finds what is written with a key that it has. Clears reach both in any case."""
    medium = Dictionary()
    one, two = host(medium, *first), host(medium, *second)
    for writer, reader, theirs in ((one, two, second), (two, one, first)):
        name, by = f"v1/alice/0/layout/{id(writer)}", first[0] if writer is one else second[0]
        write(writer, b"block", name)
        assert read(reader, 5, name) == (b"block" if by in theirs else None)
        assert reader.leading([name]) == (by in theirs)
    logs = SharedLog(one), SharedLog(two)
    entries = [Entry("alice", "1"), Entry("bob", "2")]
    for log, entry in zip(logs, entries, strict=True):
        log.sync([entry], 0)
    assert logs[0].sync([], 0) == logs[1].sync([], 0) == entries
    hosts = Hosts(one, "one"), Hosts(two, "two")
    for each in hosts:
        each.join()
    hosts[1].confirm(1)
    assert hosts[0].lacking(1) == [] and hosts[1].lacking(1) == ["one"]


def test_a_prefix_that_is_written_in_part_with_each_key_is_found_as_a_whole() -> None:
    medium = Dictionary()
    old, new = host(medium, "a"), host(medium, "b", "a")
    names = [f"v1/alice/0/layout/{number}" for number in range(20)]
    for number, name in enumerate(names):
        write(old if number % 7 < 3 else new, b"%3d" % number, name)
    assert new.leading(names) == 20 and old.leading(names) == 3
    parts = [Part(name, [memoryview(bytearray(3))]) for name in names]
    assert new.read(parts) == [3] * 20
    assert [int(bytes(part.views[0])) for part in parts] == list(range(20))
    assert new.delete("v1/alice/0/") == 20 and not medium.values


def test_what_is_deleted_is_one_generation_or_one_tenant() -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    for tenant, generation, key in itertools.product(("alice", "bob"), range(2), range(3)):
        write(tier, b"x", f"v1/{tenant}/{generation}/layout/{key}")
    assert tier.delete("v1/alice/0/") == 3
    assert read(tier, 1, "v1/alice/0/layout/1") is None
    assert read(tier, 1, "v1/alice/1/layout/1") == b"x"
    assert tier.delete("v1/alice/") == 3 and len(medium.values) == 6
    assert tier.delete("v1/carol/") == 0


def test_keys_that_are_taken_away_meanwhile() -> None:
    current = [keys_of("a")]
    proofs = Encryption(lambda: current[0])
    (name,), head = proofs.names(NAME), bytes(HEAD.size)
    proof, stored = proofs.seal(name, head, memoryview(b"block"))
    current[0] = keys_of("b")
    with pytest.raises(TierError, match="have changed meanwhile"):
        proofs.seal(name, head, memoryview(b"block"))
    data = memoryview(bytearray(stored))
    assert proofs.open(name, head, proof, data) is Verdict.UNKNOWN


# -- forged clears


@pytest.mark.parametrize("by", ["no key", "own keys", "replay", "nothing", "garbage"])
def test_a_clear_that_is_forged_is_not_heard_and_removed(by: str) -> None:
    medium, own = Dictionary(), Dictionary()
    tier = host(medium, "a")
    log = SharedLog(tier)
    log.sync([Entry("alice", "1")], 0)
    (first,), (second,) = (
        Encryption(lambda: keys_of("a")).names(f"v1/control/clears/{number}") for number in (1, 2)
    )
    forger = host(own) if by == "no key" else host(own, "x", log="of the forger")
    SharedLog(forger).sync([Entry("of all", "2"), Entry(ALL, "3")], 0)
    others = {"replay": medium.values[first], "nothing": b"", "garbage": b"x" * 1000}
    for forged in [others[by]] if by in others else list(own.values.values()):
        medium.values[second] = forged
        assert SharedLog(tier).sync([], 0) == log.sync([], 0) == [Entry("alice", "1")]
        assert second not in medium.values
    assert log.sync([Entry("bob", "2")], 1) == [Entry("bob", "2")], "the log goes on"


def test_a_confirmation_that_is_forged_confirms_nothing() -> None:
    medium = Dictionary()
    tier = host(medium, "a")
    one, two = Hosts(tier, "one"), Hosts(tier, "two")
    one.join()
    two.join()
    one.confirm(1)
    (mine,), (theirs,) = (
        Encryption(lambda: keys_of("a")).names(f"v1/control/done/{name}/1")
        for name in ("one", "two")
    )
    medium.values[theirs] = medium.values[mine]
    assert one.lacking(1) == ["two"]
    two.confirm(1)
    assert one.lacking(1) == []


def test_secrets_are_told_apart_by_their_ids() -> None:
    assert len({id_of(bytes.fromhex(secret(word))) for word in "abcdef"}) == 6
