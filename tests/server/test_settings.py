from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import SettingsError
from kvkeep.server import settings as module
from kvkeep.server.settings import (
    AUTO_SIZE,
    DIRECTORY,
    DURATION,
    QUOTA,
    SIZE,
    SWITCH,
    TABLE,
    USERS,
    Settings,
)
from kvkeep.units import GIB, MIB
from kvkeep.wire.peers import OVERFLOW_UID

SMALL = ["--pool-size", "64MiB"]


def load(*argv: str, env: dict[str, str] | None = None, config: Path | None = None) -> Settings:
    return Settings.load(config, env or {}, [*SMALL, *argv])


def refusal(*argv: str, env: dict[str, str] | None = None, config: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(*argv, env=env, config=config)
    return str(caught.value)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvkeep.toml"
    path.write_text(text)
    return path


def test_there_are_few_settings_and_each_says_what_it_is_for() -> None:
    assert len(TABLE) <= 36
    for name, line in TABLE.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert line.help.endswith(".")
        assert "\n" not in line.help


def test_defaults() -> None:
    settings = load()
    assert settings.address == "tcp://localhost:5555"
    assert settings.http_address == "127.0.0.1:5556"
    assert settings.shm_dir == Path("/dev/shm")
    assert settings.slab_size == 4 * MIB, "what auto comes to is known, and shown"
    assert settings.sources["slab_size"] == "default (auto)"
    assert settings.default_quota is None
    assert settings.max_frame_size == 64 * MIB
    assert settings.session_check_interval == 1.0
    assert settings.verify is True
    assert settings.log_json is False


# -- the size of the pool, if no source gives one


def test_the_size_of_the_pool_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "auto_size", lambda shm_dir, name, adopt: (80 * MIB, False))
    settings = Settings.load(None, {}, ["--shm-dir", str(tmp_path)])
    assert (settings.pool_size, settings.slab_size) == (80 * MIB, 5 * MIB)
    assert settings.sources["pool_size"] == "default (auto)" and settings.pool_size_is_auto
    assert not load().pool_size_is_auto
    assert Settings.load(None, {}, ["--pool-size", "auto"]).pool_size_is_auto


@pytest.mark.parametrize(
    ("flags", "fresh", "adopts"),
    [((), False, True), ((), True, False), (("--no-keep-pool",), False, False)],
)
def test_the_size_that_is_left_is_taken_by_who_adopts_it(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], fresh: bool, adopts: bool
) -> None:
    monkeypatch.setattr(module, "auto_size", lambda shm_dir, name, adopt: (80 * MIB, adopt))
    settings = Settings.load(None, {}, flags, fresh=fresh)
    assert settings.sources["pool_size"] == (
        "default (auto, as the last server)" if adopts else "default (auto)"
    )


def test_auto_needs_a_directory_that_exists(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"shm_dir = .*gone cannot be used"):
        Settings.load(None, {}, ["--shm-dir", str(tmp_path / "gone")])


def test_where_no_pool_fits_the_start_names_the_reason_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "auto_size", lambda shm_dir, name, adopt: (0, False))
    with pytest.raises(SettingsError, match=r"there is no room for a pool: .* free") as caught:
        Settings.load(None, {}, [])
    assert caught.value.hint


def test_later_sources_overrule_earlier_ones(tmp_path: Path) -> None:
    config = toml(
        tmp_path,
        'max_sessions = 1\nmax_layouts = 1\nmax_tenants = 1\nverify = false\nname = "file"',
    )
    env = {"KVKEEP_MAX_LAYOUTS": "2", "KVKEEP_MAX_TENANTS": "2", "PATH": "/bin"}
    settings = load("--max-tenants=3", env=env, config=config)
    assert (settings.max_sessions, settings.max_layouts, settings.max_tenants) == (1, 2, 3)
    assert (settings.verify, settings.name) == (False, "file")
    sources = {row.name: row.source for row in settings.describe()}
    assert sources["max_sessions"] == f"file {config}"
    assert sources["max_layouts"] == "environment KVKEEP_MAX_LAYOUTS"
    assert sources["max_tenants"] == "flag --max-tenants"
    assert sources["log_level"] == "default"


@pytest.mark.parametrize(
    ("written", "users"),
    [("7", (7,)), ('"root,7"', (0, 7)), ('[7, "root"]', (7, 0)), ("[]", ()), ('"none"', ())],
)
def test_a_file_may_have_users_as_a_list(
    tmp_path: Path, written: str, users: tuple[int, ...]
) -> None:
    assert load(config=toml(tmp_path, f"trusted_users = {written}")).trusted_users == users
    assert load().trusted_users == ()


