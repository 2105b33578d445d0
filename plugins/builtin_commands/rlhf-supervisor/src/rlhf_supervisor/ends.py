"""Ends of a run's process: error or signal, place in the run, and whether memory was short."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASKED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a run that somebody ended: Ctrl-C, or SIGTERM to the run's own process."""

OVER = {"finished": 0, "interrupted": 130}
"""Status in ``run.json`` of a run that is over, whatever its process died of then → the exit code."""
WAY_ON = re.compile(r"; (continue from|no checkpoint was written yet) .*", re.DOTALL)
"""Words of an error about going on by hand."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of one attempt."""

    code: int
    """Exit code as of ``os.waitstatus_to_exitcode``: negative for a signal."""
    what: str
    """Cause of the end."""
    step: int | None
    """The last finished step; None: it had not begun."""

    @property
    def where(self) -> str:
        return "before its first step" if not self.step else f"after step {self.step}"

    def same(self, other: End | None) -> bool:
        """Returns True for the same error at the same step. Numbers in it, as of processes and bytes, may differ."""
        return other is not None and (self.step, _plain(self.what)) == (other.step, _plain(other.what))

    @property
    def exit_code(self) -> int:
        """Returns the exit code that a shell would say."""
        return self.code if self.code >= 0 else 128 - self.code


def _plain(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\b[0-9a-f]{16,}\b|\d+", "#", text)


class Attempt:
    """One process of the run, from its begin: what is noted here tells its end."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._begun = time.time()
        self._note = _changed(run_dir / "run.json")
        self._kills = memory_kills()

    @property
    def begun(self) -> bool:
        """True as soon as it has noted where it goes on."""
        return _changed(self.run_dir / "run.json") != self._note

    @property
    def resumed_after(self) -> int | None:
        """The step of the checkpoint that it took."""
        steps = _about(self.run_dir).get("resumed_after")
        return int(steps[-1]) if steps else None

    def end(self, code: int) -> End:
        about, begun = _about(self.run_dir), self.begun
        step = last_step(self.run_dir) if begun else None
        noted = begun and float(about.get("ended") or 0) >= self._begun - 1
        if code < 0 or code in ASKED:
            over = OVER.get(str(about.get("status"))) if noted and not about.get("error") else None
            what = self._signal(-code) if code < 0 else "it was interrupted"
            return End(code if over is None else over, what, step)
        if noted and about.get("error"):
            error = WAY_ON.sub("", str(about["error"])).rstrip(".")
            return End(code, error, int(about["step"]) if isinstance(about.get("step"), int) else step)
        return End(code, f"it ended with exit code {code}, for the reason above", step)

    def _signal(self, number: int) -> str:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number != signal.SIGKILL:
            return f"it was ended by {name}"
        more = {place for place, kills in memory_kills().items() if kills > self._kills.get(place, kills)}
        if "cgroup" in more:
            return f"it was killed by {name}: out of memory, at the limit of its cgroup"
        if more:
            return f"it was killed by {name}, and the system killed for lack of memory meanwhile: probably out of memory"
        return f"it was killed by {name}, maybe out of memory"


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _about(run_dir: Path) -> dict[str, Any]:
    """Returns ``run.json``; nothing where there is none that can be read."""
    try:
        about = json.loads((run_dir / "run.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def memory_kills(root: Path = Path("/")) -> dict[str, int]:
    """Returns how many processes were killed for lack of memory: at the limit of this cgroup, and on the machine; what can be
    read of them."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        groups = (root / "proc/self/cgroup").read_text().split()
        (own,) = (line.removeprefix("0::/") for line in groups if line.startswith("0::"))
        found["cgroup"] = _count(root / "sys/fs/cgroup" / own / "memory.events")
    with contextlib.suppress(OSError, ValueError):
        found["machine"] = _count(root / "proc/vmstat")
    return found


def _count(path: Path) -> int:
    (line,) = (line for line in path.read_text().splitlines() if line.startswith("oom_kill "))
    return int(line.split()[1])


def last_step(run_dir: Path) -> int:
    """Returns the last step in ``metrics.jsonl``, or that of the newest checkpoint; 0: there is none."""
    try:
        lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except OSError:
        lines = []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the run was killed there
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return max(int(row["step"]), newest_checkpoint(run_dir) or 0)
    return newest_checkpoint(run_dir) or 0


def newest_checkpoint(run_dir: Path) -> int | None:
    """Returns its step."""
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in (run_dir / "checkpoints").glob("step-*")]
    return max((int(match[1]) for match in found if match), default=None)
