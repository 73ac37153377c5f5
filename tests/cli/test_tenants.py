"""`kvkeep tenants` against a real server."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from caches import connect

from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess
from kvkeep.units import MIB

Run = Callable[..., "subprocess.CompletedProcess[str]"]
TENANT = "t-" + "b" * 32
SALT = "a-salt-that-nobody-sees"


SHAPE = (4, (1024,), "uint8")


def put_blocks(server: ServerProcess, salt: str, blocks: int = 4) -> int:
    with connect(server, *SHAPE) as cache:
        return int(cache.put(list(range(4 * blocks)), np.ones((blocks, 1024), "uint8"), salt=salt))


def usage(kvkeep: Run, server: ServerProcess) -> dict[str, dict[str, object]]:
    done = kvkeep("tenants", "list", "--http", server.http, "--json")
    assert done.returncode == 0, done.stderr
    return {row["tenant"]: row for row in json.loads(done.stdout)["tenants"]}


def test_quotas_are_set_shown_and_taken_back(kvkeep: Run, server: ServerProcess) -> None:
    done = kvkeep("tenants", "set-quota", TENANT, "8MiB", "--http", server.http)
    assert (done.returncode, done.stdout) == (0, f"{TENANT} has a quota of 8MiB\n")
    assert usage(kvkeep, server)[TENANT]["quota_bytes"] == 8 * MIB
    assert TENANT in kvkeep("tenants", "list", "--http", server.http).stdout
    done = kvkeep("tenants", "unset-quota", TENANT, "--http", server.http, "--json")
    assert json.loads(done.stdout) == {"tenant": TENANT, "quota_bytes": None}
    assert TENANT not in usage(kvkeep, server)


def test_a_tenant_can_be_named_by_its_salt(kvkeep: Run, server: ServerProcess) -> None:
    done = kvkeep("tenants", "id", stdin=f"{SALT}\n")
    assert done.stdout == f"{tenant_of(SALT)}\n"
    done = kvkeep(
        "tenants", "set-quota", "--salt-stdin", "4MiB", "--http", server.http, "--json", stdin=SALT
    )
    assert json.loads(done.stdout) == {"tenant": tenant_of(SALT), "quota_bytes": 4 * MIB}
    assert put_blocks(server, SALT) == 4
    assert usage(kvkeep, server)[tenant_of(SALT)]["blocks"] == 4
    done = kvkeep("tenants", "clear", "--salt-stdin", "--http", server.http, stdin=SALT)
    assert done.stdout == f"4 blocks of {tenant_of(SALT)} are out of use\n"
    assert usage(kvkeep, server)[tenant_of(SALT)]["blocks"] == 0
    assert (
        kvkeep(
            "tenants", "unset-quota", "--salt-stdin", "--http", server.http, stdin=SALT
        ).returncode
        == 0
    )


def test_clearing_everything_must_be_meant(kvkeep: Run, server: ServerProcess) -> None:
    put_blocks(server, "one")
    put_blocks(server, "two")
    done = kvkeep("tenants", "clear-all", "--http", server.http)
    assert done.returncode == 2 and "--yes" in done.stderr
    assert len(usage(kvkeep, server)) == 2
    done = kvkeep("tenants", "clear-all", "--yes", "--http", server.http, "--json")
    assert json.loads(done.stdout) == {"blocks": 8, "unreached": []}
    assert usage(kvkeep, server) == {}


@pytest.mark.parametrize(
    ("words", "stdin", "code", "expected"),
    [
        (("set-quota", TENANT, "much"), "", 2, "expected a size"),
        (("set-quota", TENANT, "none"), "", 2, "kvkeep tenants unset-quota"),
        (("set-quota", TENANT, "-1"), "", 2, "never negative"),
        (("set-quota", TENANT, "--jsno"), "", 2, "no such option: --jsno"),
        (("set-quota", TENANT), "", 2, "expected TENANT and SIZE"),
        (("set-quota", TENANT, "1GiB", "--salt-stdin"), "s", 2, "expected TENANT and SIZE"),
        (("set-quota", TENANT, "1TiB"), "", 1, "does not fit"),
        (("unset-quota", TENANT), "", 1, "has no blocks, and no quota or limit"),
        (("clear", TENANT), "", 1, "has no blocks, and no quota or limit"),
        (("set-limit", TENANT, "none"), "", 2, "kvkeep tenants unset-limit"),
        (("set-limit", TENANT, "-1"), "", 2, "never negative"),
        (("set-limit", TENANT, "65TiB"), "", 1, "is not in 0 to 64TiB"),
        (("unset-limit", TENANT), "", 1, "has no blocks, and no quota or limit"),
        (("clear",), "", 2, "either TENANT or --salt-stdin"),
        (("clear", TENANT, "--salt-stdin"), "s", 2, "either TENANT or --salt-stdin"),
        (("clear", "--salt-stdin"), "", 2, "no salt"),
        (("clear", "--salt-stdin"), "x" * 70_000, 2, "at most"),
    ],
)
def test_mistakes_are_explained(
    kvkeep: Run, server: ServerProcess, words: tuple[str, ...], stdin: str, code: int, expected: str
) -> None:
    done = kvkeep("tenants", *words, "--http", server.http, stdin=stdin)
    assert done.returncode == code
    assert expected in done.stderr and done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr and not done.stdout


def test_the_help_of_set_quota_says_which_argument_may_be_left_out(kvkeep: Run) -> None:
    text = kvkeep("tenants", "set-quota", "--help").stdout
    assert "set-quota [OPTIONS] [TENANT] SIZE\n" in text and "0 promises nothing" in text


def test_a_salt_given_as_a_tenant_is_not_repeated(kvkeep: Run, server: ServerProcess) -> None:
    done = kvkeep("tenants", "clear", SALT, "--http", server.http)
    assert done.returncode == 2 and "--salt-stdin" in done.stderr
    assert SALT not in done.stderr + done.stdout


def test_hits_misses_and_tokens_loaded_are_shown_for_each_tenant(
    kvkeep: Run, server: ServerProcess
) -> None:
    salt = "a tenant that loads"
    assert put_blocks(server, salt) == 4
    with connect(server, *SHAPE) as cache:
        assert len(cache.get(list(range(24)), salt=salt)) == 4
        assert cache.contains(list(range(16)), salt=salt) == 4
    row = usage(kvkeep, server)[tenant_of(salt)]
    assert [row[name] for name in ("lookups", "hit_blocks", "missed_blocks")] == [2, 8, 2]
    assert row["figures"]["tokens_loaded"] == 16
    status = json.loads(kvkeep("status", "--http", server.http, "--json").stdout)
    counts = status["tenant_counts"][tenant_of(salt)]
    assert {name: count for name, count in counts.items() if count} == {
        "lookups": 2,
        "hit_blocks": 8,
        "missed_blocks": 2,
        "loaded_tokens": 16,
    }
    assert status["counters"]["loaded_tokens"] >= 16
    assert f'kvkeep_tenant_loaded_tokens_total{{tenant="{tenant_of(salt)}"}} 16.0' in ask(
        server.http, "/metrics"
    )


def test_limits_are_set_shown_and_taken_back(kvkeep: Run, server: ServerProcess) -> None:
    """A limit of 0 drops what was there and nothing is stored after it; unset, all is as before."""
    salt = "a tenant with a limit"
    tenant, http = tenant_of(salt), ("--http", server.http)
    assert put_blocks(server, salt) == 4
    done = kvkeep("tenants", "set-limit", tenant, "8KiB", *http)
    assert (done.returncode, done.stdout) == (0, f"{tenant} has a limit of 8KiB\n")
    row = usage(kvkeep, server)[tenant]
    assert row["usage_bytes"] == row["limit_bytes"] == 8192 and row["own_limit"] is True
    assert "8KiB" in next(
        line for line in kvkeep("tenants", "list", *http).stdout.splitlines() if tenant in line
    )
    done = kvkeep("tenants", "set-limit", "--salt-stdin", "0", *http, "--json", stdin=salt)
    assert json.loads(done.stdout) == {"tenant": tenant, "limit_bytes": 0}
    assert put_blocks(server, salt) == 0 and usage(kvkeep, server)[tenant]["usage_bytes"] == 0
    done = kvkeep("tenants", "unset-limit", tenant, *http, "--json")
    assert json.loads(done.stdout) == {"tenant": tenant, "limit_bytes": None}
    assert put_blocks(server, salt) == 4
    assert kvkeep("tenants", "clear", tenant, *http).returncode == 0


def test_limits_survive_a_restart_and_hold_for_what_is_adopted(kvkeep: Run, tmp_path: Path) -> None:
    server = ServerProcess("--pool-size", "32MiB", name="limited", state_dir=tmp_path)
    with server:
        assert put_blocks(server, SALT, 8) == 8 and put_blocks(server, "other", 8) == 8
        words = ("tenants", "set-limit", "--salt-stdin", "20KiB", "--http", server.http)
        assert kvkeep(*words, stdin=SALT).returncode == 0
        server.stop()
        server.start("--default-limit", "8KiB")
        shown = {
            name: (row["usage_bytes"], row["limit_bytes"])
            for name, row in usage(kvkeep, server).items()
        }
        assert shown == {tenant_of(SALT): (20480, 20480), tenant_of("other"): (8192, 8192)}
        assert put_blocks(server, SALT, 8) == 0, (
            "the blocks of the same chain that were evicted find no room"
        )
        changed = kvkeep("settings", "set", "default_limit", "12KiB", "--http", server.http)
        assert changed.returncode == 0
        server.stop()
        server.start()
        assert usage(kvkeep, server)[tenant_of("other")]["limit_bytes"] == 12288


def test_quotas_of_a_larger_pool_are_scaled_down_and_return_with_it(
    kvkeep: Run, tmp_path: Path
) -> None:
    quotas, sizes = {TENANT: 24 * MIB, "default": 8 * MIB}, ("32MiB", "16MiB", "32MiB")
    for pool, factor in zip(sizes, (1, 2, 1), strict=True):
        with ServerProcess("--pool-size", pool, name="shrunk", state_dir=tmp_path) as server:
            if "scaled down" not in (before := server.log()) and pool == sizes[0]:
                for tenant, nbytes in quotas.items():
                    kvkeep("tenants", "set-quota", tenant, str(nbytes), "--http", server.http)
            shown = {
                name: (row["quota_bytes"], row["set_quota_bytes"])
                for name, row in usage(kvkeep, server).items()
            }
            assert shown == {name: (nbytes // factor, nbytes) for name, nbytes in quotas.items()}
            listed = kvkeep("tenants", "list", "--http", server.http).stdout
            assert ("12MiB (set: 24MiB)" in listed) == (factor == 2)
            status = json.loads(kvkeep("status", "--http", server.http, "--json").stdout)
            assert status["quotas"]["scaled_down"] == (factor == 2)
            assert ("32MiB together" in before and "scaled down to 16MiB" in before) == (
                factor == 2
            )
            refused = kvkeep("tenants", "set-quota", TENANT, "30MiB", "--http", server.http)
            assert refused.returncode == 1 and "does not fit" in refused.stderr, (
                "at run time nothing is scaled"
            )
            kept = json.loads((tmp_path / "shrunk" / "quotas.json").read_bytes())
            assert kept["tenants"] == quotas


def test_quotas_survive_a_restart(kvkeep: Run, tmp_path: Path) -> None:
    for expected in (0, 8 * MIB):
        with ServerProcess("--pool-size", "32MiB", name="restarted", state_dir=tmp_path) as server:
            assert usage(kvkeep, server).get(TENANT, {}).get("quota_bytes", 0) == expected
            assert (
                kvkeep("tenants", "set-quota", TENANT, "8MiB", "--http", server.http).returncode
                == 0
            )
            changed = kvkeep(
                "settings", "set", "default_quota", "1MiB", "--http", server.http, "--json"
            )
            assert json.loads(changed.stdout)["value"] == "1MiB"
    with ServerProcess("--pool-size", "32MiB", name="restarted", state_dir=tmp_path) as server:
        rows = json.loads(kvkeep("settings", "list", "--http", server.http, "--json").stdout)
        default = next(row for row in rows if row["name"] == "default_quota")
        assert default["value"] == "1MiB" and default["source"].startswith("kept in ")


def test_a_salt_is_nowhere_to_be_seen(kvkeep: Run, tmp_path: Path) -> None:
    """Not in the log, metrics, status, settings, file names or files, for a tenant with blocks and
    a quota."""
    with ServerProcess(
        "--pool-size", "32MiB", "--log-level", "debug", state_dir=tmp_path
    ) as server:
        assert put_blocks(server, SALT) == 4
        kvkeep("tenants", "set-quota", "--salt-stdin", "1MiB", "--http", server.http, stdin=SALT)
        kvkeep("tenants", "set-quota", SALT, "1MiB", "--http", server.http)
        said = [
            ask(server.http, path)
            for path in ("/metrics", "/v1/status", "/v1/tenants", "/v1/settings")
        ]
        said += [ask(server.http, f"/v1/tenants/{SALT}")]
        pool = Path("/dev/shm") / f"kvkeep-{server.name}"
        files = [*tmp_path.rglob("*"), *pool.rglob("*")]
        assert any(file.name == "quotas.json" for file in files)
        said += [str(file) for file in files]
        said += [
            file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file()
        ]
        said.append(server.stop())
    assert (
        tenant_of(SALT) in said[0] and tenant_of(SALT) in said[1] and "quota of tenant" in said[-1]
    )
    assert not [text for text in said if SALT in text]


def ask(http: str, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{http}{path}") as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
