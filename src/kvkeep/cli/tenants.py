"""`kvkeep tenants ...`: usage, quotas, limits, clearing.

A tenant is named by its id. A salt is read from stdin, or typed without echo: the id is made here,
so the salt reaches neither the server nor a log, the shell's history or the list of processes."""

import getpass
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kvkeep.cli.output import APP, Json, counted, note, show_json, show_table
from kvkeep.cli.remote import Server, asks_server
from kvkeep.errors import RequestError, SettingsError
from kvkeep.kv.identity import is_tenant, tenant_of
from kvkeep.units import format_size, parse_size

MAX_SALT_BYTES = 64 * 1024
_CLEAR_WITHIN_S = 600.0
_NO_SIZE = ("none", "null", "default", "unset", "unlimited", "max", "auto")

app = typer.Typer(
    no_args_is_help=True,
    help="Show tenants, set their quotas and limits, clear their blocks.",
    **APP,
)

SaltStdin = Annotated[
    bool,
    typer.Option(
        "--salt-stdin",
        help="Name the tenant by its salt, read from stdin or without echo from a terminal.",
    ),
]
Tenant = Annotated[
    str | None, typer.Argument(help="A tenant id: `default`, or `t-` and 32 hex digits.")
]


@app.command("list")
@asks_server
def list_tenants(
    server: Server,
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Show at most this number.")
    ] = 1000,
) -> None:
    """Show tenants with their usage, quota and limit, largest first."""
    said = server.ask(f"/v1/tenants?limit={limit}")
    server.show(said, lambda: _show(said))


def _show(said: dict[str, Any]) -> None:
    show_table(*tenant_rows(said["tenants"]))
    if said["total"] > len(said["tenants"]):
        note(f"{said['total'] - len(said['tenants'])} more: use a larger --limit")


class QuotaCommand(TyperCommand):
    """Shows in its usage that the first argument may be left out."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "[TENANT]", "SIZE"]


def _add_set_and_unset(what: str, set_help: str, size_help: str, zero: str) -> None:
    """Adds `set-quota` and `unset-quota`, or those of the limit. `zero` says what a size of 0
    means. Typer evaluates annotations, so this file must not import `annotations` from __future__:
    as text, `size_help` would not be known to it."""

    @asks_server
    def set_size(
        server: Server,
        tenant: Tenant = None,
        size: Annotated[str | None, typer.Argument(help=size_help, show_default=False)] = None,
        salt_stdin: SaltStdin = False,
    ) -> None:
        name, nbytes = _tenant_and_size(tenant, size, salt_stdin, what, zero)
        _change(server, name, what, nbytes)

    @asks_server
    def unset_size(server: Server, tenant: Tenant = None, salt_stdin: SaltStdin = False) -> None:
        _change(server, named(tenant, salt_stdin), what, None)

    # Unknown options are passed on, or a size such as -1 would be one.
    context = {"ignore_unknown_options": True}
    app.command(f"set-{what}", cls=QuotaCommand, context_settings=context, help=set_help)(set_size)
    app.command(f"unset-{what}", help=f"Give a tenant the default {what} again.")(unset_size)


_add_set_and_unset(
    "quota",
    "Promise a tenant memory. Kept over restarts.",
    "A size such as 8GiB. 0 promises nothing: the tenant may only borrow.",
    "0 promises nothing",
)
_add_set_and_unset(
    "limit",
    "Limit the memory that a tenant may use. Kept over restarts.",
    "A size such as 8GiB. 0: nothing of the tenant is stored.",
    "0 means that nothing is stored",
)


def _change(server: Server, tenant: str, what: str, nbytes: int | None) -> None:
    """Sets a tenant's quota or limit, or with None the default again. A lower limit evicts."""
    body = {f"{what}_bytes": nbytes}
    within_s = _CLEAR_WITHIN_S if what == "limit" else None
    server.ask(f"/v1/tenants/{tenant}/{what}", "PUT", body, within_s)
    has = f"the default {what}" if nbytes is None else f"a {what} of {format_size(nbytes)}"
    server.show({"tenant": tenant, **body}, f"{tenant} has {has}")


def _tenant_and_size(
    tenant: str | None, size: str | None, salt_stdin: bool, what: str, zero: str
) -> tuple[str, int]:
    """The tenant and the number of bytes. With --salt-stdin the first word is the size."""
    words = [word for word in (tenant, size) if word is not None]
    for word in words:
        if re.match(r"-[^0-9.]", word):
            raise SettingsError(
                f"no such option: {word}", f"`kvkeep tenants set-{what} --help` lists them"
            )
    if len(words) != (1 if salt_stdin else 2):
        raise SettingsError("expected TENANT and SIZE, or --salt-stdin and SIZE")
    text = words[-1]
    if text.startswith("-"):
        raise SettingsError(f"the {what}: expected a size, which is never negative", zero)
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        hint = f"to give a tenant the default {what} again: kvkeep tenants unset-{what}"
        raise SettingsError(
            f"the {what}: expected {error}", hint if text.lower() in _NO_SIZE else ""
        ) from None
    return named(None if salt_stdin else words[0], salt_stdin), nbytes


