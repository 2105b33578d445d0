"""The best sampled answers to each prompt, as lines of a file that grows batch by batch and can be continued."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_host import Group, RunError, Task, Trajectory, UserError
from rlhf_host.commands import write_file
from rlhf_host.sampling import PictureFiles, json_line


@dataclass(slots=True)
class Counts:
    """Numbers of prompts and answers, by outcome."""

    prompts: int = 0
    answers: int = 0
    written: int = 0
    cut_off: int = 0
    """Answers that ended at the length limit. Training on one teaches the model to stop in mid-sentence."""
    reward_sum: float = 0.0
    """Sum of the rewards of written answers."""


@dataclass(slots=True)
class BestAnswers:
    """The file ``path``, and until it is complete its state beside it: ``.NAME.state``.

    Args:
        settings: everything that the answers depend on, as JSON values.
        keep: answers of each prompt, the best first; 0: all.
    """

    path: Path
    settings: Mapping[str, Any]
    keep: int
    counts: Counts = field(default_factory=Counts)
    _prompts: str = ""
    """Digest of the prompts."""
    _bytes: int = 0

    @property
    def state(self) -> Path:
        return self.path.with_name(f".{self.path.name}.state")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds a lock on the file: no other process can write it meanwhile.

        Raises:
            UserError: another process writes it; it cannot be written; it exists but was begun with other settings, or is
                incomplete; its name is not one of JSON lines.
        """
        from filelock import FileLock, Timeout

        if self.path.suffix.lower() not in (".jsonl", ".ndjson"):
            raise UserError(f"--output {self.path}: answers are JSON lines: give it a name that ends in .jsonl")
        lock, folder = FileLock(self.path.with_name(f".{self.path.name}.lock")), self.path.parent
        made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            raise UserError(f"--output {self.path} is being written by another process: choose another name") from None
        except OSError as error:
            raise UserError(f"--output {self.path} cannot be written: {error.strerror}") from error
        try:
            self._check()
            yield
        finally:
            with contextlib.suppress(OSError):  # another error may be under way
                Path(lock.lock_file).unlink(missing_ok=True)
                if made and not any(folder.iterdir()):
                    folder.rmdir()
            lock.release()

    def _check(self) -> None:
        if not self.state.exists():
            if self.path.exists():
                raise UserError(f"--output {self.path}: this file already exists: choose another name, or remove it")
            return
        begun = self._begun()
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < begun["bytes"]:
            raise UserError(
                f"--output {self.path} has {size} bytes, and {begun['bytes']} were written before the interruption: put it back, or"
                f" remove {self.state} too, and begin again"
            )
        if begun["settings"] != self.settings:
            raise UserError(
                f"--output {self.path} was begun with other settings: give the same flags to continue it, choose another name, or"
                f" remove it and {self.state}"
            )

    def begin(self, tasks: Sequence[Task]) -> int:
        """Returns how many of the tasks are done, and removes what was written for later ones. Raises ``UserError`` if the file
        was begun with other tasks.
        """
        digest = hashlib.blake2b(digest_size=16)
        for task in tasks:
            digest.update(repr((task.source, task.index, task.prompt, task.prompt_ids)).encode("utf-8", "backslashreplace"))
        self._prompts = digest.hexdigest()
        if self.state.exists():
            state = self._begun()
            if state["prompts"] != self._prompts:
                raise UserError(f"--output {self.path} was begun with other prompts: choose another name")
            self.counts, self._bytes = Counts(**state["counts"]), state["bytes"]
        self._save()
        with self.path.open("ab") as file:
            file.truncate(self._bytes)
        return self.counts.prompts

    def add(self, prompts: int, groups: Iterable[Group]) -> None:
        """Writes the answers to the next ``prompts`` prompts. They are on disk when this returns."""
        files = PictureFiles(self.path.parent)
        lines = b"".join(json_line(_line(row), files.path_of) for group in groups for row in self._best(group))
        with self.path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self.counts.prompts += prompts
        self._bytes += len(lines)
        self._save()

    def finish(self) -> None:
        """Removes the state: the file is complete."""
        self.state.unlink(missing_ok=True)

    def _save(self) -> None:
        counts = {name: getattr(self.counts, name) for name in Counts.__dataclass_fields__}
        known = {"settings": self.settings, "prompts": self._prompts, "bytes": self._bytes, "counts": counts}
        write_file(self.state, json.dumps(known).encode())

    def _best(self, group: Group) -> list[Trajectory]:
        whole = [row for row in group.trajectories if not row.truncated]
        self.counts.answers += len(group.trajectories)
        self.counts.cut_off += len(group.trajectories) - len(whole)
        ranked = sorted(whole, key=lambda row: -(row.reward or 0.0))
        best = ranked[: self.keep] if self.keep else ranked
        self.counts.written += len(best)
        self.counts.reward_sum += sum(row.reward or 0.0 for row in best)
        return best

    def _begun(self) -> Any:
        try:
            return json.loads(self.state.read_bytes())
        except ValueError as error:
            raise UserError(f"{self.state} is damaged: remove it and {self.path}, and begin again") from error


def _line(row: Trajectory) -> dict[str, Any]:
    """Returns a line that ``data.format generated`` reads. Raises ``RunError`` for an episode of several turns."""
    if len(row.completion) != 1:
        raise RunError("the agent's episodes have several turns, which are no single completion: rlhf rollout saves them whole")
    line: dict[str, Any] = {"prompt": row.task.prompt, "completion": row.text, "reward": row.reward}
    beside = {"tools": row.task.tools, "chat_template_kwargs": row.task.template_kwargs}  # or the prompt would be another one
    line |= {name: value for name, value in beside.items() if value}
    return line if row.score is None else {**line, "score": row.score}
