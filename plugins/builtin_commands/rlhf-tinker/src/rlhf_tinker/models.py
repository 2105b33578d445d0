"""Models at work: each a trainable session on a thread of its own, and frozen ones for weights that were saved before."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_session import TrainingRow, trainable_session

from rlhf_host import RoleHandle, RunError, Sampling, Segment, Task, Trajectory, UserError, session
from rlhf_host.internals import meta_model, sizes
from rlhf_host.settings import RunConfig
from rlhf_tinker.losses import ROW, Job, TinkerLoss, metrics_of
from rlhf_tinker.sampling import Answer, Ask
from rlhf_tinker.worker import Worker

if TYPE_CHECKING:
    from rlhf_session import TrainableSession

    from rlhf_host import Session

ALPHA = 32
"""Scale of adapters: α / rank, as in Tinker."""
SNAPSHOTS = 8
"""Unnamed snapshots of one model that are kept, in a temporary folder."""
FROZEN = 2
"""Frozen models that stay loaded."""
OPENING = threading.Lock()
"""Models are loaded one at a time: libraries that load them change what the whole process has, such as its standard error."""
CLOSE_S = 10.0

OF_ACTOR = ("model", "revision", "tokenizer", "dtype", "quantize", "attn_implementation", "trust_remote_code", "device")
"""Settings of the command's model that each session gets."""
OF_RUN = ("train", "backend", "kernels")


@dataclass(frozen=True, slots=True)
class Base:
    """The base model of a server."""

    name: str
    """Its name for clients."""
    config: RunConfig
    """Of a command that samples."""

    @property
    def model(self) -> str:
        return str(self.config.roles["actor"].model)

    @property
    def tokenizer(self) -> str:
        """Returns where clients on this machine find the tokenizer."""
        actor = self.config.roles["actor"]
        place = Path(str(actor.tokenizer or actor.model)).expanduser()
        return str(place.resolve()) if place.exists() else str(place)

    def targets(self, mlp: bool, attention: bool) -> list[str] | None:
        """Returns the linear maps that adapters are at; None: all below the head."""
        if mlp and attention:
            return None
        from torch.nn import Linear

        model = meta_model(self.config.roles["actor"])
        maps = [name for name, module in model.named_modules() if isinstance(module, Linear)]
        found = [name for name in maps if ("attn" in name or "attention" in name) == attention and name.count(".") > 2]
        if not found:
            raise UserError(f"the model has no linear maps of {'attention' if attention else 'an MLP'}: train both")
        return found

    def settings(self) -> dict[str, Any]:
        """Returns the arguments of a trainable session."""
        given = self.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        actor = self.config.roles["actor"].model_dump(mode="json", exclude_unset=True)
        return {
            "actor": {name: actor[name] for name in OF_ACTOR if name in actor} | {"warmup_steps": 0, "schedule": "constant"},
            **{name: given[name] for name in OF_RUN if name in given},
        }


@dataclass(slots=True)
class Adapter:
    """Form in which a model is trained."""

    rank: int
    seed: int
    targets: list[str] | None = None


@dataclass(slots=True, eq=False)
class Snapshot:
    """Weights that samples are drawn from: a model's of some time, saved, or the base's."""

    directory: Path | None
    """Of an adapter; None: the base."""
    model: Model | None = None
    """The model that they were taken of, if it is at work."""
    number: int = -1
    """Steps and loads that it had had then."""
    kept: bool = True


