"""Files of a distribution as it is installed here, and their hashes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from rlhf_host import UserError
from rlhf_host.installed import PluginInfo

METADATA = ("METADATA", "entry_points.txt")
"""Files of its metadata that count; others say how and when it was installed."""


def hashes(info: PluginInfo) -> dict[str, str]:
    """Name → sha256 of every file of the plugin's distribution, sorted; of a ``FILE.py:NAME`` the file alone.

    Files are those that the distribution's record lists inside of ``site-packages``, and all in the packages of its entry points,
    where an editable install has them too. Compiled ``.pyc`` files in ``__pycache__`` do not count.

    Raises:
        UserError: a file cannot be read.
    """
    if info.distribution.endswith(".py"):
        return {Path(info.distribution).name: _digest(Path(info.distribution))}
    distribution = importlib.metadata.distribution(info.distribution)
    found = dict(_of_record(distribution))
    for point in distribution.entry_points:
        found.update(_of_package(point.module.partition(".")[0]))
    named = {name: _digest(path) for name, path in found.items()}
    for name in METADATA:
        if (text := distribution.read_text(name)) is not None:
            named[f".dist-info/{name}"] = hashlib.sha256(text.encode()).hexdigest()
    return dict(sorted(named.items()))


def digest(files: Mapping[str, str]) -> str:
    """The hash over all: sha256 of what ``sha256sum`` prints for them in the order of their names."""
    lines = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def editable(info: PluginInfo) -> bool:
    """Returns True if the distribution is a folder that somebody works in."""
    if info.distribution.endswith(".py"):
        return False
    origin = importlib.metadata.distribution(info.distribution).read_text("direct_url.json")
    return bool(origin and json.loads(origin).get("dir_info", {}).get("editable"))


def _of_record(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, Path]]:
    origin = distribution.read_text("direct_url.json")
    if origin and json.loads(origin).get("dir_info", {}).get("editable"):
        return  # it lists the way to the folder, which is another one on each machine
    for file in distribution.files or ():
        first = file.parts[0]
        if first != ".." and not first.endswith((".dist-info", ".egg-info")) and "__pycache__" not in file.parts:
            yield file.as_posix(), Path(str(file.locate()))


def _of_package(name: str) -> Iterator[tuple[str, Path]]:
    """Files of a top-level package or module; none of a namespace, which others share."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return
    if spec.submodule_search_locations is None:
        yield Path(spec.origin).name, Path(spec.origin)
        return
    root = Path(spec.origin).parent
    for path in root.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"{name}/{path.relative_to(root).as_posix()}", path


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