def test_a_user_that_this_host_does_not_know_stops_the_start(tmp_path: Path) -> None:
    for written, why in (
        ('["no such user"]', "there is no user 'no such user'"),
        ('"no such user"', "there is no user 'no such user'"),
        (f"[{OVERFLOW_UID}]", f"{OVERFLOW_UID} is the kernel's overflow uid"),
        ("[[1]]", ""),
        ("-1", "there is no user '-1'"),
    ):
        with pytest.raises(SettingsError, match=f"trusted_users.*{why}.*expected user ids"):
            load(config=toml(tmp_path, f"trusted_users = {written}"))


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    config = toml(tmp_path, "max_sessions = 7")
    assert load(env={"KVKEEP_CONFIG": str(config)}).max_sessions == 7


def test_flags_in_each_form() -> None:
    assert load("--log-json", "--no-verify", "--name=a-b_1").log_json is True
    assert load("--no-verify").verify is False
    assert load("--verify=off").verify is False
    assert load("--pool-size=1g", "--pool-size", "1.5GiB").pool_size == 3 * GIB // 2


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--pool-sise", "1g"], ['"--pool-sise"', "flags", "--pool-size"]),
        (["--pool_size", "1g"], ['"--pool_size"', "--pool-size"]),
        (["--no-pool-size"], ['"--no-pool-size"', "--pool-size"]),
        (["--no-verify=1"], ['"--no-verify"', "--verify"]),
        (["serve"], ['unexpected argument "serve"', "--name value"]),
        (["--"], ['unexpected argument "--"']),
        (["--name"], ["--name needs a value", "letters"]),
        (["--name", "--verify"], ["--name needs a value"]),
        (["--name", "a/b"], ["name", '"a/b"', "flag --name", "letters, digits"]),
        (["--pool-size", "lots"], ["pool_size", '"lots"', "8GiB", '"auto"', "at least 1MiB"]),
        (["--pool-size", "1k"], ["pool_size", '"1k"', "at least 1MiB"]),
        (["--max-sessions", "-1"], ["max_sessions", '"-1"', "a whole number, at least 1"]),
        (["--max-sessions", "0"], ["at least 1", "at most 65536"]),
        (["--shutdown-grace", "10"], ["shutdown_grace", "a duration such as"]),
        (["--log-level", "loud"], ["debug, info, warning, error"]),
        (["--verify=maybe"], ["verify", '"maybe"', "true or false"]),
        (["--shm-dir", "dev/shm"], ["shm_dir", "an absolute path"]),
        (["--state-dir", ""], ["state_dir", "an absolute path"]),
    ],
)
def test_a_bad_flag_is_named_with_what_is_expected(argv: list[str], parts: list[str]) -> None:
    message = refusal(*argv)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    "address",
    [
        "localhost:5555",
        "tcp://localhost",
        "tcp://localhost:99999",
        "udp://localhost:1",
        "ipc://",
        "ipc://x/y",
        "tcp://:1",
        "ipc:///" + "s" * 107,
        "ipc:///a\0b",
    ],
)
def test_malformed_addresses(address: str) -> None:
    assert "expected tcp://host:port, or ipc://" in refusal("--address", address)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.2:1", "tcp://[::1]:5555", "ipc:///run/kvkeep.sock", "ipc://@kvkeep"]
)
def test_addresses_that_stay_on_the_host(address: str) -> None:
    assert load("--address", address).address == address


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--slab-size", "65MiB"], ["pool_size = 64MiB", "65MiB", "slab_size"]),
        (["--tier-keys", "/k"], ["tier_keys is set", "tier names none", "does not encrypt disks"]),
        (
            ["--tier-keys", "/k", "--tier", "disk:///a?size=1GiB"],
            ["tier_keys is set", "tier names none"],
        ),
        (["--http-address", "localhost:5555"], ["address and http_address", "5555"]),
        (
            ["--max-frame-size", "512KiB"],
            ["max_frame_size = 512KiB", "1MiB", "max_blocks_per_request"],
        ),
        (
            ["--session-check-interval", "1m"],
            ["network_session_timeout = 30s", "1m", "session_check_interval"],
        ),
    ],
)
def test_settings_that_contradict_each_other(argv: list[str], parts: list[str]) -> None:
    message = refusal(*argv)
    assert [part for part in parts if part not in message] == []