@dataclass(slots=True, eq=False)
class Model:
    """One LoRA over the base."""

    model_id: str
    base: Base
    adapter: Adapter
    aside: Path
    """A temporary folder of its own."""
    session: TrainableSession | None = None
    number: int = 0
    """Optimizer steps and loads so far, which tells whether a snapshot is of these weights."""
    failed: str | None = None
    """Reason for which the gradients that wait are not complete."""
    synced: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    draws: itertools.count[int] = field(default_factory=itertools.count)
    _stack: ExitStack = field(default_factory=ExitStack)
    _whole: TinkerLoss = field(default_factory=lambda: TinkerLoss(whole=True))
    _following: TinkerLoss = field(default_factory=lambda: TinkerLoss(whole=False))
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        self.worker = Worker(f"model {self.model_id}", self.draw)

    # On its thread:

    def open(self) -> None:
        """Loads the base with a new adapter."""
        settings, adapter = self.base.settings(), self.adapter
        settings["actor"]["lora"] = {"rank": adapter.rank, "alpha": ALPHA}
        if adapter.targets is not None:
            settings["actor"]["lora"]["targets"] = adapter.targets
        with OPENING:
            self._stack = ExitStack()
            self.session = self._stack.enter_context(
                trainable_session(algo=self._whole, seed=adapter.seed, rollout={"temperature": 1.0}, **settings)
            )

    def close(self) -> None:
        with OPENING:
            self._stack.close()
        shutil.rmtree(self.aside, ignore_errors=True)

    @property
    def _running(self) -> TrainableSession:
        if self.session is None:
            raise UserError(f"the model {self.model_id} could not be made")
        return self.session

    def forward_backward(self, job: Job, backward: bool) -> tuple[list[Any], dict[str, float]]:
        """Runs the passes of a request; returns log-probabilities of each datum, and metrics. After an error the gradients that
        wait are dropped, and the next step is refused.
        """
        session = self._running
        rows = [
            TrainingRow(
                prompt_ids=datum.tokens[:1].tolist(),
                completion_ids=[*datum.tokens[1:].tolist(), _last(datum)],
                columns={ROW: float(number)},
                temperature=1.0,
            )
            for number, datum in enumerate(job.data)
        ]
        loss = self._following if job.follows else self._whole
        loss.job = job
        try:
            if backward:
                session.forward_backward(rows, loss=loss)
            else:
                loss.job, self._whole.job = None, job
                session.forward(rows)
        except BaseException as error:
            if backward:
                self.fail(str(error))
            raise
        finally:
            loss.job = self._whole.job = None
        return [job.logprobs[number] for number in range(len(job.data))], metrics_of(job)

    def fail(self, why: str | None) -> None:
        """Drops the gradients that wait, and lets the next step be refused: it would be one of a part of the data.

        Args:
            why: None: that step is refused already.
        """
        self.failed = why
        if self.session is not None:
            self.session.drop()

    def optim_step(self, lr: float, settings: Mapping[str, Any]) -> dict[str, float]:
        failed, self.failed = self.failed, None
        if failed is not None:
            self._running.drop()
            raise UserError(f"no step is taken, because a request before it failed: {failed}")
        try:
            metrics = self._running.optim_step(lr=lr, **settings)
        except BaseException:
            self.synced = -1  # the session may wait for sync, although the weights are those of before
            raise
        self.number += 1
        return {"grad_norm": metrics["grad_norm"]} if "grad_norm" in metrics else {}

    def save(self, directory: Path) -> None:
        self._running.save(directory)

    def load(self, directory: Path, optimizer: bool) -> None:
        """Goes on from saved weights, with their optimizer or a new one."""
        with OPENING:
            self._running.load(directory, optimizer=optimizer)
        self.number, self.failed = self.number + 1, None
        self.synced = self.number

    def snapshot(self) -> Snapshot:
        """Saves the weights for samples, unnamed. The newest are kept."""
        if self.snapshots and self.snapshots[-1].number == self.number:
            return self.snapshots[-1]
        directory = self.aside / f"snapshot-{self.number}"
        self.save_adapter(directory)
        self.snapshots.append(Snapshot(directory, self, self.number))
        while len(self.snapshots) > SNAPSHOTS:
            old = self.snapshots.pop(0)
            old.kept = False
            if old.directory is not None:
                shutil.rmtree(old.directory, ignore_errors=True)
        return self.snapshots[-1]

    def save_adapter(self, directory: Path) -> None:
        """Writes the weights alone, as peft does."""
        aside = self.aside / f".{secrets.token_hex(8)}"
        try:
            state = self._running.save(aside)
            shutil.copytree(state / "model", directory, dirs_exist_ok=True)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def draw(self, asks: list[Ask]) -> Sequence[list[Answer] | None]:
        """Returns the answers to requests with the same settings and weights; None if these are no longer the model's."""
        session, first = self._running, asks[0]
        if first.number != self.number:
            return [None] * len(asks)
        if self.synced != self.number:
            session.sync()
            self.synced = self.number
        groups = session.generate(
            [list(ask.prompt) for ask in asks],
            n=first.count,
            max_new_tokens=first.max_tokens,
            temperature=first.temperature,
            seed=self.adapter.seed + (next(self.draws) << 32) if first.seed is None else first.seed,
            **dict(first.settings),
        )
        return [[Answer(row.completion_ids, row.logprobs or (), row.truncated) for row in group] for group in groups]

    def prompt_logprobs(self, number: int, prompt: Sequence[int], last: int) -> list[float] | None:
        """Returns those of the prompt's last tokens; None if the weights are no longer these."""
        return None if number != self.number else scored(self._running.roles["actor"], prompt, last)


