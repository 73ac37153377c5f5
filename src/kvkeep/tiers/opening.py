"""Opens shared tiers by their addresses.

To add a kind of shared tier:

1. Write a class that is a `checked_tier.Medium`, in a module of its own here, and a function that makes
   one of an address, such as `open_file("file:///srv/kv?size=2TiB")`. It raises TierError, with a
   hint, if the address cannot be used. It is called in the tier's own process: it may block.
2. Add a row to `tier_address.SCHEMES`: the function, the options, the extra and its modules.
3. Run `kvkeep.testing.check_tier` on `CheckedTier(medium)`, with the real service."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from pathlib import Path

import msgspec

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import CheckedTier, Medium, Proofs
from kvkeep.tiers.tier_address import SCHEMES, TierAddress, parse_tier
from kvkeep.tiers.tier_keys import KeyFile


class SharedPlace(msgspec.Struct, frozen=True):
    """Where the process of a shared tier finds it. Secrets stay in their file, which it
    reads itself; `log_id` is the log of clears that the server goes by."""

    address: str
    keys: str = ""
    log_id: str = ""

    def description(self) -> bytes:
        return msgspec.json.encode(self)


def check_installed(address: TierAddress, encrypted: bool = False) -> None:
    """TierError if a package or library that this kind of tier, or its encryption, needs is
    missing."""
    scheme = SCHEMES[address.scheme]
    needed = [(name, scheme.extra) for name in scheme.modules]
    needed += [("cryptography", "encryption")] if encrypted else []
    for name, extra in needed:
        if importlib.util.find_spec(name) is None:
            raise TierError(
                f"{address}: the Python package {name} is not installed",
                f"pip install 'kvkeep[{extra}]'",
            )
    lacking = [name for name, file in scheme.libraries.items() if not _can_load(file)]
    if lacking:
        raise TierError(
            f"{address}: a library of the system is missing: {scheme.libraries[lacking[0]]}",
            f"on Debian and Ubuntu: apt-get install {' '.join(lacking)}",
        )


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def open_tier(address: TierAddress, proofs: Proofs | None = None) -> CheckedTier:
    """Opens a shared tier. TierError if that fails."""
    check_installed(address)
    module, _, name = SCHEMES[address.scheme].opener.partition(":")
    opened: Medium = getattr(importlib.import_module(module), name)(str(address))
    return CheckedTier(opened, proofs)


def open_place(description: bytes) -> CheckedTier:
    """Opens what a `SharedPlace` describes. TierError or SettingsError if that fails."""
    place = msgspec.json.decode(description, type=SharedPlace)
    address = parse_tier(place.address)
    if not place.keys:
        return open_tier(address)
    check_installed(address, encrypted=True)
    from kvkeep.tiers.encryption import Encryption  # it needs an extra

    file = KeyFile(Path(place.keys))
    if file.keys().log_id != place.log_id:
        raise TierError(f"{place.keys} has another entry log", "restart the server to use it")
    return open_tier(address, Encryption(file.keys))