def test_port_zero_lets_the_kernel_choose_for_both() -> None:
    assert (
        load("--address=tcp://127.0.0.1:0", "--http-address=127.0.0.1:0").http_address
        == "127.0.0.1:0"
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max_sesions = 3", ["max_sesions", "kvkeep.toml", "max_sessions"]),
        (
            "[kvkeep]\nname = 'x'",
            ["[kvkeep]", "kvkeep.toml", "hint: remove the line [kvkeep]", "top level"],
        ),
        ("name = ['x']", ["name", "letters", "not a table, list or date"]),
        ("pool_size = 1.5", ["pool_size = 1.5 (", "a size such as"]),
        ("name = ", ["kvkeep.toml", "not valid TOML", "hint: "]),
        ("max_sessions = true", ["max_sessions = true (", "a whole number"]),
        ("pool_size = false", ["pool_size = false ("]),
        ('pool_size = "true"', ['pool_size = "true" (']),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(config=toml(tmp_path, text))
    assert [part for part in parts if part not in message] == []


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    message = refusal(config=tmp_path / "gone.toml")
    assert "gone.toml cannot be read" in message
    assert "hint: check the path in --config or KVKEEP_CONFIG" in message
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'name = "\xe9"')
    assert "latin.toml is not valid TOML" in refusal(config=latin)


def test_a_mistake_shows_even_where_a_later_source_overrules_it(tmp_path: Path) -> None:
    assert "max_sessions" in refusal("--max-sessions=1", config=toml(tmp_path, "max_sessions = 0"))


def test_a_port_is_part_of_an_address() -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.load(None, {}, ["--port", "5000"])
    assert refused.value.hint == "host and port stand in --address, such as tcp://localhost:5555"
    with pytest.raises(SettingsError) as refused:
        Settings.load(None, {"KVKEEP_HTTP_PORT": "80"}, [])
    assert "KVKEEP_HTTP_ADDRESS, such as 127.0.0.1:5556" in refused.value.hint


def test_variables_with_our_prefix_must_be_known() -> None:
    message = refusal(env={"KVKEEP_POOLSIZE": "1g"})
    assert 'unknown setting "KVKEEP_POOLSIZE" (environment)' in message
    assert "KVKEEP_POOL_SIZE" in message
    assert "KVKEEP_NAME" in refusal(env={"KVKEEP_name": "x"})
    assert "environment KVKEEP_VERIFY" in refusal(env={"KVKEEP_VERIFY": ""})
    load(
        env={
            "KVKEEP_NATIVE": "0",
            "KVKEEP_AS_LMCACHE": "1",
            "KVKEEP_HTTP": "127.0.0.1:1",
            "KVKEEP_VALKEY_PASSWORD": "word",
            "KVKEEP_S3_SECRET_ACCESS_KEY_FILE": "/word",
            "OTHER": "1",
        }
    )


@pytest.mark.parametrize(
    "address",
    [
        "valkey://user:pass,word@host/0",
        "valkey://:pass,word@host/0",
        "mysql://user:pass,word@host/0",
        "valkey://host/0?password=pass,word",
        "s3://bucket/kv?endpoint=https://user:pass,word@host",
        "s3://bucket/kv?endpoint=https%3A%2F%2Fuser%3Apass,word%40host",
        "disk:///kv?size=1GiB,rediss://user:pass,word@host",
    ],
)
def test_a_refused_address_of_a_tier_does_not_show_its_password(
    tmp_path: Path, address: str
) -> None:
    for said in (
        refusal("--tier", address),
        refusal(env={"KVKEEP_TIER": address}),
        refusal(config=toml(tmp_path, f'tier = "{address}"')),
        refusal(config=toml(tmp_path, f'tier = ["disk:///kv?size=1GiB", "{address}"]')),
    ):
        assert "tier = (not shown: it may have a password in it)" in said
        assert "pass,word" not in said and "word@" not in said


@pytest.mark.parametrize("service", ["KVKEEP", "KVKEEP_SERVER"])
def test_variables_that_kubernetes_makes_of_a_service_are_ignored(service: str) -> None:
    made = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "5555", "SERVICE_PORT_ENGINES": "5555"}
    made |= {
        "PORT": "tcp://10.0.0.1:5555",
        "PORT_5555_TCP": "tcp://10.0.0.1:5555",
        "PORT_5555_TCP_PROTO": "tcp",
    }
    made |= {
        "PORT_5555_TCP_PORT": "5555",
        "PORT_5555_TCP_ADDR": "10.0.0.1",
        "PORT_53_UDP": "udp://10.0.0.1:53",
    }
    assert load(env={f"{service}_{name}": value for name, value in made.items()}) == load()