def _last(datum: Any) -> int:
    """Returns the token after the input: the last target, or the first of several."""
    return int(datum.targets[-1] if datum.targets.ndim == 1 else datum.targets[-1, 0])


def scored(role: RoleHandle, prompt: Sequence[int], last: int) -> list[float]:
    """Returns the log-probabilities of a prompt's tokens; NaN for all but the ``last``, and for the first."""
    nothing = [float("nan")] * len(prompt)
    if last < 1:
        return nothing
    row = Trajectory("prompt", "prompt", Task(""), [Segment("prompt", list(prompt[:1])), Segment("action", list(prompt[1:]))])
    (values,) = asyncio.run(role.logprobs([row], temperature=1.0))
    return [*nothing[: len(prompt) - last], *values[len(values) - last :]]


class Frozen:
    """Models that only sample: the base, and saved weights. The last few stay loaded."""

    def __init__(self, base: Base):
        self.base = base
        self._loaded: OrderedDict[Path | None, tuple[ExitStack, Session]] = OrderedDict()
        self._snapshots: dict[str, Snapshot] = {}
        self._draws = itertools.count()
        self._seed = secrets.randbits(31)
        self.worker = Worker("frozen models", self.draw)

    def name(self, sampler: str, snapshot: Snapshot) -> None:
        self._snapshots[sampler] = snapshot

    def close(self) -> None:
        while self._loaded:
            self._unload()

    def _unload(self) -> None:
        _, (stack, _) = self._loaded.popitem(last=False)
        with OPENING:
            stack.close()

    def _of(self, sampler: str) -> Session:
        directory = self._snapshots[sampler].directory
        if directory not in self._loaded:
            if directory is not None and not directory.exists():
                raise UserError("these weights are gone: they were removed, or more than the kept snapshots came after them")
            while len(self._loaded) >= FROZEN:
                self._unload()
            config = self.base.config.model_copy(deep=True)
            config.roles["actor"].adapter = None if directory is None else str(directory)
            stack = ExitStack()
            with OPENING:
                self._loaded[directory] = stack, stack.enter_context(session(config))
        self._loaded.move_to_end(directory)
        return self._loaded[directory][1]

    def draw(self, asks: list[Ask]) -> list[list[Answer]]:
        """Returns the answers to requests with the same settings."""
        first = asks[0]
        sampling = Sampling(max_new_tokens=first.max_tokens, temperature=first.temperature, **dict(first.settings))
        seed = self._seed + (next(self._draws) << 32) if first.seed is None else first.seed
        groups = self._of(first.sampler).generate([ask.prompt for ask in asks], sampling, n=first.count, seed=seed)
        return [[Answer(each.token_ids, each.logprobs, each.finish_reason == "length") for each in group] for group in groups]

    def prompt_logprobs(self, sampler: str, prompt: Sequence[int], last: int) -> list[float]:
        return scored(self._of(sampler).roles["actor"], prompt, last)


def limits(config: RunConfig) -> tuple[int | None, int]:
    """Returns how many tokens the base has, and how many it can read."""
    vocabulary, room = sizes(config.roles["actor"])
    if room is None:
        raise RunError("the model's configuration does not say how many tokens it can read: give --actor.max-tokens")
    return vocabulary, room
