"""The engine ``http``: the host's protocol on one side, and on the other a thread with the event loop of all servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig

from rlhf_engine_http.addresses import ServerFile
from rlhf_engine_http.fleet import Fleet
from rlhf_engine_http.servers import SHAPES, Model
from rlhf_engine_http.weights import Stored, WeightFiles
from rlhf_host import Generation, Metric, RunError, SampleKey, Sampling, UserError
from rlhf_host.distributed import ends_of
from rlhf_host.engines import Request, call_by_path, check_request
from rlhf_host.models import quiet_transformers
from rlhf_host.protocols import NO_WEIGHTS, Buckets, EngineStart

T = TypeVar("T")

CLOSE_S = 10.0
"""Seconds that requests have to end in."""
PROBE = 128
"""Tokens of the prompt on which servers are compared: several blocks of any cache, so that a stale one shows."""


class HttpEngine:
    """Samples from servers.

    Raises:
        UserError: the model cannot be read, or a server cannot be used.
    """

    dead = False

    def __init__(self, options: Any, urls: Sequence[str], listed: ServerFile | None, key: str | None, start: EngineStart):
        self.version = NO_WEIGHTS
        self._closed = False
        self._since: float | None = None
        self._open, self._busy_s = 0, 0.0
        directory = Path(str(start.model))
        config, model = _model_of(directory, start.tokenizer)
        self._vocabulary = model.vocabulary
        self._files = WeightFiles(options.directory, directory, config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlhf-http", daemon=True)
        self._thread.start()
        self._fleet = Fleet(options, urls, listed, key, model)
        try:
            self._do(self._fleet.start())
            self.context_length = self._fleet.context_length
            if start.version != NO_WEIGHTS:
                self._bring(self._files.copy(directory, start.version), start.version)
        except BaseException:
            self._end()
            raise
        self._loader = _Loader(self._load)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was open."""
        since = self._since
        return self._busy_s + (time.perf_counter() - since if since is not None else 0.0)

    @property
    def exact(self) -> bool:
        return self._fleet.exact

    def expect(self, count: int) -> None:
        """Does nothing: servers batch continuously, so no request waits for others."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        request = Request.of(token_ids, sampling, key)
        check_request(request, engine="http", vocabulary=self._vocabulary, context_length=self.context_length)
        if self._closed:
            raise RunError("engine http is closed")
        if self.version == NO_WEIGHTS:
            raise RunError("engine http has no weights of this run: a sync has to bring them before it generates")
        self._open += 1
        self._since = self._since or time.perf_counter()
        try:
            return await self._later(self._fleet.generate(request))
        finally:
            self._open -= 1
            if not self._open and self._since is not None:
                self._busy_s, self._since = self._busy_s + time.perf_counter() - self._since, None

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        return [await asyncio.to_thread(call_by_path, function, self._loader, arguments)]

    def set_version(self, version: int) -> None:
        if self.version != version:
            raise RunError(f"engine http: the servers have the weights of version {self.version}, not {version}")

    async def sleep(self) -> None:
        """Does nothing: the memory is the servers'."""

    async def wake(self) -> None:
        pass

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._end)

    async def metrics(self) -> Sequence[Metric]:
        return [] if self._closed else await self._later(self._fleet.metrics())

    def _load(self, buckets: Buckets, version: int) -> None:
        self.version = NO_WEIGHTS
        store = self._files.write if self._fleet.need_files else self._files.hold
        self._bring(store(buckets, version), version)

    def _bring(self, stored: Stored, version: int) -> None:
        self._do(self._fleet.bring(stored, version))
        self.version = version

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _later(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` on the loop of the servers. Cancelling it there is how closing ends what waits."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed:
                raise RunError("the engine was closed while requests were pending") from None
            raise

    def _end(self) -> None:
        """Ends the loop and its thread, and removes the files."""

        async def stop() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=CLOSE_S)
            await self._fleet.close()

        self._do(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._files.close()


class _Loader:
    """The weights' end of a sync (``rlhf_host.protocols.Loader``)."""

    engine, rank, size, device = "http", 0, 1, torch.device("cpu")

    def __init__(self, load: Callable[[Buckets, int], None]):
        self.load = load
        self.state: dict[str, Any] = {}


def _model_of(directory: Path, tokenizer: Any) -> tuple[Any, Model]:
    """Returns the configuration of the model in ``directory``, and what servers must share with it."""
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(directory)
            ends = ends_of(str(directory), tokenizer)
    except (OSError, ValueError) as error:
        raise UserError(f"engine http cannot read the model in {directory}: {error}") from error
    text = config.get_text_config()
    special = set(getattr(tokenizer, "all_special_ids", ()))
    ordinary = [token for token in range(min(text.vocab_size, 4096)) if token not in special]
    length = getattr(text, "max_position_embeddings", None)
    count = PROBE if length is None else min(PROBE, length // 2)
    probe = [ordinary[(7 * place * place + 3 * place) % len(ordinary)] for place in range(count)]
    shape = {name: getattr(text, name) for name in SHAPES if getattr(text, name, None) is not None}
    name = str(getattr(tokenizer, "name_or_path", "") or directory)
    return config, Model(name, text.vocab_size, length, frozenset(ends), shape, probe)
