"""Runs as Ray tasks: of a cluster that is there (``RAY_ADDRESS``), or one made on this machine for the sweep alone."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf_host import RunError, UserError
from rlhf_host.commands import Scratch, first_line
from rlhf_sweep.execute import Process
from rlhf_sweep.one_run import RunProcess
from rlhf_sweep.planned import Planned

POLL_S = 0.2
UNLIMITED = 1_000_000
LOST = 70
"""Exit code of a run whose worker process or machine is gone."""
_PRIVATE = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else its servers listen on every interface
    "RAY_USAGE_STATS_ENABLED": "0",
}


def resources(run: Planned, gpus: bool) -> dict[str, float]:
    """Returns the CPUs and GPUs that a run's task holds while it runs.

    Of a run that joins a cluster by itself (``ray.address``) its own placement holds them, and the task nothing.

    Args:
        gpus: the cluster has some.
    """
    config = run.config
    options = dict(config.runtime.options)
    if options.get("address"):
        return {"num_cpus": 0, "num_gpus": 0}
    on_cpu = not gpus or all(role.device == "cpu" for role in config.roles.values())
    count = max(1, sum(_devices(block) for block in config.placement))
    if on_cpu:
        return {"num_cpus": max(count, config.train.threads or 1), "num_gpus": 0}
    return {"num_cpus": max(1, config.train.threads or 1), "num_gpus": count}


def _devices(block: str) -> int:
    """Returns the devices of ``ROLE+ROLE=[NODESx]DEVICES[:WORDS]``, which the runtime reads whole."""
    count = block.rpartition("=")[2].partition(":")[0]
    return math.prod(int(part) for part in count.split("x") if part.strip().isdecimal())


class OnRay:
    """Starts and joins. ``close`` ends a cluster that was made here."""

    def __init__(self, at_once: int | None):
        self.at_once = UNLIMITED if at_once is None else at_once
        self._scratch: Scratch | None = None
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            self._set_environment()  # which Ray reads when it is imported
        try:
            import ray
        except ImportError as error:
            raise UserError(f"--on ray needs Ray, which is not installed ({error}): pip install 'rlhf-sweep[ray]'") from None
        self._ray: Any = ray
        self._held: list[_Task] = []
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        try:
            if address:
                ray.init(address=address, **quiet)
            else:
                assert self._scratch is not None
                folder = str(self._scratch.path)
                ray.init(address="local", include_dashboard=False, _temp_dir=folder, _node_ip_address="127.0.0.1", **quiet)
        except Exception as error:
            self.close()
            where = f"the Ray cluster {address}" if address else "Ray on this machine"
            raise UserError(f"--on ray: cannot use {where}: {first_line(error)}") from error
        self._total = ray.cluster_resources()

    def _set_environment(self) -> None:
        """Prepares a cluster on the loopback, with a token."""
        self._scratch = Scratch("rlhf-sweep-ray-", "/tmp" if len(tempfile.gettempdir()) > 20 else tempfile.gettempdir())
        token = self._scratch.path / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(_PRIVATE, RAY_AUTH_TOKEN_PATH=str(token))

    def _needs(self, run: Planned) -> dict[str, float]:
        return resources(run, bool(self._total.get("GPU")))

    def has_room(self, run: Planned) -> bool:
        """Returns True if the cluster has these devices free, by what this sweep holds of them."""
        needs = self._needs(run)
        self._held = [task for task in self._held if task.poll() is None]
        held = {name: sum(task.needs[name] for task in self._held) for name in needs}
        return all(
            held[name] + needs[name] <= self._total.get(unit, 0) for name, unit in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
        )

    def start(self, run: Planned, words: list[str], log: Path) -> Process:
        needs = self._needs(run)
        for name, unit in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            if needs[name] > (has := self._total.get(unit, 0)):
                raise RunError(
                    f"{run.name} needs {needs[name]:g} {unit}s, and the Ray cluster has {has:g}: join a larger one, or use fewer"
                )
        task = self._ray.remote(max_retries=0, **needs)(execute_here)
        made = _Task(self._ray, task.remote(words, str(log), os.getcwd()), needs)
        self._held.append(made)
        return made

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.shutdown()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None


class _Task:
    """A task, as a process."""

    def __init__(self, ray: Any, reference: Any, needs: dict[str, float]):
        self._ray, self._reference, self.needs = ray, reference, needs
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and self._ray.wait([self._reference], timeout=0)[0]:
            try:
                self._code = int(self._ray.get(self._reference))
            except Exception:  # its worker or machine is gone, or it was cancelled
                self._code = LOST
        return self._code

    def interrupt(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.cancel(self._reference, force=False)

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.cancel(self._reference, force=True)


def execute_here(words: list[str], log: str, cwd: str) -> int:
    """Runs in a worker of the cluster: ``rlhf`` with these words, and its exit code. Cancelled, it ends the run tidily."""
    place = Path(log)
    if not Path(cwd).is_dir() or not (Path(cwd) / place).parent.parent.is_dir():
        raise RuntimeError(
            f"{cwd} with {place.parent.parent} is not on this machine: the sweep's folder must be on a disk that all share"
        )
    process = RunProcess(words, Path(cwd) / place, cwd)
    try:
        while (code := process.poll()) is None:
            time.sleep(POLL_S)
    except BaseException:
        process.interrupt()
        while process.poll() is None:
            time.sleep(POLL_S)
        raise
    return code
