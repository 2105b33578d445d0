"""The runtime ``local``: every role, the engine and the controller in this process."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from rlhf_host.protocols import Runtime, RuntimeStart, RuntimeTraits


class Local:
    """One worker with all roles, in this process. An engine that takes a module samples from the actor's own."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = RuntimeTraits(generates=True)

    def __init__(self, options: Options):
        self.options = options

    def describe(self, start: RuntimeStart) -> Iterable[str]:
        return ["everything in this process"]

    def start(self, start: RuntimeStart) -> Runtime:
        from rlhf_host.runtimes.local_runtime import LocalRuntime

        return LocalRuntime(start)
