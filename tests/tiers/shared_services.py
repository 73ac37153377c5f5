"""Services that hold shared tiers, each as its users run it: started, stopped and damaged by tests.

`service("mooncake", directory)` has the tier's address. Where a program, a package or a library is
missing, the test is skipped with its name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from services import Service, free_port, program

from kvkeep.errors import TierError
from kvkeep.testing.clock import eventually
from kvkeep.tiers.opening import check_installed
from kvkeep.tiers.tier_address import parse_tier
from kvkeep.units import MIB

KINDS = ("file", "valkey", "s3", "mooncake")
S3_CREDENTIALS = {
    "KVKEEP_S3_ACCESS_KEY_ID": "an-id",
    "KVKEEP_S3_SECRET_ACCESS_KEY": "a-secret-word",
}


class SharedService:
    """A service, or a directory. What it holds is gone when it is killed; it starts again at the
    same ports."""

    can_pause = True

    def __init__(
        self, address: str, directory: Path, environment: dict[str, str] | None = None
    ) -> None:
        try:
            check_installed(parse_tier(address))
        except TierError as error:
            pytest.skip(f"NOT TESTED: {error}")
        self.address = address
        self.environment = environment or {}  # that a server needs to use it
        self.directory = directory
        self._running: list[Service] = []
        self._starts = 0

    def start(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        for each in self._running:
            each.kill()
        self._running = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        with ExitStack() as pauses:
            for each in self._running:
                pauses.enter_context(each.paused())
            yield

    def objects(self) -> dict[str, bytes]:
        """Blocks as they are stored, by name: what another program sees."""
        raise NotImplementedError

    def replace(self, objects: Mapping[str, bytes]) -> None:
        """Stores these in place of what has their names."""
        raise NotImplementedError

    def tier_name(self, name: str) -> str:
        """What the tier calls this object."""
        return name

    def lose_some(self) -> None:
        """Loses some blocks, as this kind of service does by itself."""
        raise NotImplementedError

    def full(self) -> AbstractContextManager[None]:
        """Inside: the service has no room for further blocks."""
        raise NotImplementedError

    def _run(self, command: Sequence[str | Path], port: int, within_s: float = 30.0) -> Service:
        self._starts += 1
        directory = self.directory / f"process{self._starts}"
        self._running.append(Service([str(word) for word in command], directory, port))
        return self._running[-1]


def _mount(at: Path, *arguments: str) -> None:
    done = subprocess.run(["mount", *arguments, str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"NOT TESTED: this host mounts nothing: {done.stderr.strip()}")


def _is_block(name: str) -> bool:
    """Whether an object's name is that of a block; control data and counts of sweeps have others."""
    return "v1/" in name and "/control/" not in name


class SharedDirectory(SharedService):
    can_pause = False

    def __init__(self, directory: Path) -> None:
        super().__init__(f"file://{directory / 'shared'}?size=64MiB", directory)

    def start(self) -> None:
        if (self.directory / "shared").is_file():
            (self.directory / "shared").unlink()

    def kill(self) -> None:
        """As if the file server had lost it, and the mount were broken."""
        shared = self.directory / "shared"
        while not shared.is_file():  # hosts that write may make directories meanwhile
            shutil.rmtree(shared, ignore_errors=True)
            with suppress(OSError):
                shared.write_bytes(b"")

    def objects(self) -> dict[str, bytes]:
        paths = [path for path in (self.directory / "shared" / "v1").rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in paths if _is_block(str(path))}

    def replace(self, objects: Mapping[str, bytes]) -> None:
        for name, data in objects.items():
            Path(name).write_bytes(data)

    def tier_name(self, name: str) -> str:
        place, _, key = str(Path(name).relative_to(self.directory / "shared")).rpartition("/")
        return f"{place.rpartition('/')[0]}/{key}"  # without the first two digits of the key

    def lose_some(self) -> None:
        """As to an operator's cron job that removes files: a directory does not evict."""
        for name in list(self.objects())[::2]:
            Path(name).unlink()

    @contextmanager
    def full(self) -> Iterator[None]:
        """The same files on a file system that has no room left."""
        shared, small = self.directory / "shared", self.directory / "small"
        small.mkdir(exist_ok=True)
        _mount(small, "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs")
        try:
            with suppress(shutil.Error):  # what servers have just replaced
                shutil.copytree(shared, small, dirs_exist_ok=True)
            with suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(64 << 10)):
                    pass
            _mount(shared, "--bind", str(small))
            try:
                yield
            finally:
                subprocess.run(["umount", "--lazy", str(shared)], check=True)
        finally:
            subprocess.run(["umount", "--lazy", str(small)], check=True)


