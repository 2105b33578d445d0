"""Counts the part of the host that one step goes through: functions executed, and frames and files from the command down to the
log-probabilities.

    python benchmarks/step_functions.py [--list] [FLAGS of rlhf train]

A run of three steps on a tiny model; the second is traced. A function counts once however often it runs; comprehensions do not
count. Frames are those of the host on the controller's thread, down to where it waits, and on the thread that computes. On a
machine that is busy, a step of more than five seconds also counts the three functions that watch slow rollouts.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from rlhf_authoring.models import write_tiny_model

import rlhf_host
from rlhf_host.cli.main import main as command_line
from rlhf_host.engines import plain_path
from rlhf_host.training.loop import Loop

HOST = str(Path(rlhf_host.__file__).parent)


def main() -> None:
    show, flags = "--list" in sys.argv, [flag for flag in sys.argv[1:] if flag != "--list"]
    executed: set[tuple[str, str]] = set()
    deepest: list[str] = []
    tracing = False
    take_step, token_logprobs = Loop._take_step, plain_path.token_logprobs

    def note(frame: Any, event: str, argument: Any) -> None:
        if tracing and event == "call" and frame.f_code.co_filename.startswith(HOST):
            name = frame.f_code.co_qualname
            if not name.endswith("comp>") and not name.endswith("<genexpr>"):
                executed.add((frame.f_code.co_filename.removeprefix(HOST).lstrip("/"), name))

    def traced(self: Loop, number: int) -> Any:
        nonlocal tracing
        tracing = number == 2
        try:
            return take_step(self, number)
        finally:
            tracing = False

    def measured(*arguments: Any, **options: Any) -> Any:
        nonlocal deepest
        stacks = {threading.get_ident(), threading.main_thread().ident}
        frames = sys._current_frames()
        found = [file for ident in stacks if ident is not None for file in _host_files(frames[ident])]
        deepest = max(deepest, found, key=len)
        return token_logprobs(*arguments, **options)

    Loop._take_step, plain_path.token_logprobs = traced, measured  # type: ignore[method-assign]
    threading.setprofile(note)
    sys.setprofile(note)
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), flags)
    sys.setprofile(None)
    by_folder = collections.Counter(path.split("/")[0] for path, _ in executed)
    down = f"{len(deepest)} host frames in {len(set(deepest))} files down to token_logprobs"
    print(f"{len(executed)} host functions in a step, {down}")
    print(", ".join(f"{folder} {count}" for folder, count in by_folder.most_common()))
    if show:
        print("\n".join(f"{path} {name}" for path, name in sorted(executed)))
        print("down to token_logprobs:", *deepest, sep="\n  ")


def _host_files(frame: Any) -> list[str]:
    """Returns the file of each frame of the host, the innermost first."""
    files = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(HOST):
            files.append(f"{frame.f_code.co_filename.removeprefix(HOST).lstrip('/')}")
        frame = frame.f_back
    return files


def run(folder: Path, flags: list[str]) -> None:
    write_tiny_model(folder / "model")
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(24)))
    arguments = ["train", "--algo", "rloo", "--reward", "math_verifier", "--actor.model", str(folder / "model")]
    arguments += ["--data", str(data), "--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4"]
    arguments += ["--train.steps", "3", "--train.threads", "1", "--tracker", "console=none", "--run-dir", str(folder / "run")]
    command_line([*arguments, *flags], standalone_mode=False)


if __name__ == "__main__":
    main()
