"""Saved weights on disk: named by ``tinker://`` paths, written whole or not at all, listed, and removed when their time is over."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_server import ApiError

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Part of a path → the client's word for what it names."""
RUN = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}\Z")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
PREFIX = "tinker://"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A training run: what a model was made as."""

    run_id: str
    base_model: str
    lora_rank: int
    train_mlp: bool = True
    train_attn: bool = True
    user_metadata: dict[str, str] = field(default_factory=dict)
    created: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """Saved weights of a run."""

    run: RunRecord
    kind: str
    name: str
    directory: Path
    time: float
    expires: float | None
    size: int
    user_metadata: dict[str, str]

    @property
    def path(self) -> str:
        return f"{PREFIX}{self.run.run_id}/{self.kind}/{self.name}"

    def row(self) -> dict[str, Any]:
        """Returns it as the client lists it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": stamp(self.time),
            "tinker_path": self.path,
            "size_bytes": self.size,
            "public": False,
            "user_metadata": self.user_metadata or None,
            "expires_at": None if self.expires is None else stamp(self.expires),
        }


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class States:
    """The folder of saved weights. One server has it: see ``serve``."""

    def __init__(self, root: Path):
        self.root = root

    def clean(self) -> None:
        """Removes what a server that was killed left half written, and what has expired."""
        for run in self._directories():
            for kind in KINDS:
                for left in (run / kind).glob(".*") if (run / kind).is_dir() else ():
                    shutil.rmtree(left, ignore_errors=True)
        for saved in list(self.listed(expired=True)):
            if saved.expires is not None and saved.expires < time.time():
                self._remove(saved)

    def add_run(self, run: RunRecord) -> None:
        directory = self._of(run.run_id)
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / "run.json", asdict(run))

    def runs(self) -> list[RunRecord]:
        """Returns all runs, the newest first."""
        found = [run for directory in self._directories() if (run := _read_run(directory)) is not None]
        return sorted(found, key=lambda run: run.created, reverse=True)

    def run(self, run_id: str) -> RunRecord:
        if RUN.match(run_id) and (found := _read_run(self._of(run_id))) is not None:
            return found
        raise ApiError(404, f"there is no training run {run_id[:80]!r} here", "not_found")

    def listed(self, run_id: str | None = None, *, expired: bool = False) -> Iterator[Saved]:
        """Yields saved weights, of one run or all."""
        for run in self.runs() if run_id is None else [self.run(run_id)]:
            for kind in KINDS:
                folder = self._of(run.run_id) / kind
                for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
                    saved = None if directory.name.startswith(".") else _read_saved(run, kind, directory)
                    if saved is not None and (expired or saved.expires is None or saved.expires >= time.time()):
                        yield saved

    def find(self, path: Any, kinds: tuple[str, ...] = tuple(KINDS)) -> Saved:
        """Returns the weights that a ``tinker://`` path names. Raises ``ApiError`` for any other path."""
        if not isinstance(path, str) or not path.startswith(PREFIX) or len(parts := path[len(PREFIX) :].split("/")) != 3:
            raise ApiError(
                400, f"{str(path)[:120]!r} is no path of saved weights: tinker://RUN/weights/NAME", "invalid_value", "path"
            )
        run_id, kind, name = parts
        if kind not in kinds or not NAME.match(name):
            which = " or ".join(f"tinker://RUN/{each}/NAME" for each in kinds)
            raise ApiError(400, f"{path[:120]!r} does not name what is asked for here: {which}", "invalid_value", "path")
        run = _read_run(self._of(run_id)) if RUN.match(run_id) else None
        saved = None if run is None else _read_saved(run, kind, self._of(run_id) / kind / name)
        if saved is None or (saved.expires is not None and saved.expires < time.time()):
            why = "it has expired" if saved is not None else "this server's folder of states does not have it"
            raise ApiError(404, f"there is no {path[:200]}: {why}", "not_found", "path")
        return saved

    def save(
        self,
        run: RunRecord,
        kind: str,
        name: str,
        write: Callable[[Path], object],
        *,
        ttl_s: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Saved:
        """Writes weights by ``write(directory)``. They are there whole, or not at all.

        Raises ``ApiError`` for a name that is taken.
        """
        folder = self._of(run.run_id) / kind
        final, aside = folder / name, folder / f".{secrets.token_hex(8)}"
        if final.exists() and not overwrite:
            raise ApiError(
                400, f"{PREFIX}{run.run_id}/{kind}/{name} is there already: save with overwrite=True", "exists", "path"
            )
        folder.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        try:
            write(aside)
            now = time.time()
            size = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
            about = {"time": now, "expires": None if ttl_s is None else now + ttl_s, "size": size}
            _write(aside / "checkpoint.json", {**about, "user_metadata": dict(user_metadata or {})})
            if final.exists():
                replaced = folder / f".{secrets.token_hex(8)}"
                final.rename(replaced)
                aside.rename(final)
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                aside.rename(final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        saved = _read_saved(run, kind, final)
        assert saved is not None
        return saved

    def set_ttl(self, saved: Saved, ttl_s: int | None) -> None:
        file = saved.directory / "checkpoint.json"
        about = json.loads(file.read_text("utf-8"))
        _write(file, about | {"expires": None if ttl_s is None else time.time() + ttl_s})

    def remove(self, path: str) -> None:
        self._remove(self.find(path))

    def _remove(self, saved: Saved) -> None:
        aside = saved.directory.with_name(f".{secrets.token_hex(8)}")
        saved.directory.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _of(self, run_id: str) -> Path:
        return self.root / run_id.replace(":", "_")

    def _directories(self) -> list[Path]:
        return [each for each in self.root.iterdir() if (each / "run.json").is_file()] if self.root.is_dir() else []


def _write(file: Path, value: Mapping[str, Any]) -> None:
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with aside.open("w", encoding="utf-8") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    aside.replace(file)


def _read_run(directory: Path) -> RunRecord | None:
    try:
        return RunRecord(**json.loads((directory / "run.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _read_saved(run: RunRecord, kind: str, directory: Path) -> Saved | None:
    try:
        about = json.loads((directory / "checkpoint.json").read_text("utf-8"))
        return Saved(run, kind, directory.name, directory, **about)
    except (OSError, ValueError, TypeError):
        return None