class ValkeyServer(SharedService):
    """With `keys`, a directory of `kvkeep keygen`, it speaks TLS only."""

    def __init__(self, directory: Path, keys: Path | None = None) -> None:
        self._program = program("valkey-server", "redis-server")
        self._port, self._keys = free_port(), keys
        address = f"{'rediss' if keys else 'valkey'}://127.0.0.1:{self._port}/0?timeout=1s"
        super().__init__(f"{address}&ca={keys / 'ca.pem'}" if keys else address, directory)

    def start(self) -> None:
        command = [self._program, "--bind", "127.0.0.1", "--save", ""]
        if self._keys is None:
            flags = {"--port": str(self._port)}
        else:
            flags = {
                "--port": "0",
                "--tls-port": str(self._port),
                "--tls-cert-file": str(self._keys / "server.pem"),
                "--tls-key-file": str(self._keys / "server.key"),
                "--tls-ca-cert-file": str(self._keys / "ca.pem"),
                "--tls-auth-clients": "no",
            }
        self._run([*command, *(word for pair in flags.items() for word in pair)], self._port)

    def objects(self) -> dict[str, bytes]:
        with closing(self._client()) as client:
            names = [name.decode() for name in client.keys("*")]
            return {name: client.get(name) for name in names if _is_block(name)}

    def replace(self, objects: Mapping[str, bytes]) -> None:
        with closing(self._client()) as client:
            for name, data in objects.items():
                client.set(name, data)

    def lose_some(self) -> None:
        before = self.objects()
        with closing(self._client()) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used - sum(map(len, before.values())) // 2)
            assert eventually(lambda: len(self.objects()) < len(before))
            client.config_set("maxmemory", 0)

    @contextmanager
    def full(self) -> Iterator[None]:
        with closing(self._client()) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            try:
                yield
            finally:
                client.config_set("maxmemory", 0)

    def _client(self) -> Any:
        return importlib.import_module("valkey").Valkey(port=self._port)


class S3Server(SharedService):
    """With `keys`, a directory of `kvkeep keygen`, it speaks TLS only."""

    def __init__(self, directory: Path, keys: Path | None = None) -> None:
        self._program = program("moto_server")
        self._port, self._keys = free_port(), keys
        self._endpoint = f"{'https' if keys else 'http'}://127.0.0.1:{self._port}"
        address = f"s3://blocks/kv?endpoint={self._endpoint}&region=us-east-1"
        address = f"{address}&ca={keys / 'ca.pem'}" if keys else address
        super().__init__(address, directory, S3_CREDENTIALS)

    def start(self) -> None:
        command = [self._program, "-H", "127.0.0.1", "-p", str(self._port)]
        if self._keys is not None:
            command += ["-c", self._keys / "server.pem", "-k", self._keys / "server.key"]
        self._run(command, self._port)
        self.bucket()

    def bucket(self) -> Any:
        """The bucket, as another program sees it. Made if it is not there."""
        client = importlib.import_module("boto3").resource(
            "s3",
            endpoint_url=self._endpoint,
            verify=str(self._keys / "ca.pem") if self._keys else None,
            region_name="us-east-1",
            aws_access_key_id="an-id",
            aws_secret_access_key="a-secret-word",
        )
        return client.create_bucket(Bucket="blocks")

    def objects(self) -> dict[str, bytes]:
        every = [each for each in self.bucket().objects.all() if _is_block(each.key)]
        return {each.key: each.get()["Body"].read() for each in every}

    def replace(self, objects: Mapping[str, bytes]) -> None:
        bucket = self.bucket()
        for name, data in objects.items():
            bucket.put_object(Key=name, Body=data)

    def tier_name(self, name: str) -> str:
        return name.removeprefix("kv/")

    def lose_some(self) -> None:
        """As by a lifecycle rule, which moto knows and does not carry out."""
        bucket = self.bucket()
        for name in list(self.objects())[::2]:
            bucket.Object(name).delete()


