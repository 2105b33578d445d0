"""Ranks in processes of their own, which run the functions of a program."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_host.distributed.split.ports import reserved
from rlhf_host.distributed.split.ranks import Ranks


class Group:
    """Ranks that run a program's functions: ``group(function, ...)`` gives what each returned."""

    def __init__(
        self,
        fork: Any,
        environment: dict[str, str],
        directory: Path,
        size: int,
        parts: int,
        program: str,
        *,
        sliced: bool = False,
    ):
        self.place = reserved("127.0.0.1")
        port = self.place.getsockname()[1]
        self.logs = [directory / f"rank-{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            arguments = [str(part) for part in (rank, size, port, parts, int(sliced))]
            with log.open("wb") as errors:
                self.processes.append(fork(arguments, environment, program=program, stderr=errors, text=False))

    def __call__(self, function: Any, *arguments: Any, **named: Any) -> list[Any]:
        for process in self.processes:
            pickle.dump((function.__name__, arguments, named), process.stdin)
            process.stdin.flush()
        answers = []
        for process, log in zip(self.processes, self.logs, strict=True):
            try:
                ok, answer = pickle.load(process.stdout)
            except EOFError:
                pytest.fail(f"a rank ended:\n{log.read_text()[-3000:]}")
            answers.append((ok, answer))
        failed = [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.place.close()


def serve(rank: int, size: int, port: int, parts: int, sliced: int, functions: dict[str, Any]) -> None:
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # a process of its own, for every Adam of DeepSpeed
    answers = sys.stdout.buffer
    gc.freeze()  # DeepSpeed searches for garbage at every turn: not among all that was imported
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        ranks = Ranks.join(rank, size, "127.0.0.1", port, parts=parts, sliced=bool(sliced), timeout_s=60.0)
        with contextlib.suppress(EOFError):
            while True:
                name, arguments, named = pickle.load(sys.stdin.buffer)
                try:
                    answer = (True, functions[name](ranks, *arguments, **named))
                except (Exception, pytest.fail.Exception):
                    answer = (False, traceback.format_exc())
                pickle.dump(answer, answers)
                answers.flush()
