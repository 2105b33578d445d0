"""The runtime ``boxed``: roles and engine in one spawned process, asked over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import pickle
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhf_host import Generation, RunError, Sampling, SyncTarget
from rlhf_host.distributed import EngineSetup, RemoteRoles, plain, start_engine
from rlhf_host.errors import LostError
from rlhf_host.protocols import Runtime, RuntimeStart, RuntimeTraits, Update
from rlhf_host.runtimes.building import check_state


class Boxed:
    """Everything but the controller is in a box."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = RuntimeTraits(debug=False, remote=True, sync="ipc")

    def __init__(self, options: Options):
        self.options = options

    def describe(self, start: RuntimeStart) -> Iterable[str]:
        return [f"{', '.join(start.roles)} and an engine in one box"]

    def start(self, start: RuntimeStart) -> Runtime:
        return BoxedRuntime(start)


# --- out here -----------------------------------------------------------------------------------


class Box:
    """Answers come in the order in which they are ready; a thread gives them to who asked."""

    def __init__(self, *setups: Any):
        self.pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(there, *setups), daemon=True, name="box")
        self.process.start()
        there.close()
        self.lock, self.numbers, self.waiting = threading.Lock(), itertools.count(), dict[int, Future[Any]]()
        self.over: Exception | None = None
        threading.Thread(target=self._read, daemon=True, name="box").start()

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            if self.over is not None:
                raise type(self.over)(*self.over.args)
            number = next(self.numbers)
            self.waiting[number] = future
            self.pipe.send_bytes(pickle.dumps((number, method, arguments)))
        future.number = number  # type: ignore[attr-defined]
        return future

    async def await_(self, method: str, *arguments: Any) -> Any:
        future = self.ask(method, *arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with contextlib.suppress(RunError):
                self.ask("cancel", future.number)  # type: ignore[attr-defined]
            raise

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, result, error = pickle.loads(self.pipe.recv_bytes())
                with self.lock:
                    future = self.waiting.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(result) if error is None else future.set_exception(error)
        self.end(LostError("the box is lost"))

    def end(self, reason: Exception) -> None:
        with self.lock:
            self.over = self.over or reason
            left, self.waiting = self.waiting, {}
        for future in left.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self.over)

    def close(self) -> None:
        self.end(RunError("the box is closed"))
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps((-1, "close", ())))
        self.process.join(10)
        self.process.kill()
        self.process.join()


class BoxedRuntime:
    def __init__(self, start: RuntimeStart):
        self.tokenizer, self.bring, self.needs = start.tokenizer, start.bring, start.needs
        self.box = Box(RemoteRoles.of(start), EngineSetup.of(start))
        try:
            up = self.box.ask("start").result()
        except BaseException:
            self.box.close()
            raise
        self.context_lengths, self.exact, version, context_length = up
        self.engine = BoxedEngine(self.box, version, context_length)
        self.trainer, self.source = BoxedTrainer(self.box), BoxedSource(self.box)
        self.targets = [SyncTarget("box", self.engine)]

    async def sync(self, version: int) -> None:
        await self.bring(self.targets, self.source, version)

    def save_role(self, name: str, directory: Path) -> None:
        self.box.ask("save_role", name, directory).result()
        self.tokenizer.save_pretrained(directory)

    def save_state(self, directory: Path) -> None:
        self.box.ask("save_state", directory).result()

    def load_state(self, directory: Path) -> None:
        check_state(directory, self.needs)
        self.box.ask("load_state", directory).result()

    async def close(self) -> None:
        await asyncio.to_thread(self.box.close)


class BoxedTrainer:
    def __init__(self, box: Box):
        self.box, self.compute_s = box, 0.0

    def outputs(self, role: str, what: str, batch: Any) -> Any:
        result, self.compute_s = self.box.ask("outputs", role, what, batch.batch()).result()
        return result

    def topk(self, role: str, k: int, batch: Any) -> Any:
        result, self.compute_s = self.box.ask("topk", role, k, batch.batch()).result()
        return result

    def update(self, batch: Any, *, sampled_now: bool) -> Update:
        result, self.compute_s = self.box.ask("update", batch.batch(), sampled_now).result()
        return result

    def adjust(self, role: str, *, lr: float) -> None:
        self.box.ask("adjust", role, lr).result()


