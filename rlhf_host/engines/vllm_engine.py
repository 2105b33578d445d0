"""The vLLM engine: continuous batching over a paged cache, with weights of its own that a sync plugin brings."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from rlhf_host.engines.loading import call_by_path
from rlhf_host.engines.vllm import Vllm
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.threads import Threads
from rlhf_host.protocols import NO_WEIGHTS, Buckets, EngineStart
from rlhf_host.records.episodes import FinishReason, Generation, SampleKey, Sampling

log = logging.getLogger(__name__)

COLDEST = 0.01
"""vLLM raises lower temperatures to this one, and its log-probabilities with them."""
CPU_CACHE_BYTES = 1 << 29


def _scratch_directory() -> tuple[str, int]:
    """A place for weights on their way, in memory where there is such a one, and the lock that is held on it.

    What killed processes left there goes: their locks went with them. (Process numbers would not tell: containers may share
    the place and not the numbers.)
    """
    root = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    for left in root.glob("rlhf-vllm-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 60 and (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    path = tempfile.mkdtemp(prefix="rlhf-vllm-", dir=root)
    lock = _lock(Path(path))
    assert lock is not None
    return path, lock


def _lock(directory: Path) -> int | None:
    """The open directory, locked; ``None`` where another process has the lock."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened


class VLLMEngine:
    """Generates with vLLM in this process, stepped by a thread of its own; requests come and go between any two steps.

    ``version = -1`` starts without reading weights: ``generate`` refuses until a sync brought some. A request in flight during
    a sync goes on: its prefix is computed again under the new weights, and each token carries the version it was sampled with.
    A completion depends on its request's key and the weights alone, but for rounding, which differs between batches.

    Raises:
        UserError: when vLLM cannot serve the model as configured.
    """

    def __init__(self, options: Vllm.Options, start: EngineStart):
        devices = options.tensor_parallel_size * options.pipeline_parallel_size
        self.multiprocess = devices > 1 if options.multiprocess is None else options.multiprocess
        if devices > 1 and not self.multiprocess:
            raise UserError("engine vllm: several devices need multiprocess: true")
        self.options, self.path, self.tokenizer, self.version = options, str(start.model), start.tokenizer, start.version
        self.busy_s = 0.0
        self.asleep = False
        self._actions: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._running: dict[str, _Call] = {}
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._closed = False
        self._expected: set[str] | None = None
        self._threads = Threads(4)
        self._scratch, self._scratch_lock = _scratch_directory()
        started: Future[None] = Future()
        # vLLM is made and stepped in one thread: the threads of OpenMP belong to the one that asked for them.
        self._thread = threading.Thread(target=self._work, args=(started,), name="rlhf-vllm", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._clear_scratch()
            raise
        self.loader = WeightLoader(self)

    @property
    def dead(self) -> bool:
        """Whether vLLM's core ran in a process of its own and has died: nothing that was asked of it is answered then."""
        core = getattr(getattr(self, "llm", None), "engine_core", None)
        return not self._closed and bool(getattr(getattr(core, "resources", None), "engine_dead", False))

    # The async face.

    def expect(self, count: int) -> None:
        """Batching is continuous: nothing waits for others."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        self._check_ready()
        ids = list(token_ids)
        self._validate(ids, sampling)
        call = _Call(ids, sampling, key, asyncio.get_running_loop())
        self._post(lambda: self._add(call))
        try:
            return await call.future
        except asyncio.CancelledError:
            with contextlib.suppress(RunError):
                self._post(lambda: self._abort(call))
            raise

    async def run(self, function: str, **arguments: Any) -> Any:
        """``package.module:function`` called with this engine's loader, in a thread: it may wait, and sampling goes on."""
        return await asyncio.wrap_future(self._threads.submit(lambda: call_by_path(function, self.loader, arguments)))

    def set_version(self, version: int) -> None:
        """For weights that came in by another way than ``load_weights``. Forgets cached prompts."""
        self._submit(lambda: self._take_version(version)).result()

    async def sleep(self) -> None:
        """Give the weights' and the cache's memory back until ``wake``; does nothing on a CPU, where vLLM cannot.

        Raises:
            RunError: while requests are in flight.
        """
        await asyncio.wrap_future(self._submit(self._sleep))

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

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet."""
        return len(self._running)

    # Between the callers' threads and the engine's.

    def _post(self, action: Callable[[], None]) -> None:
        with self._condition:
            self._check_alive()
            self._actions.append(action)
            if len(self._actions) == 1:
                self._condition.notify()

    def _submit(self, action: Callable[[], Any]) -> Future[Any]:
        """Run ``action`` in the engine's thread, between two steps."""
        if threading.current_thread() is self._thread:
            raise RunError("engine vllm: weights are loaded one set at a time")
        future: Future[Any] = Future()

        def act() -> None:
            try:
                self._check_alive()
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self._post(act)
        return future

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RunError(f"engine vllm died: {_line(self._failure)}") from self._failure
        if self._closed:
            raise RunError("the engine is closed")

    def _check_ready(self) -> None:
        self._check_alive()
        if self.version <= NO_WEIGHTS:
            raise RunError("engine vllm has no weights of this run: a sync has to bring them before it generates")
        if self.asleep:
            raise RunError("engine vllm is asleep: wake() it before it generates")

    def _validate(self, ids: list[int], sampling: Sampling) -> None:
        if not ids:
            raise UserError("engine vllm: an empty prompt; give at least one token")
        if len(ids) >= self.context_length:
            raise UserError(
                f"engine vllm: a prompt of {len(ids)} tokens leaves no room in the engine's {self.context_length} positions; "
                "set data.max_prompt_tokens or rollout.max_tokens lower, or engine.max_model_len higher"
            )
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self._vocabulary)
            raise UserError(f"engine vllm: token {wrong} is not in the model's vocabulary of {self._vocabulary}")
        if sampling.max_new_tokens < 1 or sampling.top_k < 0:
            raise UserError(f"engine vllm: max_new_tokens ≥ 1 and top_k ≥ 0 are needed, not {sampling}")
        if sampling.temperature != 0 and sampling.temperature < COLDEST:
            raise UserError(f"engine vllm: temperature 0 (greedy) or ≥ {COLDEST} is needed, not {sampling.temperature}")
        if not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
            raise UserError(f"engine vllm: top_p in (0, 1] and min_p in [0, 1] are needed, not {sampling}")

    # The engine's thread.

    def _work(self, started: Future[None]) -> None:
        try:
            self._start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._closed:
                with self._condition:
                    while not self._actions and not self._running and not self._closed:
                        self._condition.wait()
                    actions = list(self._actions)
                    self._actions.clear()
                for action in actions:
                    action()
                if self._running and not self._closed:
                    self._step()
        except BaseException as error:
            log.exception("vLLM died")
            with self._condition:
                self._failure = error
            self._fail(self._running, RunError(f"engine vllm died: {_line(error)}"))
            self._running.clear()
        finally:
            self._stop()

    def _step(self) -> None:
        begun = time.perf_counter()
        finished = []
        for output in self.llm.step():
            call = self._running.pop(output.request_id, None) if output.finished else None
            if call is not None:
                finished.append((call, output.outputs[0]))
        self.busy_s += time.perf_counter() - begun
        for loop, pairs in _by_loop(finished).items():
            answers = [(call.future, self._answer(call, output)) for call, output in pairs]
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone
                loop.call_soon_threadsafe(_resolve, answers)

    def _answer(self, call: _Call, output: Any) -> Generation | BaseException:
        tokens = list(output.token_ids)
        if call.sampling.temperature == 0:
            logprobs = [0.0] * len(tokens)
        else:
            logprobs = list(output.logprobs.logprobs)[: len(tokens)]
        if len(logprobs) != len(tokens) or not all(map(math.isfinite, logprobs)):
            return RunError(f"generation under weight version {self.version} stopped: the model's logits are not finite")
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
        if output.finish_reason not in reasons:
            return RunError(f"engine vllm: a request ended with {output.finish_reason!r}")
        versions: list[int] = []
        for span in output.weight_versions or ():
            versions += [int(span.version)] * (span.end - span.start)
        return Generation(tokens, logprobs, versions, reasons[output.finish_reason])

    def _add(self, call: _Call) -> None:
        if call.future.cancelled():
            return
        try:
            self._check_ready()  # a sync may have failed since
            number = str(next(self._numbers))
            self.llm.add_request(number, self._prompt(call.token_ids), self._sampling_params(call))
        except Exception as error:
            ours = isinstance(error, RunError | UserError)
            self._fail({"": call}, error if ours else UserError(f"engine vllm: {_line(error)}"))
            return
        call.number = number
        self._running[number] = call

    def _abort(self, call: _Call) -> None:
        if self._running.pop(call.number, None) is not None:
            self.llm.abort_request([call.number])

    def _sampling_params(self, call: _Call) -> Any:
        wanted = call.sampling
        return self._params(
            max_tokens=min(wanted.max_new_tokens, self.context_length - len(call.token_ids)),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            seed=request_seed(call.key),
            stop=list(wanted.stop) or None,
            stop_token_ids=sorted(self._ends | set(wanted.stop_token_ids)),
            ignore_eos=True,  # the end tokens are among the above
            detokenize=bool(wanted.stop),
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            logprobs=0,
            flat_logprobs=True,
            output_kind=self._final_only,
            skip_clone=True,
        )

    # Weights.

    def _load(self, buckets: Buckets, version: int) -> None:
        if self.asleep:
            raise RunError("engine vllm is asleep: wake() it before weights come")
        self.version = NO_WEIGHTS
        names: set[str] = set()
        with self._paused():
            try:
                self._rpc("begin_weights")
                try:
                    for bucket in buckets:
                        names.update(name for name, _ in bucket)
                        if bucket:
                            self._send(bucket)
                finally:
                    self._rpc("end_weights")
                self._check_complete(names)
            except Exception as error:
                reason = f"engine vllm has no usable weights: loading version {version} failed ({_line(error)})"
                self.llm.abort_request(list(self._running))
                self._fail(self._running, RunError(reason))
                self._running.clear()
                raise RunError(reason) from error
            self._take_version(version)

    def _send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        if not self.multiprocess:
            self._rpc("load_bucket", bucket)
            return
        from safetensors.torch import save_file

        path = os.path.join(self._scratch, "bucket.safetensors")
        # A tied weight comes twice, which a file may not hold: the copy is its own.
        save_file({name: tensor.detach().cpu().clone() for name, tensor in bucket}, path)
        self._rpc("load_bucket_file", path)
        os.unlink(path)

    def _check_complete(self, names: set[str]) -> None:
        """vLLM only warns of layers that got nothing, and keeps their old weights: a head that is tied, for one."""
        if self._expected is None:
            self._expected = parameter_names(self._settings)
        missing = sorted(self._expected - names)
        if missing:
            tied = " (tied embeddings are sent under both names)" if "lm_head.weight" in missing else ""
            raise RunError(f"no weights came for {missing[0]} (and {len(missing) - 1} more){tied}")

    def _take_version(self, version: int) -> None:
        self._forget_prompts()
        self.llm.set_weight_version(str(version))
        self.version = version

    def _forget_prompts(self) -> None:
        """Keys and values of the old weights go, those of running requests too: without ``reset_running_requests`` vLLM keeps
        everything as long as anything runs, and says so only by its return value."""
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise RunError("engine vllm could not forget its cached prompts")

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Nothing is computed meanwhile. In this process that is so between two steps."""
        if not self.multiprocess:
            yield
            return
        core = self.llm.engine_core
        core.call_utility("pause_scheduler", "keep", False)
        try:
            yield
        finally:
            core.call_utility("resume_scheduler")

    def _rpc(self, method: str, *arguments: Any) -> None:
        self.llm.collective_rpc(method, args=arguments)

    def _sleep(self) -> None:
        if self._running:
            raise RunError(f"engine vllm cannot sleep with {len(self._running)} requests in flight")
        if not self.asleep and self.options.sleep and not self._on_cpu:
            self.llm.sleep(level=1)
        self.asleep = True

    def _wake(self) -> None:
        if self.asleep and self.options.sleep and not self._on_cpu:
            self.llm.wake_up()
        self.asleep = False

    # Beginning and end.

    def _start(self) -> None:
        _set_environment(self.multiprocess)
        with _torch_as_it_was():
            from vllm import SamplingParams
            from vllm.engine.arg_utils import EngineArgs
            from vllm.inputs.engine import tokens_input
            from vllm.platforms import current_platform
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.llm_engine import LLMEngine

            self._params, self._prompt, self._final_only = SamplingParams, tokens_input, RequestOutputKind.FINAL_ONLY
            self._on_cpu = current_platform.is_cpu()
            if self._on_cpu and self.options.pipeline_parallel_size > 1:
                raise UserError("engine vllm: pipeline_parallel_size above 1 needs GPUs; tensor_parallel_size works on CPUs")
            arguments = self._engine_arguments()
            try:
                self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=self.multiprocess)
            except Exception as error:
                raise UserError(f"engine vllm cannot serve {self.path}: {_line(error)}") from error
        settings = self.llm.vllm_config.model_config
        if problem := self._attention_problem(settings):
            self.llm.engine_core.shutdown()
            raise UserError(f"engine vllm cannot serve {self.path}: {problem}")
        self.context_length: int = settings.max_model_len
        self.exact = settings.dtype == torch.float32
        self._vocabulary: int = settings.get_vocab_size()
        self._settings = settings.hf_config
        self._ends = end_tokens(self.path, self.tokenizer)
        self.device = torch.device("cpu" if self._on_cpu or self.multiprocess else current_platform.device_type)
        self.llm.set_weight_version(str(self.version))

    def _attention_problem(self, settings: Any) -> str | None:
        """What vLLM itself finds out only when the first request kills it."""
        if not self._on_cpu or settings.use_mla:
            return None
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size, known = settings.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        return None if size in known else f"attention heads of size {size}, on CPUs it has only {', '.join(map(str, known))}"

    def _engine_arguments(self) -> dict[str, Any]:
        options = self.options
        own = {
            "model": self.path,
            "tokenizer": self._tokenizer_path(),
            "load_format": "dummy" if self.version <= NO_WEIGHTS else "auto",
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "kv_cache_memory_bytes": options.kv_cache_bytes or (CPU_CACHE_BYTES if self._on_cpu else None),
            "max_model_len": options.max_model_len or -1,
            "max_num_seqs": options.max_num_seqs,
            "dtype": "float32" if options.dtype == "auto" and self._on_cpu else options.dtype,
            "enforce_eager": self._on_cpu if options.enforce_eager is None else options.enforce_eager,
            "enable_prefix_caching": options.enable_prefix_caching,
            "enable_sleep_mode": options.sleep and not self._on_cpu,
            # After temperature, top-k, top-p and min-p: the distribution the token was drawn from.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "rlhf_host.engines.vllm_worker.WeightLoading",
            "generation_config": "vllm",
        }
        if not self.multiprocess:
            # Between two steps nothing may be under way: weights change there.
            own["async_scheduling"] = False
        if self._on_cpu:
            # A step that computes a part of a prompt sets back the request's generator, which vLLM can on CUDA alone.
            own["enable_chunked_prefill"] = False
        taken = sorted(set(own) & set(options.extra))
        if taken:
            raise UserError(f"engine.extra.{taken[0]}: the engine sets this itself, from its own options")
        defaults: dict[str, Any] = {"disable_log_stats": True, "seed": 0}
        if self._on_cpu:
            defaults |= {"block_size": 32}
            if self.multiprocess and options.tensor_parallel_size * options.pipeline_parallel_size == 1:
                defaults |= {"distributed_executor_backend": "uni"}
        return defaults | options.extra | own

    def _tokenizer_path(self) -> str:
        """vLLM needs the tokenizer for stop strings, as files."""
        if self.tokenizer is None or (Path(self.path) / "tokenizer_config.json").exists():
            return self.path
        directory = os.path.join(self._scratch, "tokenizer")
        self.tokenizer.save_pretrained(directory)
        return directory

    def _stop(self) -> None:
        self._fail(self._running, RunError("the engine was closed while requests were pending"))
        self._running.clear()
        with self._condition:
            actions = list(self._actions)
            self._actions.clear()
        for action in actions:  # each finds that the engine is no more, and tells its caller
            action()
        with contextlib.suppress(Exception):
            self.llm.engine_core.shutdown()
        del self.llm
        self._clear_scratch()

    def _clear_scratch(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        os.close(self._scratch_lock)

    def _fail(self, calls: dict[str, _Call], error: BaseException) -> None:
        for call in calls.values():
            with contextlib.suppress(RuntimeError):
                call.loop.call_soon_threadsafe(_resolve, [(call.future, error)])


class WeightLoader:
    """What functions that ``engine.run`` calls get: see ``engines.loading.Loader``. With several workers the weights still come
    here, and go on to them by shared memory."""

    def __init__(self, engine: VLLMEngine):
        self.engine, self.rank, self.size = "vllm", 0, 1
        self.device = engine.device
        self.state: dict[str, Any] = {}
        self._engine = engine

    def load(self, buckets: Buckets, version: int) -> None:
        self._engine._submit(lambda: self._engine._load(buckets, version)).result()


@dataclass(eq=False, slots=True)
class _Call:
    token_ids: list[int]
    sampling: Sampling
    key: SampleKey
    loop: asyncio.AbstractEventLoop
    number: str = ""
    future: asyncio.Future[Generation] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


def request_seed(key: SampleKey) -> int:
    """63 bits, the same on every machine: a request that is repeated elsewhere gives the same completion."""
    return int.from_bytes(hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest(), "big") >> 1


def end_tokens(path: str, tokenizer: Any) -> set[int]:
    """Tokens that end a completion, by the model's generation config (or config) and its tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    try:
        settings: Any = GenerationConfig.from_pretrained(path)
    except OSError:
        settings = AutoConfig.from_pretrained(path).get_text_config()
    found: set[int] = set()
    for source in (settings, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return found


def parameter_names(config: Any) -> set[str]:
    """What the weights of a model with this config are called; nothing where transformers does not know the architecture."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        log.warning("syncs are not checked for missing weights: %s", _line(error))
        return set()
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _set_environment(multiprocess: bool) -> None:
    """What vLLM reads from the environment, unless the user has set it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",  # it would send statistics of use to a server
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that share a machine would all bind to the same cores
    }.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Compiling the sampler's helpers takes longer than they ever save here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@contextlib.contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Starting vLLM seeds every global generator, puts a rank before every traceback and, on a CPU, replaces
    ``torch.set_num_threads`` by nothing."""
    threads, hook, python, numpy = torch.set_num_threads, sys.excepthook, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads, sys.excepthook = threads, hook
        random.setstate(python)
        np.random.set_state(numpy)


def _by_loop(finished: Sequence[tuple[_Call, Any]]) -> dict[asyncio.AbstractEventLoop, list[tuple[_Call, Any]]]:
    grouped: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Any]]] = {}
    for call, output in finished:
        grouped.setdefault(call.loop, []).append((call, output))
    return grouped


def _resolve(answers: Sequence[tuple[asyncio.Future[Generation], Generation | BaseException]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _line(error: BaseException) -> str:
    """The first line of an error that says something."""
    text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
