"""A hook of hatchling (``pyproject.toml``): the README as a package index shows it, where the files beside it are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/rlhf-host/rlhf-host"
RAW = "https://raw.githubusercontent.com/rlhf-host/rlhf-host"
LINK = re.compile(r"""(\]\(|\b(?:src|href|srcset)=")(?![a-z][a-z+.-]*:|#|/)([^)\s"]+)""")
PICTURE = re.compile(r"\.(svg|png|gif|jpe?g|webp)$")


class IndexReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_addresses(text, tree(metadata["version"]))}


def tree(version: str) -> str:
    """The tag of a version; what is between versions shows main."""
    return "main" if "+" in version or "dev" in version else f"v{version}"


def with_addresses(text: str, tree: str) -> str:
    """Makes links and pictures beside the README addresses in the repository."""

    def address(found: re.Match[str]) -> str:
        path = found[2].removeprefix("./")
        kind = f"{RAW}/{tree}" if PICTURE.search(path) else f"{REPOSITORY}/blob/{tree}"
        return f"{found[1]}{kind}/{path}"

    return LINK.sub(address, text)