class MooncakeCluster(SharedService):
    """A master with its metadata server, and one store node."""

    def __init__(self, directory: Path, node_size: str = "64MB") -> None:
        self.node_size = node_size
        self.rpc, self.metadata, self.metrics = free_port(), free_port(), free_port()
        options = {
            "metadata": f"http://127.0.0.1:{self.metadata}/metadata",
            "metrics": str(self.metrics),
            "timeout": "2s",
        }
        super().__init__(f"mooncake://127.0.0.1:{self.rpc}?{urlencode(options)}", directory)
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        self._programs = Path(spec.origin).parent

    def start(self) -> None:
        self.start_master()
        self.start_node()

    def start_master(self) -> None:
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.rpc,
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": self.metadata,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics,
        }
        self.master = self._run(self._command("mooncake_master", flags), self.rpc)

    def start_node(self) -> None:
        port = free_port()
        flags = {
            "host": "127.0.0.1",
            "port": port,
            "global_segment_size": self.node_size,
            "master_server_address": f"127.0.0.1:{self.rpc}",
            "metadata_server": f"http://127.0.0.1:{self.metadata}/metadata",
        }
        self.node = self._run(self._command("mooncake_client", flags), port)

    def objects(self) -> dict[str, bytes]:
        names = [name for name in self.names() if _is_block(name)]
        with closing(Neighbour(self)) as neighbour:
            return {name: neighbour.client.get(name) for name in names}

    def replace(self, objects: Mapping[str, bytes]) -> None:
        with closing(Neighbour(self)) as neighbour:
            for name, data in objects.items():
                neighbour.replace(name, data)

    def lose_some(self) -> None:
        before, number = {name for name in self.names() if _is_block(name)}, 0
        with closing(Neighbour(self)) as neighbour:

            def is_evicted() -> bool:
                nonlocal number
                number += 1
                neighbour.client.put(f"filler/{number}", bytes(MIB))
                return not before <= set(self.names())

            assert eventually(is_evicted)
            neighbour.client.remove_by_regex("^filler/", True)

    @contextmanager
    def full(self) -> Iterator[None]:
        with closing(Neighbour(self)) as neighbour:
            neighbour.fill()
            try:
                yield
            finally:
                neighbour.client.remove_by_regex("^filler/", True)

    def names(self) -> list[str]:
        """Of all objects."""
        return self.ask("/get_all_keys").split()

    def segment(self) -> dict[str, Any]:
        """What hosts learn of the node: where its memory can be read and written."""
        (name,) = self.ask("/get_all_segments").split()
        return dict(json.loads(self._metadata(f"mooncake/ram/{name}")))

    def set_segment(self, segment: dict[str, Any]) -> None:
        self._metadata(f"mooncake/ram/{segment['name']}", json.dumps(segment).encode())

    def ask(self, path: str) -> str:
        """What the master says at its port for metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}{path}", timeout=10) as reply:
            return str(reply.read().decode())

    def _metadata(self, key: str, value: bytes | None = None) -> str:
        url = f"http://127.0.0.1:{self.metadata}/metadata?key={quote(key, safe='')}"
        asked = urllib.request.Request(url, value, method="GET" if value is None else "PUT")
        with urllib.request.urlopen(asked, timeout=10) as reply:
            return str(reply.read().decode())

    def _command(self, name: str, flags: dict[str, Any]) -> list[str | Path]:
        return [self._programs / name, *(f"--{flag}={value}" for flag, value in flags.items())]


class Neighbour:
    """Another program that uses the cluster."""

    def __init__(self, cluster: MooncakeCluster) -> None:
        self.library = importlib.import_module("mooncake.store")
        self.client = self.library.MooncakeDistributedStore()
        settings = {
            "local_hostname": "127.0.0.1",
            "metadata_server": f"http://127.0.0.1:{cluster.metadata}/metadata",
            "master_server_addr": f"127.0.0.1:{cluster.rpc}",
            "global_segment_size": "0",
            "local_buffer_size": str(16 * MIB),
        }
        assert self.client.setup(settings) == 0

    def close(self) -> None:
        self.client.close()

    def fill(self) -> None:
        """Takes all room with objects that the master does not evict."""
        pinned = self.library.ReplicateConfig()
        pinned.with_hard_pin = True
        number = 0
        for nbytes in (4 * MIB, 256 << 10, 16 << 10, 1 << 10):
            while self.client.put(f"filler/{number}", bytes(nbytes), pinned) == 0:
                number += 1

    def replace(self, name: str, data: bytes) -> None:
        assert self.client.remove(name, True) == 0
        assert self.client.put(name, data) == 0


_MAKERS: dict[str, type[SharedService] | Any] = {
    "file": SharedDirectory,
    "valkey": ValkeyServer,
    "s3": S3Server,
    "mooncake": MooncakeCluster,
}


@contextmanager
def service(kind: str, directory: Path, **options: Any) -> Iterator[Any]:
    """A running service of this kind."""
    made = _MAKERS[kind](directory, **options)
    try:
        made.start()
        yield made
    finally:
        if kind != "file":
            made.kill()
