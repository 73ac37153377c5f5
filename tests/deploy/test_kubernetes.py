"""The manifests: valid for Kubernetes, and true of the server that they start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvkeep.server.settings import TABLE, Settings
from kvkeep.tiers.service_address import CREDENTIALS
from kvkeep.tiers.tier_address import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"


def documents_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def containers_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"].get("template", document).get("spec", {})
    return list(spec.get("containers", []))


def problems_of(document: dict[str, Any]) -> list[str]:
    """What is wrong by the schemas of the newest release that the validator knows."""
    validator = pytest.importorskip("kubernetes_validate")
    try:
        validator.validate(document, validator.latest_version(), strict=True)
    except (validator.ValidationError, validator.SchemaNotFoundError) as error:
        return [str(error)]
    return []


def without_marks(path: Path) -> str:
    """The manifest with all that operators may switch on."""
    return re.sub(r"^( *)# (?=- | {2,})", r"\1", path.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("text_of", [Path.read_text, without_marks])
def test_a_manifest_matches_the_schemas(path: Path, text_of: Callable[[Path], str]) -> None:
    documents = list(yaml.safe_load_all(text_of(path)))
    assert documents and [problems_of(each) for each in documents] == [[]] * len(documents)


def test_a_manifest_with_a_mistake_is_found() -> None:
    [document] = documents_of(MANIFESTS[0])
    document["spec"]["replikas"] = 2
    assert "replikas" in "".join(problems_of(document))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_server_takes_its_arguments(path: Path) -> None:
    """Commented lines too: operators remove the marks, of one shared tier."""
    for document in yaml.safe_load_all(without_marks(path)):
        for container in containers_of(document):
            words = container.get("args", [])
            if words[:1] == ["serve"]:
                shared = [word for word in words if re.match("--tier=(?!disk)", word)]
                for tier in shared or [""]:
                    chosen = [word for word in words[1:] if word not in shared or word == tier]
                    settings = Settings.load(None, {}, chosen)
                    assert settings.pool_size and f"--shm-dir={settings.shm_dir}" in words


def test_a_server_may_use_each_kind_of_shared_tier() -> None:
    """The arguments, the credentials, and the mounts of what they name."""
    [document] = yaml.safe_load_all(
        without_marks(GUIDE.parents[2] / "deploy/kubernetes/server.yaml")
    )
    [server] = containers_of(document)
    tiers = {re.split("[=:]", word)[1] for word in server["args"] if word.startswith("--tier=")}
    assert tiers == {"disk", "file", "mooncake", "s3", "valkey"}
    given = {each["name"] for each in server["env"]} - {"PYTHONUNBUFFERED"}
    assert given < CREDENTIALS and len(given) == 4
    mounted = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert mounted.keys() == {
        volume["name"] for volume in document["spec"]["template"]["spec"]["volumes"]
    }
    files = [each["value"] for each in server["env"] if each["name"].endswith("_FILE")]
    [keys] = [word.partition("=")[2] for word in server["args"] if word.startswith("--tier-keys=")]
    assert {str(Path(file).parent) for file in [*files, keys]} <= set(mounted.values())


def test_the_image_has_what_each_tier_needs() -> None:
    text = (GUIDE.parents[2] / "deploy/docker/Dockerfile").read_text()
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    [libraries] = re.findall(r'^ARG LIBRARIES="(.*)"$', text, re.MULTILINE)
    schemes = SCHEMES.values()
    needed = {scheme.extra for scheme in schemes} - {""} | {"tls", "encryption"}
    assert set(extras.split(",")) == needed
    assert libraries.split() == [name for scheme in schemes for name in scheme.libraries]


def test_engines_mount_what_the_server_shares_at_the_same_paths() -> None:
    by_name = {
        container["name"]: {
            mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]
        }
        for path in (MANIFESTS[0].with_name(name) for name in ("server.yaml", "engines.yaml"))
        for document in documents_of(path)
        for container in containers_of(document)
    }
    assert by_name["vllm"].items() >= {"socket": "/run/kvkeep", "pool": "/pool"}.items()
    for volume in ("socket", "pool"):
        assert by_name["kvkeep"][volume] == by_name["vllm"][volume]


def test_the_guide_names_every_manifest_and_known_settings() -> None:
    text = GUIDE.read_text()
    assert [path.name for path in MANIFESTS if path.name not in text] == []
    flags = re.findall(r"--([a-z-]+)=[^\s,\]]+", " ".join(re.findall(r"`[^`]+`", text)))
    known = {*TABLE, "http", "token_file"}
    assert {flag.replace("-", "_") for flag in flags} <= known
    documents = [
        each
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        for each in yaml.safe_load_all(block)
    ]
    assert [each["kind"] for each in documents] == ["Certificate", "Certificate"]
