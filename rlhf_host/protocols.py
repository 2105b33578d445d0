"""Engines, backends, runtimes, kernels and both ends of a weight sync, as the host sees them. Imports no torch.

A plugin of these kinds is built as ``Plugin(options)``, which is light and has no effect. ``traits`` is read from that object, so
it may depend on the options; ``start`` does the work. Only the host makes the records given to ``start``: they may gain fields.

Errors mean the same everywhere. ``UserError``: the settings or the input cannot work; raised before anything runs. ``RunError``:
the run has to end. ``LostError``: a process is gone. Anything else counts as a defect of the plugin, and is shown with its name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from rlhf_host.records.episodes import Generation, SampleKey, Sampling
from rlhf_host.records.needs import Needs
from rlhf_host.records.tensors import Batch, TopK

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlhf_host.config.schema import RoleConfig, TrainConfig
    from rlhf_host.plugins.manager import PluginManager
    from rlhf_host.plugins.specs import PluginSpec
    from rlhf_host.training.reduction import Metrics

Tensors: TypeAlias = "dict[str, Tensor]"
Bucket: TypeAlias = "list[tuple[str, Tensor]]"
"""Some of a model's weights by name. The tensors are valid until the next bucket is asked for."""
Buckets: TypeAlias = "Iterator[Bucket]"
Bring: TypeAlias = "Callable[[Sequence[SyncTarget], WeightSource, int], Awaitable[None]]"
"""``await bring(targets, source, version)``: the host's own way of bringing weights to engines and of proving that they arrived."""

NO_WEIGHTS = -1
"""The version of an engine that has no weights of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the host must know of a plugin before it is started."""

    libraries: tuple[str, ...] = ()
    """Modules that ``start`` imports and that a plain installation may lack."""
    debug: bool = True
    """All its code runs in this process, on the thread that calls it, where a debugger can follow. Others are replaced under
    ``--debug``."""


# --- computing ----------------------------------------------------------------------------------


class Compute(Protocol):
    """The one thread of a process on which models compute."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue ``work``, which must not wait for other work. Any thread may call this."""


# --- engines ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits(Traits):
    """Traits of an engine."""

    takes: Literal["module", "directory"] = "directory"
    """It samples from the trainer's own module, or from a model directory, into weights of its own."""
    waves: bool = False
    """It decodes a batch to its end before the next, so it is best given all that may come at once."""
    largest_batch: int | None = None
    """Completions it decodes at the same time; ``None``: no limit is known."""
    devices: int = 1
    """Devices that one engine takes."""
    sleeps: bool = False
    """``sleep`` gives device memory back."""
    syncs: tuple[str, ...] = ()
    """Weight syncs that work with it, the best first; empty: all."""


class SyncEnd(Protocol):
    """What a weight sync asks of one engine."""

    version: int
    """Of the weights it holds; -1: none of this run, and ``generate`` refuses."""

    async def run(self, function: str, **arguments: Any) -> Any:
        """``"package.module:function"(loader, **arguments)`` in a thread of each process that holds the engine's weights.

        ``loader`` is a ``Loader``; arguments and result are plain values.
        """

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """Sample one completion. Its uniforms follow from ``key`` alone; cancelling the call ends the work on it.

        Raises:
            UserError: the request cannot be served.
            LostError: the engine's process is gone.
        """

    def set_version(self, version: int) -> None:
        """The weights now held are ``version``; what was cached under older ones is forgotten.

        Raises:
            RunError: the engine knows that it does not hold them.
        """