@app.command("clear")
@asks_server
def clear(server: Server, tenant: Tenant = None, salt_stdin: SaltStdin = False) -> None:
    """Take all blocks of a tenant out of use."""
    name = named(tenant, salt_stdin)
    said = server.ask(f"/v1/tenants/{name}/blocks", "DELETE", None, _CLEAR_WITHIN_S)
    server.show({"tenant": name, **said}, _out_of_use(said["blocks"], f" of {name}"))
    _warn_of_unreached(said["unreached"])


@app.command("clear-all")
@asks_server
def clear_all(
    server: Server, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Take all blocks of all tenants out of use."""
    asks = sys.stdin.isatty() and not yes
    if not yes and not (asks and typer.confirm("Take every block out of use?", err=True)):
        raise SettingsError("nothing was cleared", "use --yes to clear every block of every tenant")
    said = server.ask("/v1/blocks?confirm=everything", "DELETE", None, _CLEAR_WITHIN_S)
    server.show(said, _out_of_use(said["blocks"]))
    _warn_of_unreached(said["unreached"])


@app.command("id")
def show_id(json: Json = False) -> None:
    """Print the tenant id of a salt that is read from stdin (or typed without echo)."""
    tenant = tenant_of(read_salt())
    if json:
        show_json({"tenant": tenant})
    else:
        print(tenant)


def named(tenant: str | None, salt_stdin: bool) -> str:
    """The tenant's id. An invalid id is not quoted in the error: it may be a salt."""
    if (tenant is not None) == salt_stdin:
        raise SettingsError("expected either TENANT or --salt-stdin")
    if tenant is None:
        return tenant_of(read_salt())
    if not is_tenant(tenant):
        raise RequestError(
            "bad_tenant",
            "a tenant is named `default` or `t-` and 32 hex digits",
            field="tenant",
            hint="if that was a salt, give it on stdin with --salt-stdin: other users can see the "
            "command line",
        )
    return tenant


def read_salt() -> str:
    """From stdin, without the line end; from a terminal without echo."""
    if sys.stdin.isatty():
        salt = getpass.getpass("salt: ")
    else:
        data = sys.stdin.buffer.read(MAX_SALT_BYTES + 1)
        if len(data) > MAX_SALT_BYTES:
            raise SettingsError(f"a salt has at most {MAX_SALT_BYTES} bytes")
        try:
            salt = data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise SettingsError("the salt on stdin is not UTF-8") from None
    if not salt:
        raise SettingsError(
            "stdin gave no salt", "requests without a salt belong to the tenant `default`"
        )
    return salt


FIGURE_COLUMNS = ("tokens loaded", "computed", "seconds saved")


def figure_cells(figures: dict[str, Any]) -> tuple[Any, ...]:
    """What the cache gave a tenant or a session, for the end of its row."""
    return figures["tokens_loaded"], figures["tokens_computed"], figures["saved_s"]


def tenant_rows(tenants: Sequence[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    """Columns and rows of a table of tenants."""
    columns = ["tenant", "blocks", "usage", "quota", "limit", "own"]
    columns += ["lookups", "blocks hit", "missed", *FIGURE_COLUMNS]
    return columns, [
        (
            t["tenant"],
            t["blocks"],
            format_size(t["usage_bytes"]),
            _quota_shown(t),
            None if t["limit_bytes"] is None else format_size(t["limit_bytes"]),
            ", ".join(what for what in ("quota", "limit") if t[f"own_{what}"]),
            *(t[name] for name in ("lookups", "hit_blocks", "missed_blocks")),
            *figure_cells(t["figures"]),
        )
        for t in tenants
    ]


def _quota_shown(tenant: dict[str, Any]) -> str | None:
    """The quota in force, and the one that was set where that is more."""
    in_force, was_set = tenant["quota_bytes"], tenant["set_quota_bytes"]
    if in_force is None:
        return None
    is_lower = was_set not in (None, in_force)
    return format_size(in_force) + (f" (set: {format_size(was_set)})" if is_lower else "")


def _out_of_use(blocks: int, whose: str = "") -> str:
    return f"{counted(blocks, 'block')}{whose} {'is' if blocks == 1 else 'are'} out of use"


def _warn_of_unreached(hosts: list[str]) -> None:
    if hosts:
        named = ", ".join(hosts)
        print(
            f"warning: not confirmed by {named}: they clear their memory and disks when they next "
            "read the shared tier, and use nothing of it before",
            file=sys.stderr,
        )
