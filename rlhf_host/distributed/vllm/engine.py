"""The vLLM engine: continuous batching over a paged cache, with its own weights, which a sync plugin brings."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlhf_host.data.processor import PROCESSOR_FILES, Processor
from rlhf_host.distributed.vllm.arguments import has_unsynced, is_exact, versions_by_token
from rlhf_host.distributed.vllm.measures import Measures
from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.distributed.vllm.process import CoreWatch, paused
from rlhf_host.distributed.vllm.remote_runs import RemoteRuns
from rlhf_host.distributed.vllm.requests import Sent, answer, answer_of, sampling_params
from rlhf_host.distributed.vllm.startup import ends_of, first_line, in_processes, start_vllm
from rlhf_host.distributed.vllm.weights import AdapterWeights, WeightLoader, WholeWeights
from rlhf_host.engines.loading import call_by_path
from rlhf_host.engines.requests import Request, check_request
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.threads import Threads
from rlhf_host.protocols import NO_WEIGHTS, EngineStart
from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.records.pictures import images_of, shown_in
from rlhf_host.records.tensors import Metric
from rlhf_host.scratch import Scratch
from rlhf_host.spans import span

log = logging.getLogger(__name__)

GROUPS = 100_000
"""Maximum number of groups whose first version is remembered."""
STEP_S = 600.0
"""Seconds after which a step counts as stuck: the process that computes it was stopped, or hangs."""


class VLLMEngine:
    """Generates with vLLM, stepped by a thread of this process, wherever its core runs; requests come and go between any two
    steps.

    ``version = -1`` starts without reading weights: ``generate`` raises until a sync has brought some. A request in flight
    during a sync goes on. Its prefix is computed again under the new weights, unless ``kv_after_sync`` is ``keep``. Each token
    has the version it was sampled with. A completion depends only on its request's key and the weights, except for rounding,
    which differs between batches.

    Raises:
        UserError: vLLM cannot serve the model as configured.
    """

    def __init__(self, options: Vllm.Options, start: EngineStart):
        self.multiprocess = in_processes(options)
        self.options, self.version = options, start.version
        self.busy_s = 0.0
        self._measures = Measures()
        self.asleep = False
        self._room = False
        """True in sleep if weights have their memory again."""
        self._actions: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._running: dict[str, Sent] = {}
        self._salts: dict[Hashable, int] = {}
        """Group → the version of its first request, with ``keep``, so that no later group finds its keys and values."""
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._core: CoreWatch | None = None
        self._closed = False
        self._step_began: float | None = None
        self._adapter_rank = start.adapter_rank
        self._processor: Processor | None = None
        self._threads = Threads(4)
        self._shared: set[Path] = set()
        self._scratch = Scratch("rlhf-vllm-", tempfile.gettempdir())
        self._weights = AdapterWeights(self._scratch.path) if self._adapter_rank else WholeWeights()
        self._asked: deque[Callable[[], None]] = deque()
        """Calls of workers, which are done even while weights load."""
        # An adapter is small, and goes to vLLM's processes by a file.
        apart = self.multiprocess and not self._adapter_rank
        self._remote = RemoteRuns(self._ask, self._load_apart) if apart else None
        started: Future[None] = Future()
        # vLLM is made and stepped in one thread: the threads of OpenMP belong to the one that asked for them.
        self._thread = threading.Thread(target=self._work, args=(start, started), name="rlhf-vllm", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._scratch.close()
            raise

    @property
    def dead(self) -> bool:
        if self._closed:
            return False
        begun = self._step_began
        stuck = begun is not None and time.perf_counter() - begun > STEP_S
        return self._failure is not None or stuck or (self.multiprocess and self.llm.engine_core.resources.engine_dead)

    @property
    def sampled(self) -> int:
        return self._measures.sampled

    def expect(self, count: int) -> None:
        """Does nothing: batching is continuous, so no request waits for others."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        self._check_alive()
        request = Request.of(token_ids, sampling, key)
        check_request(
            request,
            engine="vllm",
            vocabulary=self._vocabulary,
            context_length=self.context_length,
            remedy=", or engine.max_model_len higher",
        )
        call = Sent(request, asyncio.get_running_loop())
        self._post(lambda: self._add(call))
        try:
            return await call.future
        except asyncio.CancelledError:
            with contextlib.suppress(RunError):
                self._post(lambda: self._abort(call))
            raise

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        return await asyncio.wrap_future(self._threads.submit(lambda: self._run(function, arguments)))

    async def metrics(self) -> Sequence[Metric]:
        return self._measures.metrics()

    def set_version(self, version: int) -> None:
        """Sets the version of weights that came in another way than by the loader. Forgets cached prompts."""

        def take() -> None:
            with self._paused():
                self._take_version(version)

        self._submit(take).result()

    async def sleep(self) -> None:
        """Frees the memory of weights and cache until ``wake``; does nothing on a CPU, where vLLM cannot.

        Raises:
            RunError: requests are in flight.
        """
        await asyncio.wrap_future(self._submit(lambda: self._sleep(keep=True)))

    async def sleep_empty(self) -> None:
        await asyncio.wrap_future(self._submit(lambda: self._sleep(keep=has_unsynced(self.options.extra, self._adapter_rank))))

    async def wake_weights(self) -> None:
        await asyncio.wrap_future(self._submit(self._wake_weights))

    async def wake(self) -> None:
        await asyncio.wrap_future(self._submit(self._wake))

    async def close(self) -> None:
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify()
        self._threads.close()
        await asyncio.to_thread(self._thread.join)

    def _run(self, function: str, arguments: Mapping[str, Any]) -> list[Any]:
        if self._remote is not None:
            return self._remote.run(function, arguments)
        return [call_by_path(function, self.loader, arguments)]

    def _post(self, action: Callable[[], None], queue: deque[Callable[[], None]] | None = None) -> None:
        with self._condition:
            self._check_alive()
            (self._actions if queue is None else queue).append(action)
            self._condition.notify()

    def _submit(self, action: Callable[[], Any], queue: deque[Callable[[], None]] | None = None) -> Future[Any]:
        """Runs ``action`` in the engine's thread, between two steps."""
        if threading.current_thread() is self._thread:
            raise RunError("engine vllm: weights are loaded one set at a time")
        future: Future[Any] = Future()

        def act() -> None:
            try:
                self._check_alive()
                future.set_result(action())
            except BaseException as error:
                future.set_exception(self._cause(error))

        self._post(act, queue)
        return future

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of ``WorkerRuns`` in all workers; returns the results by rank."""
        return self._submit(lambda: self._ask_now(method, *arguments), self._asked).result()

    def _ask_now(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self.llm.collective_rpc("call_weight_runs", args=(method, *arguments))
        return answers

    def _load_apart(self, work: Callable[[Callable[..., list[Any]]], None], version: int) -> None:
        def ask(method: str, *arguments: Any) -> list[Any]:
            self._check_alive()
            self._act(self._asked)
            return self._ask_now(method, *arguments)

        self._submit(lambda: self._load(lambda: work(ask), version)).result()

    def _cause(self, error: BaseException) -> BaseException:
        """Returns what happened to vLLM's core, if that is why ``error`` was raised: vLLM says only that it is dead."""
        return (self._core.failure if self._core else None) or error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RunError(f"engine vllm died: {first_line(self._failure)}") from self._failure
        if self._closed:
            raise RunError("the engine is closed")

    def _check_ready(self) -> None:
        self._check_alive()
        if self.version <= NO_WEIGHTS:
            raise RunError("engine vllm has no weights of this run: a sync has to bring them before it generates")
        if self.asleep:
            raise RunError("engine vllm is asleep: wake() it before it generates")

    def _work(self, start: EngineStart, started: Future[None]) -> None:
        try:
            self._start(start)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closed:
                with self._condition:
                    while not self._asked and not self._actions and not self._running and not self._closed:
                        self._condition.wait()
                self._act(self._asked)
                self._act(self._actions)
                if self._running and not self._closed:
                    self._step()
        except BaseException as error:
            failure = self._cause(error)
            if failure is error:
                log.exception("vLLM died")
            with self._condition:
                self._failure = failure
            self._fail_running(RunError(f"engine vllm died: {first_line(failure)}"))
        finally:
            self._stop()

    def _start(self, start: EngineStart) -> None:
        from vllm.inputs.engine import tokens_input

        path = str(start.model)
        self.llm, device = start_vllm(
            self.options, path, start.tokenizer, start.version, self._scratch.path, self._adapter_rank
        )
        if any(Path(path, name).is_file() for name in PROCESSOR_FILES):
            self._processor = Processor.at(path)
            if (theirs := self.llm.renderer.mm_processor) is not None:
                theirs.info.get_hf_processor()  # now, because the directory need not stay
        if self.multiprocess:
            self._core = CoreWatch(self.llm.engine_core)
            self._shared = {Path(name) for names in self.llm.collective_rpc("shared_memory") for name in names}
        settings, cache = self.llm.vllm_config.model_config, self.llm.vllm_config.cache_config
        self._prompt, self._ends = tokens_input, ends_of(path, start.tokenizer)
        self._vocabulary = int(settings.get_vocab_size())
        # vLLM keeps a block for itself. As of 0.25 it fits the context to all blocks, and a request of that length never ends.
        whole = settings.max_model_len == (cache.num_gpu_blocks or 0) * cache.block_size
        self.context_length: int = settings.max_model_len - whole * cache.block_size
        self.exact = is_exact(str(settings.dtype).removeprefix("torch."), settings.quantization, cache.cache_dtype)
        self._can_sleep = settings.enable_sleep_mode
        self.loader = WeightLoader(self, device)
        self._measures.watch(self.llm.engine_core)

    def _act(self, queue: deque[Callable[[], None]]) -> None:
        """Runs posted actions one by one. If one ends the engine, the later ones stay in the queue and get the error."""
        for _ in range(len(queue)):
            with self._condition:
                action = queue.popleft()
            action()

    def _step(self) -> None:
        self._step_began = time.perf_counter()
        with span("generate", self, "busy_s"):
            outputs = [output for output in self.llm.step() if output.finished and output.request_id in self._running]
        self._step_began = None
        calls = [(self._running[output.request_id], output) for output in outputs]
        given = [(call, answer_of(call.request, output, self.version)) for call, output in calls]
        for output in outputs:
            del self._running[output.request_id]
        answer(given)  # last: whoever gets one finds the others only in ``_running``

    def _add(self, call: Sent) -> None:
        if call.future.cancelled():
            return
        try:
            self._check_ready()  # a sync may have failed since
            number = str(next(self._numbers))
            asked = sampling_params(call.request, self._ends, self.context_length, self._vocabulary, seeds=self.options.seeds)
            prompt = self._prompt_of(call.request)
            self.llm.add_request(number, prompt, asked, lora_request=self._weights.adapter)
        except Exception as error:
            ours = isinstance(error, RunError | UserError)
            answer([(call, error if ours else UserError(f"engine vllm: {first_line(error)}"))])
            return
        call.number = number
        self._running[number] = call

    def _prompt_of(self, request: Request) -> Any:
        """Returns a request's prompt in vLLM's form. With pictures it has placeholders, which vLLM's own processor expands."""
        salt, images = self._salt(request), images_of(request.token_ids)
        if not images:
            return self._prompt(list(request.token_ids), cache_salt=salt)
        if self._processor is None:
            raise UserError("engine vllm: the model has no processor for pictures")
        ids = self._processor.collapse(request.token_ids, images, [begin for begin, _ in shown_in(request.token_ids)])
        prompt: dict[str, Any] = {"prompt_token_ids": ids, "multi_modal_data": {"image": [each.load() for each in images]}}
        if salt is not None:  # features of older weights have other names
            prompt |= {"cache_salt": salt, "multi_modal_uuids": {"image": [f"{each.key}-{salt}" for each in images]}}
        return prompt

    def _salt(self, request: Request) -> str | None:
        if self.options.kv_after_sync == "recompute":
            return None
        group = request.key[:-2]  # the sample and its turn come last
        version = self._salts[group] = self._salts.pop(group, self.version)
        if len(self._salts) > GROUPS:
            del self._salts[next(iter(self._salts))]
        return str(version)

    def _abort(self, call: Sent) -> None:
        if self._running.pop(call.number, None) is not None:
            self.llm.abort_request([call.number])

    def _fail_running(self, error: BaseException) -> None:
        failed = [(call, error) for call in self._running.values()]
        self._running.clear()
        answer(failed)

    def _stop(self) -> None:
        self._fail_running(RunError("the engine was closed while requests were pending"))
        self._act(self._asked)  # each learns that the engine is no more, and tells its caller
        self._act(self._actions)
        with contextlib.suppress(Exception):
            self.llm.engine_core.shutdown()
        for path in self._shared:  # a core that takes long to end is killed, and leaves it
            path.unlink(missing_ok=True)
        del self.llm
        self._scratch.close()

    def _load(self, work: Callable[[], None], version: int) -> None:
        if self.asleep and not self._room:
            raise RunError("engine vllm is asleep: wake() it before weights come")
        with self._paused():
            self.version = NO_WEIGHTS
            try:
                if self._adapter_rank:
                    self.llm.abort_request(list(self._running))
                work()
            except Exception as error:
                reason = f"engine vllm has no usable weights: loading version {version} failed ({first_line(error)})"
                self.llm.abort_request(list(self._running))
                self._fail_running(RunError(reason))
                raise RunError(reason) from error
            self._take_version(version)
            if self._adapter_rank:
                again = list(self._running.values())
                self._running.clear()
                for call in again:
                    self._add(call)

    def _take_version(self, version: int) -> None:
        """Sets the version. Unless they are kept, keys and values of the old weights are removed, those of running requests
        too. Without ``reset_running_requests`` vLLM keeps everything as long as anything runs, and tells so only by its return
        value.
        """
        if self.options.kv_after_sync == "recompute":
            with self._measures.emptying():
                forgotten = self.llm.reset_prefix_cache(reset_running_requests=True)
            if not forgotten:
                raise RunError("engine vllm could not forget its cached prompts")
            if self._processor is not None:
                self.llm.reset_encoder_cache()  # the features of pictures, which it keeps by their content
        if versions_by_token():
            self.llm.set_weight_version(str(version))
        self.version = version

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        """Pauses computation for new weights inside the block. In this process nothing needs it: the block runs between two steps.

        Raises:
            RunError: nobody could tell which weights sampled which token of a request; with adapters requests begin anew instead.
        """
        if self._running and not self._adapter_rank and not versions_by_token():
            raise RunError("engine vllm: before 0.32 vLLM takes no weights under requests: give --in-flight-updates false")
        return paused(self.llm.engine_core) if self.multiprocess else contextlib.nullcontext()

    def _sleep(self, *, keep: bool) -> None:
        if self._running:
            raise RunError(f"engine vllm cannot sleep with {len(self._running)} requests in flight")
        if self.asleep:
            return
        if self._can_sleep:
            self.llm.sleep(level=1 if keep else 2)
        self.asleep = True
        if not keep:
            self.version = NO_WEIGHTS

    def _wake_weights(self) -> None:
        if self.asleep and not self._room and self._can_sleep:
            self.llm.wake_up(["weights"])
        self._room = self.asleep

    def _wake(self) -> None:
        if self.asleep and self._can_sleep:
            self.llm.wake_up(["kv_cache"] if self._room else None)
        self.asleep = self._room = False
