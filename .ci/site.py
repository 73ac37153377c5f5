"""Builds the documentation as a web site into build/site/<version>/, and fails for a broken link.

    python .ci/site.py

The site has the pages of the repository under the same paths, so links work in both. Versions that
were built before stay, and build/site/index.html leads to the newest one. The pages need no network:
fonts and scripts come with them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
_SECTIONS = (
    ("Use it", ("docs/getting-started.md", "docs/why.md", "docs/guides/*.md", "docs/engine.md")),
    ("Look it up", ("docs/reference/*.md", "docs/BENCHMARKS.md", "docs/RELIABILITY.md")),
    ("Understand it", ("docs/ARCHITECTURE.md", "docs/concepts/*.md", "docs/LOG.md")),
    ("Decisions", ("docs/decisions/README.md", "docs/decisions/[0-9]*.md")),
    ("Change it", ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
)
_INDEX = """<!doctype html>
<meta charset="utf-8">
<title>kvkeep</title>
<meta http-equiv="refresh" content="0; url=./{newest}/">
<h1>kvkeep</h1>
<ul>{items}</ul>
"""


def main() -> int:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pages = copy_pages(folder / "pages")
        config = folder / "mkdocs.yml"
        config.write_text(json.dumps(configuration(pages, version)))  # JSON is YAML
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        done = subprocess.run(
            [*command, "--config-file", str(config), "--site-dir", str(SITE / version)],
            check=False,
        )
    if done.returncode:
        return done.returncode
    lead_to_newest()
    print(f"site: {len(pages)} pages in {(SITE / version).relative_to(ROOT)}")
    return 0


def copy_pages(folder: Path) -> list[str]:
    """All pages, and the pictures and manifests that they show or name."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in [*pages, *(ROOT / "docs").rglob("*.svg"), *(ROOT / "docs").rglob("*.png")]:
        copy(path, folder)
    for path in [*(ROOT / "deploy").rglob("*"), ROOT / "LICENSE"]:
        if path.is_file():
            copy(path, folder)
    return sorted(path.relative_to(ROOT).as_posix() for path in pages)


def copy(path: Path, folder: Path) -> None:
    target = folder / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target)


def configuration(pages: list[str], version: str) -> dict[str, object]:
    nav: list[dict[str, object]] = [{"kvkeep": "README.md"}]
    for title, patterns in _SECTIONS:
        found = [page for each in patterns for page in sorted(ROOT.glob(each))]
        nav.append({title: [{title_of(page): page.relative_to(ROOT).as_posix()} for page in found]})
    return {
        "site_name": f"kvkeep {version}",
        "docs_dir": "pages",
        "use_directory_urls": False,  # works from a folder, too
        "theme": {"name": "mkdocs", "highlightjs": False, "color_mode": "auto"},
        "markdown_extensions": ["tables", "fenced_code", "toc"],
        "nav": nav,
        "validation": {"links": {"anchors": "warn", "absolute_links": "warn"}},
    }


def title_of(page: Path) -> str:
    match = re.search(r"^# (.*)$", page.read_text(), flags=re.MULTILINE)
    return re.sub(r"[`*]", "", match[1]) if match else page.stem


def lead_to_newest() -> None:
    versions = sorted(
        (path.name for path in SITE.iterdir() if path.is_dir()),
        key=lambda name: [int(part) for part in re.findall(r"\d+", name)],
        reverse=True,
    )
    items = "".join(f'<li><a href="./{each}/">{each}</a></li>' for each in versions)
    (SITE / "index.html").write_text(_INDEX.format(newest=versions[0], items=items))


if __name__ == "__main__":
    sys.exit(main())
