"""The extension ``profile``: chosen steps are recorded in every process of the run, and put together."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationInfo, field_validator

from rlhf_host import Outcome, RunContext, hookimpl
from rlhf_host.commands import first_line, write_file
from rlhf_profile.steps import Steps, as_text

log = logging.getLogger(__name__)

FOLDER, TIMELINE, RECORD = "profiles", "timeline.json", "record.json"
READINGS = 5
"""Questions for the clock of each process."""
AFTER_S = 30.0
"""Seconds that the end of a failed run waits for what processes have recorded: some of them may be dead."""


class Profile:
    """Chosen steps in detail: torch's profiler in every process, and one timeline over all of them for Perfetto."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        steps: str = Field(description="steps to record: numbers and ranges, as in 3,10-12")
        torch: bool = Field(
            True, description="record operations with torch's profiler; false: only the timeline, which costs nearly nothing"
        )
        begin: Literal["step", "update"] = Field(
            "step",
            description="what torch's profiler begins with; update: it leaves out sampling, and all else before the first update",
        )
        shapes: bool = Field(False, description="with the shapes of operations' inputs")
        stack: bool = Field(False, description="with the lines of Python that called them: several times slower")
        memory: bool = Field(
            False, description="with a snapshot of the memory of each GPU and its allocations, for pytorch.org/memory_viz"
        )
        seconds: PositiveFloat = Field(60.0, description="longest time that torch's profiler records in a process and step")
        max_mb: PositiveFloat = Field(1000.0, description="megabytes of traces after which the run records only timelines")

        @field_validator("steps", mode="before")
        @classmethod
        def _steps(cls, value: Any) -> Any:
            text = as_text(value)
            return str(Steps(text)) if isinstance(text, str) else text

        @field_validator("begin", "shapes", "stack", "memory")
        @classmethod
        def _used(cls, value: Any, others: ValidationInfo) -> Any:
            if value not in (False, "step") and not others.data.get("torch", True):
                raise ValueError("this is a setting of torch's profiler, and profile.torch is false: leave one of them out")
            return value

    def __init__(self, options: Options):
        self.options, self.steps = options, Steps(options.steps)
        self.recorded: set[int] = set()
        """Steps that were recorded from begin to end."""
        self._context: RunContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._step: int | None = None
        """The step that is being recorded."""
        self._bytes = 0

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        if context.processes is None or context.run_dir is None:
            log.warning("profile: nothing is trained here, so no step is recorded")
            return
        self._context, self._loop = context, asyncio.get_running_loop()
        first = max(context.resume_step, 0) + 1
        if context.steps is not None and (beyond := self.steps.outside(first, context.steps)):
            log.warning("profile.steps: this run has the steps %d to %d, and not %s", first, context.steps, beyond)
        if self.options.torch:
            from rlhf_profile.process import check_torch

            check_torch()
        await self._turn(first - 1, None)

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._context is not None and (self._step == step or step + 1 in self.steps):
            self._wait(self._turn(step, metrics.get("time/step")))

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        if self._context is None:
            return
        if (step := self._step) is not None:
            self._step = None
            finished = outcome.status == "finished"  # before the planned end, so the step did not begin
            if not finished:
                log.warning("profile: step %d did not end, so its record ends with the run", step)
            with self._forgiving(step):
                await asyncio.wait_for(self._end(step, None, whole=False, write=not finished), AFTER_S)
        if left := self.steps.without(self.recorded):
            log.warning("profile.steps: %s were not recorded in this run, which ended after step %d", left, outcome.step)

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for work on the run's event loop, which does not run between two steps with ``--debug``."""
        assert self._loop is not None
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        else:
            self._loop.run_until_complete(work)

    async def _turn(self, step: int, seconds: float | None) -> None:
        """Goes from one step to the next."""
        if self._step == step:
            self._step = None
            with self._forgiving(step):
                await self._end(step, seconds)
        if self._step is None:
            with self._forgiving(step + 1):
                await self._begin(step + 1)

    @contextmanager
    def _forgiving(self, step: int) -> Iterator[None]:
        """Lets the run go on without the record of a step, whatever goes wrong with that, as when an engine dies."""
        try:
            yield
        except Exception as error:
            from rlhf_profile.process import abandon

            self._step = None
            abandon()
            log.warning("profile: step %d is not recorded: %s", step, first_line(error))

    async def _begin(self, step: int) -> None:
        assert self._context is not None
        if step not in self.steps or (self._context.steps is not None and step > self._context.steps):
            return
        from rlhf_profile import process

        own = self.options
        room = self._bytes < own.max_mb * 1e6
        if own.torch and not room:
            log.warning("profile: step %d has only a timeline: traces have %.0f MB (profile.max_mb)", step, self._bytes / 1e6)
        settings = own.model_dump(include={"begin", "shapes", "stack", "memory", "seconds"})
        settings |= {"torch": own.torch and room, "step": step}
        process.begin(None, **settings)
        self._step = step
        await self._everywhere("begin", **settings)

    async def _everywhere(self, function: str, **arguments: Any) -> dict[str, list[Any]]:
        """Calls a function of ``rlhf_profile.process`` in all processes; returns results by who answered, and by rank."""
        assert self._context is not None
        assert self._context.processes is not None
        ends = self._context.processes()
        calls = (end.run(f"rlhf_profile.process:{function}", **arguments) for end in ends.values())
        return dict(zip(ends, await asyncio.gather(*calls), strict=True))

    async def _end(self, step: int, seconds: float | None, *, whole: bool = True, write: bool = True) -> None:
        """Ends the record of a step, and writes it.

        Args:
            seconds: ``time/step``.
            whole: the step ended.
            write: False: nothing of it is kept.
        """
        from rlhf_profile import process
        from rlhf_profile.clocks import Reading, offset
        from rlhf_profile.joining import Answer, joined

        assert self._context is not None
        assert self._context.run_dir is not None
        directory = (self._context.run_dir / FOLDER / f"step-{step:06d}").absolute()
        if write:
            shutil.rmtree(directory, ignore_errors=True)  # of an attempt before this one
        readings: dict[str, list[Reading]] = {}
        about = {process.identity(): process.look(None)}
        names = {process.identity(): "controller"}
        for _ in range(READINGS):
            asked = time.perf_counter_ns()
            looks = await self._everywhere("look")
            answered = time.perf_counter_ns()
            for who, ranks in looks.items():
                for rank, look in enumerate(ranks):
                    known = about.setdefault(look["identity"], look)
                    name = who if len(ranks) == 1 else f"{who} rank {rank}"
                    names.setdefault(known["identity"], name)
                    readings.setdefault(known["identity"], []).append(Reading(asked, look["now"], answered))
        own = process.machine()
        clocks = {
            identity: (0, 0) if look["machine"] == own else offset(readings[identity]) for identity, look in about.items()
        }
        if len(about) == 1:
            names[process.identity()] = "run"
        files = {identity: name.replace(" ", "-") for identity, name in names.items()}
        results = [process.finish(None, str(directory), files)]
        answers = await self._everywhere("finish", directory=str(directory), names=files)
        results += [result for ranks in answers.values() for result in ranks]
        if not write:
            shutil.rmtree(directory, ignore_errors=True)
            return
        parts = [
            Answer(names[each["identity"]], about[each["identity"]], clocks[each["identity"]], each)
            for each in results
            if each is not None
        ]
        timeline, record, notes = joined(step, parts, seconds)
        late = about.keys() - {each["identity"] for each in results if each is not None}
        notes += [f"{names[identity]} has no record: its process began during the step" for identity in sorted(late)]
        self._bytes += sum(size for part in parts for _, size in part.result["files"])
        for part in parts:
            if missing := [name for name, _ in part.result["files"] if not (directory / name).is_file()]:
                notes.append(f"{part.name}: {missing[0]} is on {part.look['host']}, whose run directory is not this one")
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / TIMELINE, json.dumps(timeline, separators=(",", ":")).encode())
        write_file(directory / RECORD, json.dumps(record, indent=1).encode() + b"\n")
        for note in notes:
            log.warning("profile: step %d: %s", step, note)
        if whole:
            self.recorded.add(step)
