"""An engine in a process of its own, and its face here: what a runtime does, with a pipe."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from pathlib import Path
from typing import Any

from rlhf_host.errors import RunError, UserError


def serve(pipe: Any) -> None:
    """Answer ``(number, method, arguments)`` until the other side is gone; many at once."""
    import torch

    from rlhf_host.engines.plain_path import PlainKernels
    from rlhf_host.engines.transformers import Transformers
    from rlhf_host.models.loading import load_tokenizer, quiet_transformers
    from rlhf_host.protocols import EngineStart
    from rlhf_host.runtimes.compute import OneThread

    torch.set_num_threads(1)
    engine: Any = None

    async def build(directory: str) -> None:
        from transformers import AutoModelForCausalLM

        from rlhf_host.config.schema import RoleConfig

        nonlocal engine
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(directory).eval()
        tokenizer = load_tokenizer(RoleConfig(model=directory))
        start = EngineStart(model=model, tokenizer=tokenizer, version=-1, compute=OneThread(1), kernels=PlainKernels())
        engine = Transformers(Transformers.Options(autocast="off")).start(start)

    async def answer(number: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            if method == "build":
                result = await build(**arguments)
            elif method == "set_version":
                result = engine.set_version(**arguments)
            else:
                result = await getattr(engine, method)(**arguments)
            pipe.send((number, True, result))
        except Exception as error:
            pipe.send((number, False, error))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks = set()
        while True:
            try:
                message = await loop.run_in_executor(None, pipe.recv)
            except EOFError:
                return
            tasks.add(asyncio.create_task(answer(*message)))

    asyncio.run(main())


FORKING = multiprocessing.get_context("forkserver")
"""Engines are forked from a process that has imported what they import."""
FORKING.set_forkserver_preload(["rlhf_host.engines.embedded", "transformers.models.llama.modeling_llama"])


class EngineProcess:
    """Has the face that a sync plugin and the probe see. ``version`` is what it was told, as in any runtime."""

    def __init__(self) -> None:
        self.pipe, theirs = FORKING.Pipe()
        self.process = FORKING.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.version = -1
        self._numbers = itertools.count()
        self._open: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    async def build(self, directory: Path) -> None:
        self.version = -1
        await self._ask("build", directory=str(directory))

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        return await self._ask("run", function=function, **arguments)

    async def generate(self, token_ids: Any, sampling: Any, key: Any) -> Any:
        return await self._ask("generate", token_ids=token_ids, sampling=sampling, key=key)

    def set_version(self, version: int) -> None:
        self.version = version

    async def pretend(self, version: int) -> None:
        """The engine itself believes that it has been synced."""
        await self._ask("set_version", version=version)
        self.version = version

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    async def _ask(self, method: str, **arguments: Any) -> Any:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        future = loop.create_future()
        self._open[number] = (loop, future)
        try:
            self.pipe.send((number, method, arguments))
        except OSError:
            raise RunError("the engine's process has ended") from None
        return await future

    def _listen(self) -> None:
        try:
            while True:
                number, good, result = self.pipe.recv()
                loop, future = self._open.pop(number)
                loop.call_soon_threadsafe(_settle, future, good, result)
        except (EOFError, OSError):
            for loop, future in self._open.values():
                loop.call_soon_threadsafe(_settle, future, False, RunError("the engine's process has ended"))


def _settle(future: asyncio.Future[Any], good: bool, result: Any) -> None:
    if not future.done():
        future.set_result(result) if good else future.set_exception(result)


# --- run beside the engine's weights ----------------------------------------------------------------


def weights_here(loader: Any) -> dict[str, Any]:
    """The engine's weights as arrays (``loader.load`` belongs to the engine's module only by its bound method)."""
    model = loader.load.__self__.model
    return {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}


def shared_memory_here(loader: Any) -> int:
    return shared_mappings()


def shared_mappings() -> int:
    """How many of this process's mappings are of a sync's memory."""
    return sum("rlhf-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())


__all__ = ["EngineProcess", "RunError", "UserError", "shared_mappings"]
