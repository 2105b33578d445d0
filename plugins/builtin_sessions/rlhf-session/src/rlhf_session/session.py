"""A run whose loop is its caller's: generation, losses, optimizer steps, weights for the engine and checkpoints, call by call."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from numbers import Real
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from rlhf_host import Experience, Outcome, RoleHandle, RunError, Sampling, Scratch, Trajectory, UserError
from rlhf_host.internals import (
    Inputs,
    Interrupted,
    PluginManager,
    TaskData,
    add_outputs,
    begin_run,
    end_run,
    for_chat,
    generations,
    joined,
    render_prompts,
    sizes,
    started_run,
)
from rlhf_host.settings import merge_needs
from rlhf_session.batches import BatchMaker, Weights, ratio_mode
from rlhf_session.losses import Loss, Losses, spec_of
from rlhf_session.optimizers import SAMPLING, changed, optimizer_of, set_optimizer
from rlhf_session.rows import TrainingRow
from rlhf_session.states import find_state, refuse_other, write_state

if TYPE_CHECKING:
    from rlhf_host.protocols import Update
    from rlhf_host.settings import RunConfig


T = TypeVar("T")
P = ParamSpec("P")

ENDLESS = 2**40
"""Steps of a session that samples ahead."""
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def call(method: Callable[Concatenate[TrainableSession, P], T]) -> Callable[Concatenate[TrainableSession, P], T]:
    """Makes a method one call of a session: it ends before an interrupt is raised, one thread is in it, and it is refused after
    the session's end."""

    @wraps(method)
    def wrapped(self: TrainableSession, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calling():
            return method(self, *args, **kwargs)

    return wrapped


@dataclass(slots=True)
class SessionData(TaskData):
    """Tasks of a session, which has no last step."""

    endless: bool = False

    def steps(self, config: RunConfig) -> int:
        return ENDLESS if self.endless else TaskData.steps(self, config)  # for learning rates it is as long as a run

    def source(self, *args: Any) -> Any:
        return TaskData.source(replace(self, endless=True), *args)

    def end(self, config: RunConfig) -> tuple[int | None, str]:  # type: ignore[override]
        return None, ""


class TrainableSession:
    """Value of ``rlhf_host.trainable_session``. Its calls wait, and an interrupt ends them."""

    def __init__(self, config: RunConfig, manager: PluginManager, inputs: Inputs):
        self.config, self.manager, self.tokenizer = config, manager, inputs.tokenizer
        self.run_dir = Path(str(config.run_dir))
        self._inputs, self._needs = inputs, merge_needs(manager)
        self._lock, self._depth, self._ended = threading.RLock(), 0, ""
        self._losses = Losses({need.name: need.trainable for need in self._needs.roles})
        self._stack = ExitStack()
        self._outcome: dict[str, Any] = {"status": "finished"}

    def open(self, resume: Path | None = None) -> None:
        """Starts the runtime, from a saved state if one is given, and brings the weights to the engine."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        loop, started, checkpoint, notices = self._stack.enter_context(
            started_run(self.config, self.manager, self._inputs, self.run_dir, resume)
        )
        self._loop, self._ended = loop, ""
        self._moved = self._stepped = self._warned = False
        self._waiting = self._ahead = 0
        self._asked = (-1, 0)
        self._measured: dict[str, float] = {}
        self._drawn: Sequence[Trajectory] = ()
        self._take_signals(before)
        self._stack.callback(self._end_run)
        self._stack.callback(self._losses.close)
        self.roles: Mapping[str, RoleHandle] = started.handles
        room, (vocabulary, _) = started.runtime.context_lengths["actor"], sizes(self.config.roles["actor"])
        self._batches = BatchMaker(self.config, self.tokenizer, self._trainer, self.roles, vocabulary, room)
        begin_run(loop, started, checkpoint, resume, notices)
        loop.keeper.begin()

    def close(self) -> None:
        """Ends the session. Calls after it are refused."""
        self._ended = self._ended or "the session has ended: use it inside its block"
        self._stack.close()

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Ends the session with its block; ``run_finished`` of plugins hears of an error."""
        if isinstance(error, KeyboardInterrupt):
            self._outcome = {"status": "interrupted"}
        elif error is not None:
            self._outcome = {"status": "failed", "error": str(error) or type(error).__name__}
        self.close()

    def _end_run(self) -> None:
        end_run(self._loop, Outcome(step=self.step, run_dir=self.run_dir, **self._outcome))

    def _take_signals(self, before: Mapping[int, Any]) -> None:
        """Lets an interrupt end the caller's own code at once, and calls of the session as it ends a run."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in before.items():
            if (theirs := signal.getsignal(number)) is not earlier and callable(theirs):

                def on_signal(number: int, frame: Any, theirs: Any = theirs, earlier: Any = earlier) -> None:
                    if self._ended:  # another session, which ended later, has put it back
                        signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
                        signal.raise_signal(number)
                    elif self._depth:
                        theirs(number, frame)
                    else:
                        raise KeyboardInterrupt

                signal.signal(number, on_signal)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._lock:
            if self._ended:
                raise UserError(self._ended)
            self._depth += 1
            try:
                yield
            except Interrupted:
                raise KeyboardInterrupt from None
            finally:
                self._depth -= 1
                if not self._depth and not self._ended:
                    stopped, self._loop.parts.events.stop_requested = self._loop.parts.events.stop_requested, False
                    if stopped:  # also where what was cut short has led to an error
                        raise KeyboardInterrupt

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self._loop.parts.progress.step

    @property
    def version(self) -> int:
        """Version of the weights that the engine samples from."""
        return self._loop.parts.progress.version

    @call
    def generate(
        self,
        prompts: Sequence[Any],
        *,
        n: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> list[list[TrainingRow]]:
        """Returns ``n`` answers to each prompt, by the engine's weights.

        Args:
            prompts: texts, lists of chat messages, or lists of token ids.
            max_new_tokens: default: as configured; ``temperature`` too.
            **sampling: other settings of ``rollout`` for this call: ``top_p``, ``top_k``, ``min_p``, ``stop``, ``stop_token_ids``.
            seed: fixes the samples; default: another one in every call. A call of the same number in the same step has the same.

        Raises ``UserError`` for prompts or settings that cannot be used.
        """
        least = {"n": (n, 1), "max_new_tokens": (max_new_tokens, 1), "seed": (seed, 0)}
        for name, (number, low) in least.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < low):
                raise UserError(f"{name} is {number!r}, and should be a whole number from {low}")
        rollout, data = changed(self.config.rollout, sampling, SAMPLING, "generate"), self.config.data
        drawing = Sampling(
            max_new_tokens=max_new_tokens or rollout.max_new_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids),
            support=bool(rollout.truncated_by),
        )
        engine = self._loop.parts.runtime.engine
        if engine is None:
            raise UserError("nothing samples here: the algorithm trains on rows of a data set")
        if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__iter__"):
            raise UserError("generate takes a list of prompts: generate([prompt])")
        self._refuse_moved()
        prompts = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]
        for number, prompt in enumerate(prompts):
            chat = isinstance(prompt, Sequence) and all(isinstance(each, Mapping) and "role" in each for each in prompt)
            if not isinstance(prompt, str) and not _is_ids(prompt) and not chat:
                raise UserError(f"prompt {number} is a text, a list of messages or a list of token ids, not {prompt!r:.60}")
            if not prompt:
                raise UserError(f"prompt {number} is empty")
        self._asked = self.step, self._asked[1] + 1 if self._asked[0] == self.step else 0
        given = [list(prompt) if _is_ids(prompt) else None for prompt in prompts]
        texts = iter(
            render_prompts(
                [prompt for prompt, ids in zip(prompts, given, strict=True) if ids is None],
                for_chat(self.tokenizer, data),
                data.system_prompt,
                data.template,
            )
        )
        ids = [next(texts) if own is None else own for own in given]
        work = generations(engine, ids, drawing, n, self._seed() if seed is None else seed)
        answers = self._loop.parts.events.run(work)
        return [
            [
                TrainingRow(
                    prompt_ids=ids[prompt],
                    completion_ids=list(answer.token_ids),
                    logprobs=None if answer.logprobs is None else list(answer.logprobs),
                    group=f"{self.step}.{self._asked[1]}.{prompt}",
                    version=self.version,
                    temperature=drawing.temperature,
                    truncated=answer.finish_reason == "length",
                    text=str(self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)),
                    traces=answer.traces,
                )
                for answer in answers[prompt * n : (prompt + 1) * n]
            ]
            for prompt in range(len(ids))
        ]

    @call
    def draw(self) -> Experience:
        """Samples, scores and prepares the next batch, as the next step of a run would.

        Raises:
            UserError: the session has no algorithm or no data, or waits for ``sync``.
            RunError: as of a run.
        """
        sampled, learns = isinstance(self._inputs.data, TaskData), self.manager.has("compute_advantages")
        if not self.config.data.sources or (sampled and not learns and not self.manager.has("make_rows")):
            raise UserError("draw prepares batches for an algorithm: give the session algo, rewards and data")
        if sampled:
            self._refuse_moved()
        if sampled and self._ahead > (depth := self.config.async_depth) > 0:
            raise UserError(f"with async_depth {depth} there are {depth} batches before new weights: call sync")
        drawn = self._loop.parts.source.draw(self.step + 1, self.version)
        self._ahead, self._drawn = self._ahead + 1, drawn.trajectories
        self._measured |= {**drawn.row_metrics, **drawn.metrics}
        if drawn.draws:
            self._loop.parts.ledger.note(self.step + 1, self.version, drawn.draws)
        self._moved, batch = self._moved or not drawn.sampled, drawn.batch
        for alias, rows in drawn.beside.items():
            batch = joined(batch, rows, alias)
        return batch

    @call
    def batch(
        self,
        rows: Iterable[TrainingRow | Trajectory],
        *,
        loss: Loss | None = None,
        reward_weights: Mapping[str, float] | None = None,
    ) -> Experience:
        """Returns rows as a batch, with everything that the loss needs of them: log-probabilities of roles, advantages where the
        rows have rewards and no advantages, and what the loss prepares. The rows stay in their order. An algorithm that chooses
        or pairs sampled answers (``make_rows``) gets those that it makes of the rows.

        Args:
            reward_weights: weights by which several rewards of the rows became ``reward``; default: 1 each.

        Raises ``UserError`` for rows that do not fit together, and for a role that the session does not have.
        """
        with self._plugins(loss) as manager:
            return self._batches.make(rows, manager, reward_weights, self._weights)

    @call
    def forward_backward(
        self, rows: Experience | Iterable[TrainingRow | Trajectory], *, loss: Loss | None = None, last: bool = False
    ) -> dict[str, float]:
        """Adds the gradient of a batch's loss to those that wait for ``optim_step``. Every loss is a mean over its own batch. After
        an error in the passes, or an interrupt, none waits.

        Args:
            rows: rows, or what ``draw`` and ``batch`` return.
            loss: in place of the session's algorithm and extensions.
            last: promises that ``optim_step`` comes next, which saves a pass over one token.

        Returns:
            Metrics, ``loss`` among them.

        Raises:
            UserError: rows or a loss that cannot be used.
            RunError: a loss is not finite, or there is none.
        """
        with self._plugins(loss) as manager:
            batch = rows if isinstance(rows, Experience) else self._batches.make(rows, manager, None, self._weights)
            if batch is not rows and not bool(batch.loss_mask.any()):
                raise UserError("no token of the rows is in the loss: their masks, or the loss, leave all out")
            if batch.old_logprobs is None and (mode := ratio_mode(self.config, batch, self._weights)) == "sampler":
                add_outputs(batch, self._trainer, merge_needs(manager), mode)
            specs = () if loss is None else (spec_of(loss),)
            interrupted = False
            try:
                update = self._trainer.forward_backward(batch, sampled_now=not self._moved, last=last, plugins=specs)
                metrics = self._metrics(update)
                interrupted = self._loop.parts.events.stop_requested
                if bool(batch.loss_mask.any()) and not any(name.rpartition("/")[2] == "loss" for name in metrics):
                    raise RunError("no plugin gave a loss term: give forward_backward a loss, or the session an algorithm")
                self._waiting, self._measured = self._waiting + 1, self._measured | metrics
                return metrics
            except BaseException:
                interrupted = True
                raise
            finally:
                if interrupted:
                    self._drop()

    @call
    def forward(self, rows: Experience | Iterable[TrainingRow | Trajectory]) -> dict[str, float]:
        """Returns the metrics of a batch by the trainer's weights and the session's own loss. No gradient is computed, and those
        that wait stay. Arguments and errors as of ``forward_backward``.
        """
        batch = rows if isinstance(rows, Experience) else self._batches.make(rows, self.manager, None, self._weights)
        return dict(self._trainer.evaluate(batch).result())

    @call
    def optim_step(self, *, lr: float | None = None, role: str = "actor", **optimizer: Any) -> dict[str, float]:
        """Clips the gradients that wait and takes a step of every role that has some; returns its metrics. Plugins that adjust
        something after each step do so, by all metrics since the one before.

        Args:
            lr: the role's peak learning rate, from this step on.
            **optimizer: other settings of the role, from this step on: ``betas``, ``adam_eps``, ``weight_decay``,
                ``max_grad_norm``. In this process and with the backend ``torch`` only; a state does not keep them.

        Raises:
            UserError: no gradient waits, or the rate or the role cannot be used.
            RunError: a gradient is not finite; then that role, and those after it, stay as they are.
        """
        trained, progress = [need.name for need in self._needs.roles if need.trainable], self._loop.parts.progress
        if role not in trained:
            raise UserError(f"optim_step: {role!r} is not trained here; trained are {', '.join(trained)}")
        if lr is not None and (isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf):
            raise UserError(f"optim_step: lr is {lr!r}, and should be a finite number from 0")
        if not self._waiting:
            raise UserError("no gradient waits for optim_step: call forward_backward first; one that failed drops what waited")
        if optimizer:
            set_optimizer(self._trainer, role, optimizer)
        if lr is not None:
            self._trainer.adjust(role, lr=lr)
            progress.rates[role] = float(lr)  # which a state keeps
        stepped, self._stepped, self._waiting = self._stepped, True, 0
        held = self._loop.gate if self.config.async_depth and self._in_place else None
        if held is not None:
            self._loop.parts.events.run(self._loop.hold(held), interruptible=False)  # until sync
        update = self._trainer.optim_step()
        # Engines on Ray that share devices with the trainer sleep from here until sync, whatever became of the step.
        if not stepped and _nothing_moved(update) and not getattr(self._trainer, "ahead", False):
            self._stepped = False
            if held is not None:
                held.release()
        metrics = self._metrics(update)
        self._moved = True
        progress.step += 1
        for need in self._needs.roles:
            if need.moves and need.follows is not None and progress.step % need.follows.every == 0:
                self._trainer.follow(need.name)
        self._loop.adjust(self._measured | metrics)
        self._measured = {}
        self._warn_of_end()
        return metrics

    @call
    def drop(self) -> None:
        """Drops the gradients that wait for ``optim_step``."""
        self._drop()

    @call
    def gradient(
        self,
        rows: Experience | Iterable[TrainingRow | Trajectory],
        *,
        loss: Loss | None = None,
        names: Sequence[str] = ("*",),
        project: int | None = None,
    ) -> dict[str, Tensor]:
        """Returns the gradient of a batch's loss by the actor's weights, float32 on the CPU, and keeps nothing of it. What waited
        for ``optim_step`` is dropped.

        Args:
            names: patterns of the names of weights, such as ``*lora*``.
            project: all of them as one tensor ``gradient`` of this length, in which inner products are kept in expectation
                (signed feature hashing, arXiv:0902.2206).
        """
        if project is not None and (isinstance(project, bool) or not isinstance(project, int) or project < 1):
            raise UserError(f"project is {project!r}, and should be a whole number from 1")
        patterns = [names] if isinstance(names, str) else list(names)
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise UserError(f"names is {names!r}, and should be patterns of the names of weights")
        self._drop()
        self.forward_backward(rows, loss=loss, last=True)
        self._waiting = 0
        found: dict[str, Tensor] = self._trainer.gradients(patterns)
        if not found:
            raise UserError(f"no trained weight is called {' or '.join(patterns)}")
        return found if project is None else {"gradient": _projected(found, project)}

    @call
    def sync(self) -> None:
        """Brings the weights to the engine."""
        if self._loop.gate is not None:
            self._loop.parts.progress.version += 1
            self._loop.parts.events.run(self._loop.sync(), interruptible=False)
            self._ahead = max(0, self._ahead - 1)
        self._moved = self._stepped = False

    @call
    def evaluate(self) -> dict[str, float]:
        """Returns the metrics of ``eval.data`` by the engine's weights. Raises ``UserError`` without such data."""
        if self._loop.evaluate is None or not self.manager.has("score"):
            raise UserError("nothing is held out, or nothing judges it: give the session eval_data and rewards")
        self._refuse_moved()
        metrics, trajectories = self._loop.evaluate(self.step)
        self._measured |= metrics
        self.manager.report("log_trajectories", step=self.step, split="eval", trajectories=trajectories)
        return metrics

    @property
    def stopped(self) -> str | None:
        """Why a plugin asked, after a step, to train no further; None: none did."""
        return self._loop.parts.progress.stopped

    @call
    def log(self, metrics: Mapping[str, float]) -> None:
        """Gives the metrics of the last step, and the rows of ``draw``, to the session's trackers. Raises ``UserError`` for metrics
        that are no numbers.
        """
        if not isinstance(metrics, Mapping):
            raise UserError(f"log takes a mapping of names and numbers, not a {type(metrics).__name__}")
        for name, value in metrics.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(f"log: {name!r} is {value!r}; metrics are names and numbers")
        if self._drawn:
            self.manager.report("log_trajectories", step=self.step, split="train", trajectories=self._drawn)
        self.manager.report("log_metrics", step=self.step, metrics={name: float(value) for name, value in metrics.items()})
        self._drawn = ()

    @call
    def save(self, path: str | Path) -> Path:
        """Writes weights, optimizers, position in the data and states of plugins; returns the checkpoint's directory.

        Args:
            path: directory of the session's states; each is ``checkpoints/step-NNNNNN`` in it. States of other steps stay.

        Raises:
            UserError: the directory is that of a run, or a file.
            RunError: the state cannot be written.
        """
        return write_state(self._loop, _path(path, "save"))

    @call
    def load(self, path: str | Path, *, optimizer: bool = True) -> None:
        """Goes on from a saved state: models are loaded anew.

        Args:
            path: what ``save`` returned, or a directory of ``save``, whose state that was saved last is taken.
            optimizer: False: only the weights, with new optimizers. In this process and with the backend ``torch`` only.

        Raises ``UserError`` for a state that is not there, or of another model or other roles; then nothing has changed.
        """
        state = find_state(_path(path, "load"))
        for need in self._needs.roles if not optimizer else ():
            if need.trainable:
                optimizer_of(self._trainer, need.name)
        with Scratch("rlhf-session-", gettempdir()) as one:  # in which this state is the newest
            (one / "checkpoints").mkdir()
            (one / "checkpoints" / state.name).symlink_to(state, target_is_directory=True)
            refuse_other(self.config, self._needs, self._loop.parts.source.state_dict(), one, state)
            self.close()
            ledger = state.parent.parent / self._loop.parts.ledger.path.name
            if ledger.exists() and ledger.parent != self.run_dir.resolve():
                shutil.copy2(ledger, self.run_dir)
            try:
                self.open(one)
                for need in self._needs.roles if not optimizer else ():
                    if need.trainable:
                        backend, _ = optimizer_of(self._trainer, need.name)
                        backend.optimizer.state.clear()
                        backend.updates = 0
            except BaseException:
                self._ended = "the session ended when load failed: start another"
                self._stack.close()
                raise

    @property
    def _trainer(self) -> Any:
        return self._loop.parts.runtime.trainer

    @property
    def _weights(self) -> Weights:
        return Weights(self.step, self.version, self._moved)

    @property
    def _in_place(self) -> bool:
        """True if the engine samples from the weights that are trained."""
        return any(target.in_place for target in self._loop.parts.runtime.targets)

    def _refuse_moved(self) -> None:
        """Raises ``UserError`` where sampling would use weights that no version counts, or older ones that nobody asked for."""
        if self._stepped and (self._in_place or not self.config.async_depth):
            raise UserError("the weights have moved since sync, and sampling is by those of the engine: call sync first")

    def _drop(self) -> None:
        """Drops the gradients that wait for ``optim_step``, and those of passes that did not end."""
        self._waiting = 0
        self._trainer.gradients(())

    def _seed(self) -> int:
        step, number = self._asked
        return self.config.seed + step + (number << 32)

    def _warn_of_end(self) -> None:
        """Says once that schedules have come to their end, from which on rates stay at their lowest."""
        planned = self._loop.planned
        for need in self._needs.roles:
            role = self.config.roles.get(need.name)
            if need.trainable and role is not None and role.schedule != "constant" and self.step > planned and not self._warned:
                self._warned = True
                text = f"step {self.step} is after the end of {need.name}.schedule {role.schedule}, which train.steps sets to"
                print(f"Warning: {text} {planned}: its learning rate stays at the lowest", file=sys.stderr)

    def _metrics(self, update: Update) -> dict[str, float]:
        if update.refused is not None:
            raise RunError(f"step {self.step + 1}: {update.refused}")
        return update.metrics.result()

    def _plugins(self, loss: Loss | None) -> AbstractContextManager[PluginManager]:
        """Yields the session's plugins, or the loss alone. Raises ``UserError`` for a role that the session does not have."""
        return nullcontext(self.manager) if loss is None else self._losses.plugins(loss)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and all(type(each) is int for each in prompt)


def _path(path: Any, method: str) -> Path:
    if not isinstance(path, str | Path):
        raise UserError(f"{method} takes a path, not {path!r:.60}")
    return Path(path).expanduser()


def _nothing_moved(update: Update) -> bool:
    """True if the first role's step was refused; those after it stay as they are, too. A role that steps gives its norm."""
    return update.refused is not None and not any(name.endswith("grad_norm") for name in update.metrics.result())


def _projected(gradients: Mapping[str, Tensor], size: int) -> Tensor:
    """Returns ``[size]``: each number's share is added at a random place under a random sign, the same for every gradient."""
    result, generator = torch.zeros(size), torch.Generator()
    for number, gradient in enumerate(gradients.values()):
        generator.manual_seed(number)
        places = torch.randint(size, (gradient.numel(),), generator=generator)
        signs = torch.randint(2, (gradient.numel(),), generator=generator) * 2.0 - 1.0
        result.index_add_(0, places, gradient.flatten() * signs)
    return result