class Generator(Protocol):
    """What episodes ask: one engine, or a runtime's several. Call it on the run's event loop, which it never blocks."""

    version: int

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being generated."""

    def expect(self, count: int) -> None:
        """So many requests may still come: engines that work in waves wait for them."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        """As ``SyncEnd.generate``."""


class Engine(Generator, SyncEnd, Protocol):
    """A started engine. Everything is called on the run's event loop and must not block it."""

    @property
    def context_length(self) -> int | None:
        """Longest row, prompt and completion, in tokens; ``None``: no limit of its own."""

    @property
    def exact(self) -> bool:
        """It computes in 32 bits, so its log-probabilities must equal the trainer's closely."""

    @property
    def dead(self) -> bool:
        """It will answer nothing any more."""

    async def sleep(self) -> None:
        """Give device memory back until ``wake``. Raises ``RunError`` while requests are in flight."""

    async def wake(self) -> None:
        """Undo ``sleep``."""

    async def close(self) -> None:
        """Fail pending requests with ``RunError``, end threads and processes; after any failure, any number of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """Given to ``EnginePlugin.start``."""

    model: nn.Module | Path
    """As ``traits.takes`` says. A directory holds configuration and tokenizer, and the weights too if ``version`` is not -1."""
    tokenizer: Any
    version: int
    compute: Compute
    kernels: Kernels


class EnginePlugin(Protocol):
    """An entry point of the group ``rlhf.engines``."""

    @property
    def traits(self) -> EngineTraits:
        """May depend on the options."""

    def start(self, start: EngineStart) -> Engine:
        """The engine, once it is up. Raises ``UserError`` when it cannot serve this model; nothing is left behind then."""


# --- backends -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits(Traits):
    """Traits of a backend."""

    parts: int = 1
    """Neighbouring processes that hold one copy of a model between them; they are given the same rows."""
    even_passes: bool = False
    """Every rank must run equally many passes, with gradients in the same order, because tensors move between ranks in them."""
    sharded: bool = False
    """Weights are whole only inside ``run_pass``."""


class Ranks(Protocol):
    """The processes of a role's group. Both methods are collective."""

    rank: int
    """Of this process's rows among ``size``."""
    size: int
    part: int
    """Of this process among the ``parts`` that share the rank's rows."""
    parts: int

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order."""

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over the processes."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """``grad_norm`` before clipping; ``applied`` is False when it was not finite and weights and schedule were left alone."""

    grad_norm: float
    lr: float
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStart:
    """Given to ``BackendPlugin.start``."""

    model: nn.Module
    """Names the weights."""
    compute: nn.Module
    """What passes run: ``model``, or a twin of it around the same parameters."""
    head: tuple[nn.Parameter, ...]
    """Parameters that are used outside of their own module's forward, in ``run_head``."""
    role: RoleConfig
    """Learning rate, schedule, clipping."""
    total_updates: int
    """Optimizer updates of the whole run, for the schedule."""
    ranks: Ranks


class Backend(Protocol):
    """One trained role, on the compute thread. Collective over ranks but for ``backward`` and ``discard``."""

    exact: bool
    """It computes in 32 bits."""
    lr: float
    """Peak learning rate; may be set between steps."""

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """``compute(*inputs)`` where the weights are. Called only where traits say ``sharded`` or ``even_passes``."""

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """The same around the head, inside ``run_pass``."""

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Accumulate. ``loss`` is a share of the whole batch's loss, so gradients sum over passes and ranks.

        Args:
            last: no other backward comes before ``step``.
        """

    def step(self) -> StepResult:
        """Clip and step, or refuse a gradient norm that is not finite."""

    def discard(self) -> None:
        """Forget the gradients accumulated so far."""

    def save(self, directory: Path) -> None:
        """Write the optimizer's and schedule's state into a directory that all ranks see."""

    def load(self, directory: Path) -> None:
        """Take it back. Raises ``UserError`` for what another kind of backend wrote."""

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format, by rank 0."""

    def weights(self, bucket_bytes: int) -> Buckets:
        """Every name of the state dict, a tied head's too in one order; whole on rank 0, perhaps empty elsewhere."""

    def offload(self) -> None:
        """Move what only training needs off the device; may do nothing."""

    def reload(self) -> None:
        """Undo ``offload``."""


class BackendPlugin(Protocol):
    """An entry point of the group ``rlhf.backends``."""

    @property
    def traits(self) -> BackendTraits:
        """May depend on the options."""

    def start(self, start: BackendStart) -> Backend:
        """Take over the role's optimizer. Raises ``UserError`` when it cannot train this role so."""


# --- weight sync --------------------------------------------------------------------------------


