"""A Ray cluster for one run: joined and left unchanged, or made for this run alone."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_host.distributed.ray.leftovers import PREFIX, end_leftovers
from rlhf_host.distributed.ray.placement import Node, Place, asked, shortage
from rlhf_host.distributed.ray.plugin import Ray, require_dashboard
from rlhf_host.errors import RunError, UserError
from rlhf_host.scratch import Scratch

log = logging.getLogger(__name__)

_SOON_S = 2.0
"""Seconds after which a wait for devices is announced."""
SOCKET_ROOM = 107 - len("/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""Longest path of a temporary directory: Ray puts Unix sockets below it, and their names may have 107 bytes."""

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # Ray calls the machine by its outward address, and then its servers listen on every interface. This switch, made for
    # systems with firewalls that ask, is the only one that keeps the address, and with it every socket, on the loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would empty CUDA_VISIBLE_DEVICES for actors that take none of its GPUs: engines that share a worker's.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayCluster:
    """A cluster, not a context manager: call ``start`` once and ``stop`` once. After that the environment is as before and no
    process is left.
    """

    def __init__(self, settings: Ray.Options):
        self.settings = settings
        self.is_own = False
        self.about: dict[str, str] = {}
        """What is noted of it in ``run.json``."""
        self._scratch: Scratch | None = None
        self._environment: dict[str, str | None] = {}
        self._groups: list[Any] = []

    def start(self) -> None:
        """Joins ``ray.address``, or makes a cluster on this machine: token authentication, loopback only.

        Raises:
            UserError: the cluster cannot be reached, or this process uses Ray already.
        """
        require_dashboard(self.settings)
        if self.settings.address is None:
            self._set_environment()
        import ray

        if ray.is_initialized():
            self._restore_environment()
            raise UserError("this process is connected to a Ray cluster already: leave it (ray.shutdown()) before the run")
        end_leftovers()
        atexit.register(self.stop)
        quiet = {"logging_level": "ERROR", "log_to_driver": False}
        try:
            with _sigterm_as_before():
                if self.settings.address is None:
                    self._make(ray, quiet)
                    self.is_own = True
                else:
                    _require_answer(self.settings.address)
                    with _as_user_error(f"cannot join the Ray cluster {self.settings.address} (token: RAY_AUTH_TOKEN)"):
                        ray.init(address=self.settings.address, **quiet)  # type: ignore[arg-type]
        except BaseException:
            self.stop()
            raise

    def _make(self, ray: Any, quiet: dict[str, Any]) -> None:
        directory = tempfile.gettempdir()
        parent = self.settings.temp_dir or (directory if _is_short(directory) else "/tmp")
        if not _is_short(parent):
            raise UserError(f"ray.temp_dir {parent} is too long for the sockets beneath it: give one such as /tmp")
        Path(parent).mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch(PREFIX, parent)
        token = self._scratch.path / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        _reread_environment()
        with _as_user_error("cannot start Ray on this machine"):
            made = ray.init(
                address="local",
                num_cpus=self.settings.num_cpus,
                num_gpus=self.settings.num_gpus,
                object_store_memory=(self.settings.object_store_mb or 0) * 2**20 or None,
                include_dashboard=self.settings.dashboard,
                dashboard_host="127.0.0.1",
                _temp_dir=str(self._scratch.path),
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        if self.settings.dashboard:
            self.about = {"ray_dashboard": f"http://{made.dashboard_url}"}
            log.warning("Ray's dashboard: %s; it asks for the token in %s", self.about["ray_dashboard"], token)

    def nodes(self) -> list[Node]:
        """Returns the machines alive, with all their CPUs and GPUs."""
        import ray

        nodes = [
            Node(node["NodeManagerHostname"], int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))
            for node in ray.nodes()
            if node["Alive"]
            for resources in [node["Resources"]]
        ]
        return sorted(nodes, key=lambda node: node.name)

    def _has(self) -> str:
        """Returns the devices of the machines alive, for messages."""
        nodes = self.nodes()
        counts = {"GPU": sum(node.gpu for node in nodes), "CPU": sum(node.cpu for node in nodes), "machine": len(nodes)}
        gpus, cpus, machines = (f"{count} {unit}{'s' * (count != 1)}" for unit, count in counts.items())
        return f"{gpus} and {cpus} on {machines}"

    def cpus(self) -> dict[str, int]:
        """Returns the CPUs of each machine alive, by Ray's id of it."""
        import ray

        return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}

    def reserve(self, places: Sequence[Place]) -> list[Any]:
        """Returns a placement group for every place. It is made before anything is counted: where a cluster grows, this is what
        its autoscaler answers.

        Raises:
            UserError: the devices are not there and free within ``ray.wait_s``.
        """
        import ray
        from ray.util.placement_group import placement_group

        for place in places:
            units = ("CPU", "GPU") if place.kind == "gpu" else ("CPU",)
            bundles = [dict.fromkeys(units, float(size)) for size in place.bundles]
            self._groups.append(placement_group(bundles, strategy=place.strategy, name=f"rlhf {place.name}"))
        waiting = [group.ready() for group in self._groups]
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=min(_SOON_S, self.settings.wait_s))
        if late and self.settings.wait_s > _SOON_S:
            log.warning(
                "waiting up to %g s (--ray.wait-s) for devices: the cluster, with its autoscaler if it has one, is asked for %s;"
                " now it has %s",
                *(self.settings.wait_s, asked(places), self._has()),
            )
            _, late = ray.wait(late, num_returns=len(late), timeout=self.settings.wait_s - _SOON_S)
        if late:
            lacking = ", ".join(place.name for place, ref in zip(places, waiting, strict=True) if ref in late)
            why = shortage(
                places, self.nodes(), remedy="join a larger cluster, or set --ray.wait-s higher if machines join later"
            )
            free = {unit: int(count) for unit, count in ray.available_resources().items() if unit in ("CPU", "GPU")}
            rest = ", ".join(f"{count} {unit}s" for unit, count in sorted(free.items())) or "nothing"
            why = why or (
                f"{rest} are free; other work holds the rest, or the pieces do not fit on the machines together: wait, set"
                " --ray.wait-s higher, or ask for less"
            )
            raise UserError(
                f"the devices for {lacking} were not there within {self.settings.wait_s:g} s (--ray.wait-s), for which the"
                f" cluster was asked for {asked(places)}: {why}"
            )
        return list(self._groups)

    def lacks_devices(self, group: Any) -> bool:
        """Returns True if the machine of a bundle of a placement group is gone, and no other has room for it so far."""
        import ray
        from ray.util.placement_group import placement_group_table

        try:
            return placement_group_table(group)["state"] == "RESCHEDULING"
        except (ray.exceptions.RayError, KeyError):
            return False

    def stop(self) -> None:
        """Frees devices; ends the cluster if it was made here. Never raises, so that the run's own error is seen."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            for group in self._groups:
                with contextlib.suppress(Exception):
                    remove_placement_group(group)
            with contextlib.suppress(Exception):
                ray.shutdown()
        self._groups = []
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        self._restore_environment()
        if self.is_own:
            _reread_environment()
        atexit.unregister(self.stop)

    def _set_environment(self) -> None:
        own = {**_ENVIRONMENT, "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": None, "RAY_ADDRESS": None}
        # Ray puts its own debugger into the last one.
        self._environment = {name: os.environ.get(name) for name in (*own, "PYTHONBREAKPOINT")}
        _set_environment(own)

    def _restore_environment(self) -> None:
        _set_environment(self._environment)
        self._environment = {}


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _reread_environment() -> None:
    """Makes Ray read the environment again. Ray reads it on import, and its token at the first use: perhaps long ago, for
    another run.
    """
    import ray
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not ray_constants.IS_WINDOWS_OR_OSX
    )
    with contextlib.suppress(AttributeError):
        raylet: Any = ray._raylet
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _require_answer(address: str) -> None:
    """Raises ``UserError`` if nobody listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"ray.address {address}: nothing answers there ({error}): give the address of a cluster's head"
        ) from error


def _is_short(directory: str) -> bool:
    return len(os.fsencode(directory)) + len(f"/{PREFIX}00000000") <= SOCKET_ROOM


@contextlib.contextmanager
def _sigterm_as_before() -> Iterator[None]:
    """Undoes what ``ray.init`` does to SIGTERM: at first it would exit without a word, and later abort with a C++ trace."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.alarm(0)  # that of its trace, which aborts after three seconds
        raise KeyboardInterrupt from None
    finally:
        with contextlib.suppress(ValueError):  # not the main thread, where Ray sets none either
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _as_user_error(problem: str) -> Iterator[None]:
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{problem}: {type(error).__name__}: {reason[:500]}") from error
