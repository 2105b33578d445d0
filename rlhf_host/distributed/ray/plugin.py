"""The runtime ``ray``: roles and engines in their own processes, on one machine or many; the controller stays here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from rlhf_host.errors import UserError
from rlhf_host.protocols import DeviceGroup, Runtime, RuntimeStart, RuntimeTraits

if TYPE_CHECKING:
    from rlhf_host.distributed.ray.placement import Kind, Place

SECRET = re.compile(r"secret|passw|credential|(?:^|_|api)(?:token|key)s?$", re.IGNORECASE)
PASSED_ON = re.compile(r"\$\{(\w+)\}")
PASSWORD_IN_URL = re.compile(r"://[^/\s:@]+:(?!\$\{)[^/\s@]+@")


def passed_on(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``runtime_env`` with ``${NAME}`` in ``env_vars`` filled in from this process's environment.

    Raises:
        UserError: the variable is not set here.
    """
    variables = dict(runtime_env.get("env_vars", {}))
    for name, text in variables.items():
        if match := PASSED_ON.fullmatch(str(text)):
            if match[1] not in os.environ:
                raise UserError(f"ray.runtime_env passes on {text}, which is not set in the environment")
            variables[name] = os.environ[match[1]]
    return runtime_env | ({"env_vars": variables} if variables else {})


def require_dashboard(options: Ray.Options) -> None:
    """Raises ``UserError`` if the dashboard is asked for and cannot be had."""
    if not options.dashboard:
        return
    if options.address is not None:
        raise UserError("ray.dashboard is for a cluster that the run makes, and ray.address joins one: leave one of them out")
    try:
        import ray.dashboard.optional_deps  # noqa: F401
    except ImportError as error:
        line = "pip install 'rlhf-host[cluster]'"
        raise UserError(f"ray.dashboard needs what comes with ray[default] ({error.name} is missing): {line}") from error


class Ray:
    """Roles and engines in Ray actors; ``placement`` tells which roles share devices."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        address: str | None = Field(
            None, description="cluster to join, such as auto or HOST:PORT; default: a new cluster for this run"
        )
        temp_dir: str | None = Field(None, description="directory for sockets and logs of a new cluster; default: the system's")
        num_cpus: PositiveInt | None = Field(None, description="number of CPUs of a new cluster; default: the machine's")
        num_gpus: int | None = Field(None, ge=0, description="number of GPUs of a new cluster; default: the machine's")
        object_store_mb: int | None = Field(None, ge=80, description="shared memory for batches; default: Ray's own choice")
        runtime_env: dict[str, Any] = Field(
            default_factory=dict,
            description="Ray's runtime_env of all workers and engines: env_vars, pip, working_dir; the value ${NAME} is taken"
            " from this process's environment and not written down",
        )
        wait_s: float = Field(60.0, gt=0, description="longest wait for devices that are in use, or that a cluster adds")
        stall_s: float = Field(
            300.0, gt=0, description="longest time a process may take to answer that it lives; after that it is ended"
        )
        max_restarts: int = Field(3, ge=0, description="maximum number of restarts of an engine that died")
        dashboard: bool = Field(False, description="Ray's dashboard for a new cluster, at 127.0.0.1 and with its token")

        @field_validator("runtime_env")
        @classmethod
        def _no_secrets(cls, value: dict[str, Any]) -> dict[str, Any]:
            """Refuses secrets in options: ``config.yaml`` and trackers show every option as given."""
            for name, text in value.get("env_vars", {}).items():
                if SECRET.search(name) and not PASSED_ON.fullmatch(str(text)):
                    raise ValueError(
                        f"env_vars.{name} looks like a secret, and config.yaml and trackers would show it: set it in the"
                        f" environment, and write ${{{name}}} here"
                    )
            if PASSWORD_IN_URL.search(str(value)):
                raise ValueError(
                    "there is a password in a URL, and config.yaml and trackers would show it: set up pip or git there"
                )
            return value

    traits = RuntimeTraits(libraries=("ray",), debug=False, remote=True, places=True, sync="broadcast", generates=True)

    def __init__(self, options: Options):
        self.options = options

    def describe(self, start: RuntimeStart) -> Iterable[str]:
        """Returns which roles share devices. The cluster's devices are checked when the run starts."""
        from rlhf_host.distributed.ray.placement import describe

        passed_on(self.options.runtime_env)
        require_dashboard(self.options)
        return [
            describe(placement(start)),
            "not checked: whether the cluster has these devices, or GPUs in their place, and settings that some devices refuse",
        ]

    def groups(self, start: RuntimeStart) -> Sequence[DeviceGroup]:
        from rlhf_host.distributed.ray.placement import ROLLOUT

        return [
            DeviceGroup(
                name=place.name,
                roles=place.roles,
                devices=place.devices,
                engines=len(place.engines) if ROLLOUT in place.sampled else 0,
                device=None if place.kind != other.kind else "cuda" if place.kind == "gpu" else "cpu",
            )
            for place, other in zip(placement(start, "gpu"), placement(start, "cpu"), strict=True)
        ]

    def start(self, start: RuntimeStart) -> Runtime:
        from rlhf_host.distributed.ray.runtime import RayRuntime

        return RayRuntime(self.options, start)


def placement(start: RuntimeStart, default_kind: Kind = "cpu") -> list[Place]:
    """Returns the placement of a run's roles and engines. Raises ``UserError`` for an impossible one."""
    from rlhf_host.distributed.ray.placement import ROLLOUT, parse_placement, plan_placement, refuse_apart, shards_of

    roles = [need.name for need in start.needs.roles]
    per_engine = None if start.engine is None else start.engine.build().traits.devices
    blocks = parse_placement(start.placement)
    devices = {name: role.device for name, role in start.roles.items()}
    sampled = [ROLLOUT, *(need.name for need in start.needs.roles if need.generates)]
    kinds: dict[str, Any] = {"devices": devices, "default_kind": default_kind}
    places = plan_placement(blocks, roles, per_engine=per_engine, sampled=sampled, **kinds)
    for place in places:
        shards_of(place, start)
    refuse_apart(places, start.needs)
    return places