class Weights(Protocol):
    """The trainer's end: first argument of a function that ``WeightSource.run`` calls."""

    rank: int
    size: int
    device: torch.device
    state: dict[str, Any]
    """Whatever such functions keep from call to call."""

    def buckets(self, bucket_bytes: int) -> Buckets:
        """All weights under every name of the state dict, in about ``bucket_bytes`` at a time.

        Collective: every rank iterates to the end. Rank 0 gets the data; what others get is not looked at. The order, names and
        shapes are the same every time.
        """


class Loader(Protocol):
    """The engine's end: first argument of a function that ``SyncEnd.run`` calls."""

    engine: str
    """Which engine, for messages."""
    rank: int
    """Of this process among the ``size`` that hold the engine's weights."""
    size: int
    device: torch.device
    state: dict[str, Any]
    """Whatever such functions keep from call to call."""

    def load(self, buckets: Buckets, version: int) -> None:
        """Replace all weights, then hold ``version``. Waits until nothing is generated, and forgets cached prompts.

        Meanwhile, and ever after when this raises, the engine has version -1 and refuses to generate: its weights may be a mixture.
        """


class WeightSource(Protocol):
    """The trainer as sync plugins see it."""

    async def run(self, function: str, **arguments: Any) -> list[Any]:
        """``"package.module:function"(weights, **arguments)`` on every rank of the actor's group at once; results in rank order."""


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """One engine as ``sync_connect`` sees it."""

    name: str
    engine: SyncEnd
    in_place: bool = False
    """It samples from the trainer's own parameters: nothing has to move."""


# --- kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a twin is for."""

    purpose: Literal["train", "sample"]
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    """Precision of matrix products, where another than ``dtype``."""
    even_passes: bool = False
    """Gradients must come in the same order on every rank (``BackendTraits.even_passes``)."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Which rows of prompt and completion a line of distinct prompts and all completions stands for (``models/layouts.py``).

    Given to every module of a decoder as the keyword ``shared_rows``, beside ``input_ids`` ``[1, N]``, restarting
    ``position_ids`` and an ``attention_mask`` of one element that means nothing. Only attention needs it: every token of a row sees
    the tokens of its row up to itself.
    """

    count: int
    """Rows, ``B``."""
    length: int
    """Of the longest row, ``L``."""
    gather: Tensor
    """``[B·L]`` int64: the line's token at every place of the padded rows; 0 at padding."""
    back: Tensor
    """``[N]`` int64: a place of the padded rows for every token of the line."""
    prompts: Sequence[int]
    """The length of every distinct prompt, in the order of the line."""
    lengths: Sequence[int]
    """Per row, how many tokens follow its prompt."""
    owners: Sequence[int]
    """Per row, the index of its prompt."""


class Decoder(Protocol):
    """Samples one batch after another, on the compute thread, in inference mode."""

    ragged: bool
    """Prompts of different lengths may be in one batch."""

    def refresh(self) -> None:
        """The weights changed in place: derive again what was derived from them. Also called between two steps of a batch."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Begin a batch. Logits ``[G, V]`` of what follows each of ``G`` distinct prompts."""

    def start(self, prompt_of_row: Tensor, longest: int) -> None:
        """Rows ``[B]`` int64, sorted by prompt, that go on by at most ``longest`` tokens each."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` ``[B]`` int64; logits ``[B, V]`` of what follows."""

    def keep(self, rows: Tensor) -> None:
        """Only these rows (sorted) go on."""


class KernelsPlugin(Protocol):
    """An entry point of the group ``rlhf.kernels``: the same computation, faster on one kind of device or model."""

    @property
    def traits(self) -> Traits:
        """May depend on the options."""

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        """Why it is not for this model and use, in a few words; ``None``: try it. Computes nothing."""

    def twin(self, model: nn.Module, use: Use) -> nn.Module | Decoder:
        """The model once more, around its very parameters, computed otherwise. A ``Decoder`` only to sample.

        The model stays byte for byte as it is. A twin takes every keyword that the model takes, sees changes of the weights at once
        (a decoder after ``refresh``), gives the same bits for the same inputs, and has the model's parameter names if
        ``use.even_passes``.
        """


