"""The runtime ``local``: every role, the engine and the controller in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from rlhf_host.errors import UserError
from rlhf_host.protocols import DeviceGroup, Runtime, RuntimeStart, RuntimeTraits


class Local:
    """Runtime with one worker for all roles, in this process. An engine that uses a module samples from the actor's own."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = RuntimeTraits(generates=True)

    def __init__(self, options: Options):
        self.options = options

    def describe(self, start: RuntimeStart) -> Iterable[str]:
        _refuse_several(start)
        return ["everything in this process"]

    def groups(self, start: RuntimeStart) -> Sequence[DeviceGroup]:
        _refuse_several(start)
        return [DeviceGroup(name="this process", roles=tuple(start.roles), devices=1, engines=start.engine is not None)]

    def start(self, start: RuntimeStart) -> Runtime:
        from rlhf_host.runtimes.local_runtime import LocalRuntime

        _refuse_several(start)
        return LocalRuntime(start)


def _refuse_several(start: RuntimeStart) -> None:
    """Raises ``UserError`` for what needs several processes."""
    if (parts := start.backend.build().traits.parts) > 1:
        raise UserError(
            f"backend {start.backend.name} splits a model over {parts} processes, and runtime local has one: choose a runtime"
            " of several processes (--runtime), or options of the backend that do not split models (--backend.*)"
        )
    for name, role in start.roles.items():
        if role.sequence_parallel > 1:
            raise UserError(
                f"{name}.sequence_parallel {role.sequence_parallel} computes each row in so many processes, and runtime local"
                " has one: choose --runtime ray, or leave it out"
            )
