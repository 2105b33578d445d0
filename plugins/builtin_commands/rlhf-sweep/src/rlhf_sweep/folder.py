"""The folder of a sweep: who works there, what was asked for, and how far each run is."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_host import RunDirectory, UserError
from rlhf_host.commands import write_file
from rlhf_host.runs import flat
from rlhf_host.settings import RunConfig, read_config, write_yaml
from rlhf_sweep.planned import Planned, plain_settings

RECORD, LOCK, TRIALS = "sweep.json", ".lock", "trials.jsonl"
VERSION = 1
ENDING_S = 180.0
"""Longest wait for a run that an earlier sweep, which was killed, is still ending."""


class Folder:
    """A sweep's folder.

    Args:
        path: need not exist.
    """

    def __init__(self, path: Path):
        self.path = path

    def run_dir(self, name: str) -> Path:
        return self.path / "runs" / name

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def settings(self, name: str) -> Path:
        return self.path / "settings" / f"{name}.yaml"

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """Returns what the sweep there was begun with. Raises ``UserError`` where something else is there."""
        file = self.path / RECORD
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--output {self.path} is a file: it names the folder of a sweep")
        if not file.exists():
            others = (
                [each.name for each in self.path.iterdir() if each.name not in (LOCK, "settings")] if self.path.is_dir() else []
            )
            if others:
                raise UserError(f"--output {self.path} has other files, such as {others[0]}: choose a new folder")
            return None
        try:
            record: Any = json.loads(file.read_text("utf-8"))
            if record["version"] != VERSION or not isinstance(record["runs"], dict):
                raise ValueError
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{file} is damaged, or of another version of rlhf-sweep: choose another --output") from None
        return dict(record)

    def check(self, about: Mapping[str, Any], runs: Sequence[Planned], *, grows: bool) -> None:
        """Raises ``UserError`` unless this folder's sweep, if there is one, is the same, or a part of this one.

        Args:
            about: what all runs come from.
            grows: runs are added while it goes on, so that those that are not planned yet are no difference.
        """
        if (record := self.record) is None:
            return
        lines = []
        if record["cwd"] != os.getcwd():
            lines.append(f"it was begun in {record['cwd']}, and paths in its settings are relative to that: cd there")
        before, now = record["about"], json.loads(json.dumps(about))
        lines += [
            f"{name} was {_short(before.get(name))} and is {_short(now.get(name))} now"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        named = {each.name: each for each in runs}
        for name, identity in record["runs"].items():
            if name not in named:
                lines += [] if grows else [f"{name} is no run of it now"]
            elif named[name].identity != identity:
                lines.append(f"{name} differs in {self._difference(named[name])}")
        if lines:
            listed = "; ".join(lines[:5]) + (" ..." if len(lines) > 5 else "")
            raise UserError(
                f"{self.path} has a sweep with other settings: {listed}: choose another"
                " --output, or give the same settings again"
            )

    def _difference(self, run: Planned) -> str:
        before = read_config(path, quickstart=False).config if (path := self.settings(run.name)).exists() else None
        names = sorted(different(run.config, before)) if before else []
        return ", ".join(names[:5]) or "its settings"

    def write_record(self, about: Mapping[str, Any], runs: Sequence[Planned]) -> None:
        known = {} if self.record is None else self.record["runs"]
        made = {
            "version": VERSION,
            "cwd": os.getcwd(),
            "about": dict(about),
            "runs": known | {each.name: each.identity for each in runs},
        }
        if made != self.record:
            for run in runs:
                self.write_settings(run)
            write_file(self.path / RECORD, (json.dumps(made, indent=1, ensure_ascii=False) + "\n").encode())
            self.__dict__["record"] = made

    # --- runs ---------------------------------------------------------------------------------------

    def write_settings(self, run: Planned) -> None:
        """Writes the file that the run is started with."""
        path = self.settings(run.name)
        path.parent.mkdir(exist_ok=True)
        config = run.config.model_copy(update={"run_dir": str(self.run_dir(run.name))})
        values = config.model_dump()
        usual = read_config((), quickstart=False).config.tracker
        values["tracker"] |= {alias: {"name": "none"} for alias in usual if alias not in config.tracker}  # else they come back
        path.write_text(write_yaml(values), "utf-8")

    def state(self, name: str) -> dict[str, Any]:
        """Returns how a run ended: ``status`` is ``finished`` or ``failed``. Empty: it has not."""
        path = self.path / "states" / f"{name}.json"
        try:
            found: Any = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise UserError(f"{path} is damaged: remove it, and the run is looked at again") from None
        return found if isinstance(found, dict) else {}

    def note(self, name: str, **state: Any) -> None:
        path = self.path / "states" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        write_file(path, (json.dumps(state) + "\n").encode())

    def forget(self, name: str) -> None:
        (self.path / "states" / f"{name}.json").unlink(missing_ok=True)

    def note_finished(self, name: str, seconds: float | None = None) -> None:
        took = {} if seconds is None else {"seconds": seconds}
        self.note(
            name, status="finished", metrics=self._hash(name, "metrics.jsonl"), config=self._hash(name, "config.yaml"), **took
        )

    def _hash(self, name: str, file: str) -> str:
        path = self.run_dir(name) / file
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""

    def status(self, run: Planned) -> str:
        """Returns ``finished``, ``failed``, ``begun`` or ``new``.

        Raises:
            UserError: the run's folder was changed by something else.
        """
        name, state, run_dir = run.name, self.state(run.name), self.run_dir(run.name)
        if not (run_dir / "config.yaml").is_file():
            if state.get("status") == "finished":
                self.forget(name)
                return "new"
            return str(state.get("status", "new"))
        changed: list[str] = []
        if state.get("config") != self._hash(name, "config.yaml"):  # hashes are compared faster than YAML
            changed = sorted(different(run.config, read_config(run_dir / "config.yaml", quickstart=False).config))
        if changed:
            raise UserError(
                f"{run_dir / 'config.yaml'} was changed since the sweep wrote it ({', '.join(changed[:3])}): put it back, or remove"
                f" {run_dir} to run it again"
            )
        if state.get("status") == "finished" and state["metrics"] != self._hash(name, "metrics.jsonl"):
            raise UserError(
                f"{run_dir / 'metrics.jsonl'} was changed after the run had finished: put it back, or remove {run_dir} to run it"
                " again"
            )
        if not state and RunDirectory(run_dir).status == "finished":
            self.note_finished(name)
            return "finished"
        return str(state.get("status", "begun"))

    def wait_until_free(self, name: str) -> None:
        """Waits for a run that an earlier sweep is still ending. Raises ``UserError`` if it does not end."""
        run_dir = self.run_dir(name)
        until = time.monotonic() + ENDING_S
        while (run_dir / "config.yaml").is_file() and RunDirectory(run_dir).in_use:
            if time.monotonic() > until:
                raise UserError(f"{run_dir} is in use by another process: stop it, and go on then")
            time.sleep(0.2)

    # --- drawn settings -----------------------------------------------------------------------------

    def drawn(self) -> list[dict[str, Any]]:
        """Returns the settings that a sampler has drawn so far. A half-written line at the end counts as none."""
        path = self.path / TRIALS
        found = []
        for line in path.read_text("utf-8").split("\n")[:-1] if path.exists() else []:
            try:
                found.append(dict(json.loads(line)))
            except ValueError:
                raise UserError(f"{path} is damaged: choose another --output") from None
        return found

    def note_drawn(self, values: Sequence[Mapping[str, Any]]) -> None:
        write_file(self.path / TRIALS, "".join(json.dumps(each) + "\n" for each in values).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder against other sweeps; the system lets go of it for one that dies.

        Raises:
            UserError: another sweep works there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise UserError(
                    f"another sweep works in {self.path} ({lock.read().strip()}): wait for it, or choose another --output"
                ) from None
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            self.__dict__.pop("record", None)
            yield


def different(first: RunConfig, second: RunConfig) -> set[str]:
    """Returns names of settings in which two runs differ."""
    before, after = flat(plain_settings(first)), flat(plain_settings(second))
    return {name for name in {**before, **after} if before.get(name) != after.get(name)}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value is not None else "not given"
    return text if len(text) <= 120 else f"{text[:120]}..."