class Kernels(Protocol):
    """The run's choice of kernels, each tried against the plain path by the host before it serves."""

    def module(self, model: nn.Module, use: Use) -> nn.Module:
        """A twin, or the model itself."""

    def decoder(self, model: nn.Module, use: Use, longest: int) -> Decoder:
        """A twin's, or the plain one, for rows of up to ``longest`` tokens."""


# --- runtimes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTraits(Traits):
    """Traits of a runtime."""

    remote: bool = False
    """Roles and engines live in other processes."""
    places: bool = False
    """It takes ``placement``."""
    sync: str = "ipc"
    """The weight sync to use where nobody chose one and engines have weights of their own."""
    sync_in_place: str = "in_process"
    """The same where the engine samples from the trainer's own module."""


@dataclass(slots=True)
class Update:
    """One optimizer batch's outcome; ``refused`` says why a role's step did not happen."""

    metrics: Metrics
    refused: str | None = None


class Trainer(Protocol):
    """A worker, or a group of them that acts as one. Called by the controller; returns when it is done."""

    @property
    def compute_s(self) -> float:
        """Seconds spent in forward, backward and optimizer steps so far."""

    def outputs(self, role: str, what: Literal["logprobs", "values", "scores"], batch: Batch) -> Tensor:
        """Without gradient, in training's layout and precision: ``[B, T]`` (``scores``: ``[B]``) float32 on the CPU."""

    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        """The role's ``k`` likeliest tokens at every completion token, on the CPU; otherwise as ``outputs``."""

    def update(self, batch: Batch, *, sampled_now: bool) -> Update:
        """One optimizer batch. ``sampled_now``: the weights are still those that sampled it."""

    def adjust(self, role: str, *, lr: float) -> None:
        """Another peak learning rate for a trained role, from the next update on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStart:
    """Given to ``RuntimePlugin.start``. Engines, backends and kernels are made by ``spec.build()``, here or in another process."""

    roles: Mapping[str, RoleConfig]
    """Settings of each role of ``needs``, in its order."""
    needs: Needs
    engine: PluginSpec
    backend: PluginSpec
    kernels: tuple[PluginSpec, ...]
    hooks: PluginManager
    bring: Bring
    train: TrainConfig
    tokenizer: Any
    total_updates: int
    """0: nothing is trained."""
    placement: tuple[str, ...]
    debug: bool


class Runtime(Protocol):
    """Where roles and engines live."""

    @property
    def trainer(self) -> Trainer:
        """Of all roles."""

    @property
    def engine(self) -> Generator:
        """What episodes ask."""

    @property
    def source(self) -> WeightSource:
        """The actor's weights."""

    @property
    def targets(self) -> Sequence[SyncTarget]:
        """The engines that are up."""

    @property
    def context_lengths(self) -> Mapping[str, int]:
        """Longest row of each role, in tokens."""

    @property
    def exact(self) -> bool:
        """Roles and engines all compute in 32 bits."""

    async def sync(self, version: int) -> None:
        """``await bring(targets, source, version)`` with nothing else at the weights; again where an engine died in it."""

    def save_role(self, name: str, directory: Path) -> None:
        """In Hugging Face format."""

    def save_state(self, directory: Path) -> None:
        """Optimizers and schedules of the trained roles, into an existing directory."""

    def load_state(self, directory: Path) -> None:
        """Take them back."""

    async def close(self) -> None:
        """However far ``start`` came, any number of times; leaves no process."""


class RuntimePlugin(Protocol):
    """An entry point of the group ``rlhf.runtimes``."""

    @property
    def traits(self) -> RuntimeTraits:
        """May depend on the options."""

    def describe(self, start: RuntimeStart) -> Iterable[str]:
        """Lines for ``--dry-run``. Raises ``UserError`` for a placement that cannot be."""

    def start(self, start: RuntimeStart) -> Runtime:
        """The runtime, once models are loaded and engines are up. ``UserError`` and ``RunError`` leave nothing running."""