class BoxedSource:
    def __init__(self, box: Box):
        self.box = box

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        return [await self.box.await_("run_source", function, arguments)]


class BoxedEngine:
    exact, dead = True, False

    def __init__(self, box: Box, version: int, context_length: int | None):
        self.box, self.version, self.context_length, self.busy_s = box, version, context_length, 0.0

    def expect(self, count: int) -> None:
        self.box.ask("expect", count)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: tuple[int, ...]) -> Generation:
        generation, self.busy_s = await self.box.await_("generate", list(token_ids), sampling, key)
        return generation

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        results, self.version = await self.box.await_("run_engine", function, arguments)
        return results

    def set_version(self, version: int) -> None:
        if self.version != version:
            raise RunError(f"the box holds weights of version {self.version}, not {version}")


# --- in the box ---------------------------------------------------------------------------------


def serve(pipe: Any, roles: RemoteRoles, engine_setup: EngineSetup) -> None:
    """The process's program."""
    asyncio.run(Inside(pipe).work(roles, engine_setup))


class Inside:
    engine: Any

    def __init__(self, pipe: Any):
        self.pipe, self.tasks, self.engine = pipe, dict[int, asyncio.Task[None]](), None

    async def work(self, roles: RemoteRoles, engine_setup: EngineSetup) -> None:
        from rlhf_host.runtimes.compute import OneThread

        self.compute, self.sampling = OneThread(1), OneThread(1)
        self.setups = roles, engine_setup
        while True:
            try:
                message = await asyncio.to_thread(self.pipe.recv_bytes)
            except (EOFError, OSError):
                break
            number, method, arguments = pickle.loads(message)
            if method == "close":
                if self.engine is not None:
                    await self.engine.close()
                break
            if method == "cancel":
                if (task := self.tasks.get(*arguments)) is not None:
                    task.cancel()
                continue
            self.tasks[number] = asyncio.create_task(self.answer(number, getattr(self, method), arguments))

    async def answer(self, number: int, method: Any, arguments: Any) -> None:
        result, error = None, None
        try:
            result = await method(*arguments)
        except Exception as raised:
            error = plain(raised)
        finally:
            del self.tasks[number]
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps((number, result, error)))

    async def start(self) -> Any:
        self.roles: Any = await self.do(self.setups[0].build)
        self.engine = start_engine(self.setups[1], self.sampling)
        engine = self.engine
        return self.roles.context_lengths, self.roles.exact and engine.exact, engine.version, engine.context_length

    async def do(self, function: Any, *arguments: Any, **named: Any) -> Any:
        return await asyncio.wrap_future(self.compute.submit(partial(function, *arguments, **named)))

    async def outputs(self, role: str, what: str, batch: Any) -> Any:
        return await self.do(self.roles.worker.outputs, role, what, batch), self.roles.worker.compute_s

    async def topk(self, role: str, k: int, batch: Any) -> Any:
        return await self.do(self.roles.worker.topk, role, k, batch), self.roles.worker.compute_s

    async def adjust(self, role: str, lr: float) -> None:
        await self.do(self.roles.worker.adjust, role, lr=lr)

    async def update(self, batch: Any, sampled_now: bool) -> Any:
        return await self.do(self.roles.worker.update, batch, sampled_now=sampled_now), self.roles.worker.compute_s

    async def save_role(self, *arguments: Any) -> None:
        await self.do(self.roles.save_role, *arguments)

    async def save_state(self, *arguments: Any) -> None:
        await self.do(self.roles.save_state, *arguments)

    async def load_state(self, *arguments: Any) -> None:
        await self.do(self.roles.load_state, *arguments)

    async def run_source(self, function: str, arguments: Any) -> Any:
        return await asyncio.to_thread(self.roles.run, function, arguments)

    async def run_engine(self, function: str, arguments: Any) -> Any:
        results = await self.engine.run(function, **arguments)
        return results, self.engine.version

    async def expect(self, count: int) -> None:
        self.engine.expect(count)

    async def generate(self, token_ids: list[int], sampling: Sampling, key: tuple[int, ...]) -> Any:
        return await self.engine.generate(token_ids, sampling, key), self.engine.busy_s