@pytest.mark.parametrize(
    "variable",
    [
        "KVKEEP_PORT",
        "KVKEEP_HTTP_PORT",
        "KVKEEP_SERVICE",
        "KVKEEP_PORT_5555",
        "KVKEEP_PORT_5555_TCP_HOST",
    ],
)
def test_what_only_looks_like_kubernetes_is_a_mistake(variable: str) -> None:
    assert variable in refusal(env={variable: "5555"})


def test_state_lives_where_the_desktop_standard_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load().state_dir == tmp_path / ".local/state/kvkeep"
    assert load(env={"XDG_STATE_HOME": "/var/state"}).state_dir == Path("/var/state/kvkeep")
    assert load(env={"XDG_STATE_HOME": "relative"}).state_dir == tmp_path / ".local/state/kvkeep"


def test_live_settings_change_in_a_copy() -> None:
    before = load()
    after = (
        before.changed({"default_quota": "2GiB"})
        .changed({"log_level": "DEBUG"})
        .changed({"verify": "false"})
    )
    assert (after.default_quota, after.log_level, after.verify) == (2 * GIB, "debug", False)
    assert (before.default_quota, before.log_level, before.verify) == (None, "info", True)
    assert after.sources["default_quota"] == "changed while running"
    assert after.changed({"default_quota": "none"}).default_quota is None


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        (
            "pool_size",
            "1g",
            [
                "pool_size cannot change while the server runs",
                "default_quota, default_limit, verify, log_level",
            ],
        ),
        ("log_levle", "info", ['unknown setting "log_levle"', "log_level"]),
        ("verify", "perhaps", ["verify", '"perhaps"', "true or false"]),
    ],
)
def test_a_change_that_is_refused_says_why(name: str, text: str, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load().changed({name: text})
    assert [part for part in parts if part not in str(caught.value)] == []


def test_what_is_described_can_be_set_again() -> None:
    settings = load(
        "--slab-size=69632",
        "--default-quota=5844MiB",
        "--no-verify",
        "--shutdown-grace",
        "1234.567s",
    )
    flags = [f"--{row.name.replace('_', '-')}={row.value}" for row in settings.describe()]
    assert Settings.load(None, {}, flags) == settings
    assert {row.name: row.value for row in settings.describe()}["default_quota"] == "5844MiB"


@given(
    st.lists(
        st.text(max_size=12)
        | st.sampled_from(["--name", "--pool-size=", "--verify", "--address", "="])
    )
)
def test_no_arguments_raise_anything_but_a_settings_error(argv: list[str]) -> None:
    with contextlib.suppress(SettingsError):
        load(*argv)


@pytest.mark.parametrize(
    ("name", "words"),
    [("curve_key", "tls_cert, tls_key and tls_ca"), ("authorized_keys", "authorized_clients")]
    + [(name, "KVKEEP_CLIENT_TLS_CERT") for name in ("client_key", "server_key")],
)
def test_settings_of_earlier_releases_are_refused_by_name_whatever_their_source(
    name: str, words: str, tmp_path: Path
) -> None:
    config, flag, variable = (
        tmp_path / "kvkeep.toml",
        "--" + name.replace("_", "-"),
        "KVKEEP_" + name.upper(),
    )
    config.write_text(f'{name} = "/keys/x"\n')
    for shown, source in (
        (name, lambda: load(config=config)),
        (variable, lambda: load(env={variable: "/keys/x"})),
        (flag, lambda: load(flag, "/keys/x")),
        (flag, lambda: load(f"{flag}=/keys/x")),
        (name, lambda: load().changed({name: "/keys/x"})),
    ):
        with pytest.raises(SettingsError) as caught:
            source()
        assert caught.value.message.startswith(f"{shown} (")
        assert "does not exist any more" in caught.value.message
        assert words in caught.value.hint and "migration guide" in caught.value.hint


def test_the_certificates_of_clients_are_no_settings_of_the_server() -> None:
    load(env={f"KVKEEP_CLIENT_TLS_{name}": "/keys/x" for name in ("CERT", "KEY", "CA")})


# -- what settings may not say together: above all, an address that other hosts reach without proof

FILES = {
    "--tls-cert": "/keys/server.pem",
    "--tls-key": "/keys/server.key",
    "--tls-ca": "/keys/ca.pem",
}
TLS = [word for pair in FILES.items() for word in pair]
CLIENTS = ["--authorized-clients", "/keys/authorized"]
TOKEN = ["--admin-token", "/keys/admin-token"]
BEYOND = [
    "tcp://0.0.0.0:5555",
    "tcp://*:5555",
    "tcp://[::]:5555",
    "tcp://cache.example:5555",
    "tcp://192.0.2.7:1",
]
BEYOND += ["tcp://localhost.example:5555", "tcp://[::ffff:192.0.2.7]:5555", "tcp://eth0:5555"]


def refusal_with_hint(*argv: str) -> str:
    said = refusal(*argv)
    assert "hint: " in said
    return said


@pytest.mark.parametrize("address", BEYOND)
@pytest.mark.parametrize("other", [[], TOKEN])
def test_engines_are_listened_for_beyond_loopback_with_tls_alone(
    address: str, other: list[str]
) -> None:
    said = refusal_with_hint("--address", address, *other)
    assert f'address = "{address}"' in said
    assert "tls_cert is not set" in said
    assert "kvkeep keygen" in said
    assert load("--address", address, *TLS, *other).address == address


@pytest.mark.parametrize(
    "address", [each.removeprefix("tcp://").replace(":5555", ":80") for each in BEYOND]
)
@pytest.mark.parametrize("other", [[], TLS])
def test_http_is_listened_for_beyond_loopback_with_a_token_alone(
    address: str, other: list[str]
) -> None:
    said = refusal_with_hint("--http-address", address, *other)
    assert f'http_address = "{address}"' in said
    assert "admin_token is not set" in said
    assert "--admin-token" in said
    settings = load("--http-address", address, *TOKEN, *other)
    assert settings.http_address == address and not settings.http_is_local
    assert settings.http_has_tls == bool(other)


def test_a_list_of_certificates_does_instead_of_a_token() -> None:
    assert load("--http-address", "0.0.0.0:1", *TLS, *CLIENTS).admin_token is None
    assert "authorized_clients" in refusal_with_hint("--http-address", "0.0.0.0:1", *TLS)


def test_on_loopback_http_is_plain_also_with_tls_files() -> None:
    for address in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        settings = load("--http-address", address, *TLS, *CLIENTS)
        assert settings.http_is_local and not settings.http_has_tls


@pytest.mark.parametrize("missing", FILES)
def test_tls_needs_all_three_files(missing: str) -> None:
    said = refusal_with_hint(
        *[word for pair in FILES.items() if pair[0] != missing for word in pair]
    )
    assert f"is set and {missing[2:].replace('-', '_')} is not" in said and "kvkeep keygen" in said


def test_a_list_of_clients_needs_tls() -> None:
    assert "authorized_clients is set and tls_cert is not" in refusal_with_hint(*CLIENTS)
    assert load(*TLS, *CLIENTS).authorized_clients == Path("/keys/authorized")


def test_on_loopback_certificates_and_token_may_be_and_need_not() -> None:
    assert load().tls_cert is None
    settings = load(*TLS, *TOKEN)
    assert settings.tls_key == Path("/keys/server.key")
    assert settings.admin_token == Path("/keys/admin-token")
    assert load("--tls-cert", "none", "--tls-key", "NONE", "--tls-ca", "none").tls_ca is None


@given(st.integers(0, 1 << 46))
def test_a_size_is_shown_as_text_that_sets_it_again(size_bytes: int) -> None:
    assert SIZE.parse(SIZE.show(size_bytes)) == size_bytes


@given(st.integers(0, 10**11))
def test_a_duration_is_shown_as_text_that_sets_it_again(duration_us: int) -> None:
    seconds = DURATION.parse(f"{duration_us}us")
    assert DURATION.parse(DURATION.show(seconds)) == seconds


def test_words_stand_for_no_size() -> None:
    assert AUTO_SIZE.parse("Auto") is None
    assert QUOTA.parse("none") is None
    assert QUOTA.show(None) == "none"
    assert QUOTA.show(5844 * MIB) == "5844MiB"
    with pytest.raises(ValueError):
        AUTO_SIZE.parse("none")


@pytest.mark.parametrize(
    ("text", "on"), [("true", True), ("YES", True), ("1", True), ("off", False), ("0", False)]
)
def test_switches(text: str, on: bool) -> None:
    assert SWITCH.parse(text) is on
    assert SWITCH.parse(SWITCH.show(on)) is on


def test_a_home_is_expanded_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert DIRECTORY.parse("~/state") == Path("/somewhere/state")
    with pytest.raises(ValueError):
        DIRECTORY.parse("~nobody-of-this-name/state")


@pytest.mark.parametrize(("text", "users"), [("none", ()), ("7", (7,)), ("root, 7", (0, 7))])
def test_users(text: str, users: tuple[int, ...]) -> None:
    assert USERS.parse(text) == users
    assert USERS.parse(USERS.show(users)) == users
