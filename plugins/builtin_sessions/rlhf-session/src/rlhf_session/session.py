"""A run whose loop is its caller's: generation, losses, optimizer steps, weights for the engine and checkpoints, call by call."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_host import Experience, Group, Outcome, RoleHandle, RunError, Sampling, Trajectory, UserError
from rlhf_host.internals import (
    CheckpointKeeper,
    Inputs,
    PluginManager,
    RaggedTensor,
    Rows,
    TaskData,
    add_advantages,
    add_extra,
    add_outputs,
    add_prompts,
    begin_run,
    end_run,
    for_chat,
    generations,
    make_experience,
    render_prompts,
    sizes,
    started_run,
)
from rlhf_host.settings import merge_needs
from rlhf_session.losses import Loss, spec_of
from rlhf_session.rows import TrainingRow

if TYPE_CHECKING:
    from rlhf_host.protocols import Update
    from rlhf_host.settings import RunConfig


@dataclass(slots=True)
class SessionData(TaskData):
    """Tasks of a session, which has no last step."""

    def end(self, config: RunConfig) -> tuple[int | None, str]:  # type: ignore[override]
        return None, ""


class TrainableSession:
    """Value of ``rlhf_host.trainable_session``. Its calls wait, and an interrupt ends them."""

    def __init__(self, config: RunConfig, manager: PluginManager, inputs: Inputs):
        self.config, self.manager, self.tokenizer = config, manager, inputs.tokenizer
        self.run_dir = Path(str(config.run_dir))
        self._inputs, self._needs, self._moved = inputs, merge_needs(manager), False
        self._stack = ExitStack()

    def open(self, resume: Path | None = None) -> None:
        """Starts the runtime, from a saved state if one is given, and brings the weights to the engine."""
        loop, started, checkpoint, notices = self._stack.enter_context(
            started_run(self.config, self.manager, self._inputs, self.run_dir, resume)
        )
        self._loop = loop
        self._stack.callback(lambda: end_run(loop, Outcome("finished", loop.parts.progress.step, self.run_dir)))
        self.roles: Mapping[str, RoleHandle] = started.handles
        begin_run(loop, started, checkpoint, resume, notices)
        loop.keeper.begin()

    def close(self) -> None:
        self._stack.close()

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self._loop.parts.progress.step

    @property
    def version(self) -> int:
        """Version of the weights that the engine samples from."""
        return self._loop.parts.progress.version

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        n: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[list[TrainingRow]]:
        """Returns ``n`` answers to each prompt, by the engine's weights.

        Args:
            prompts: texts, lists of chat messages, or lists of token ids.
            max_new_tokens: default: as configured; ``temperature`` too.
            seed: fixes the samples; default: another one in every step.
        """
        rollout, data = self.config.rollout, self.config.data
        sampling = Sampling(
            max_new_tokens=max_new_tokens or rollout.max_new_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids),
        )
        engine = self._loop.parts.runtime.engine
        if engine is None:
            raise UserError("nothing samples here: the algorithm trains on rows of a data set")
        if isinstance(prompts, str):
            raise UserError("generate takes a list of prompts: generate([prompt])")
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
        work = generations(engine, ids, sampling, n, self.config.seed + self.step if seed is None else seed)
        answers = self._loop.parts.events.run(work)
        return [
            [
                TrainingRow(
                    prompt_ids=ids[prompt],
                    completion_ids=list(answer.token_ids),
                    logprobs=None if answer.logprobs is None else list(answer.logprobs),
                    group=f"{self.step}.{prompt}",
                    version=self.version,
                    text=str(self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)),
                )
                for answer in answers[prompt * n : (prompt + 1) * n]
            ]
            for prompt in range(len(ids))
        ]

    def draw(self) -> Experience:
        """Samples, scores and prepares the next batch, as the next step of a run would. Raises ``RunError`` as that does."""
        sampled, learns = isinstance(self._inputs.data, TaskData), self.manager.has("compute_advantages")
        if not self.config.data.sources or (sampled and not learns and not self.manager.has("make_rows")):
            raise UserError("draw prepares batches for an algorithm: give the session algo, rewards and data")
        drawn = self._loop.parts.source.draw(self.step + 1, self.version)
        if drawn.draws:
            self._loop.parts.ledger.note(self.step + 1, self.version, drawn.draws)
        self._moved = self._moved or not drawn.sampled
        return drawn.batch

    def batch(self, rows: Iterable[TrainingRow | Trajectory], *, loss: Loss | None = None) -> Experience:
        """Returns rows as a batch, with everything that the loss needs of them: log-probabilities of roles, advantages where the
        rows have rewards and no advantages, and what the loss prepares.

        Raises ``UserError`` for rows that do not fit together, and for a role that the session does not have.
        """
        with self._plugins(loss) as manager:
            return self._batch(rows, manager)

    def forward_backward(
        self, rows: Experience | Iterable[TrainingRow | Trajectory], *, loss: Loss | None = None, last: bool = False
    ) -> dict[str, float]:
        """Adds the gradient of a batch's loss to those that wait for ``optim_step``. Every loss is a mean over its own batch.

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
            batch = rows if isinstance(rows, Experience) else self._batch(rows, manager)
            specs = () if loss is None else (spec_of(loss),)
            update = self._trainer.forward_backward(batch, sampled_now=not self._moved, last=last, plugins=specs)
            metrics = self._metrics(update)
            if bool(batch.loss_mask.any()) and not any(name.rpartition("/")[2] == "loss" for name in metrics):
                raise RunError("no plugin gave a loss term: give forward_backward a loss, or the session an algorithm")
            return metrics

    def optim_step(self, *, lr: float | None = None, role: str = "actor") -> dict[str, float]:
        """Clips the gradients that wait and takes a step of every role that has some; returns its metrics.

        Args:
            lr: the role's peak learning rate, from this step on.

        Raises ``RunError`` if a gradient is not finite; then nothing has changed.
        """
        if lr is not None:
            self._trainer.adjust(role, lr=lr)
        metrics = self._metrics(self._trainer.optim_step())
        progress, self._moved = self._loop.parts.progress, True
        progress.step += 1
        for need in self._needs.roles:
            if need.moves and need.follows is not None and progress.step % need.follows.every == 0:
                self._trainer.follow(need.name)
        return metrics

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
        self.forward_backward(rows, loss=loss, last=True)
        found = {
            name: gradient
            for name, gradient in self._trainer.gradients().items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
        }
        if not found:
            raise UserError(f"no trained weight is called {' or '.join(names)}")
        return found if project is None else {"gradient": _projected(found, project)}

    def sync(self) -> None:
        """Brings the weights to the engine."""
        if self._loop.gate is not None:
            self._loop.parts.progress.version += 1
            self._loop.parts.events.run(self._loop.sync(), interruptible=False)
            self._moved = False

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics of ``eval.data`` by the engine's weights. Raises ``UserError`` without such data."""
        if self._loop.evaluate is None or not self.manager.has("score"):
            raise UserError("nothing is held out, or nothing judges it: give the session eval_data and rewards")
        return self._loop.evaluate(self.step)[0]

    def log(self, metrics: Mapping[str, float]) -> None:
        """Gives the session's trackers the metrics of the last step."""
        self.manager.report("log_metrics", step=self.step, metrics=dict(metrics))

    def save(self, path: str | Path) -> Path:
        """Writes weights, optimizers, position in the data and states of plugins; returns the checkpoint's directory.

        Args:
            path: directory of the session's states; each is ``checkpoints/step-NNNNNN`` in it, and ``load`` takes the newest.
        """
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        parts = replace(self._loop.parts, run_dir=directory)
        keeper = CheckpointKeeper(parts, self._loop.keeper.scoring)
        keeper.note()
        keeper.save(needed=True)
        keeper.settle(needed=True)
        if parts.ledger.path.exists() and parts.ledger.path.parent != directory:
            shutil.copy2(parts.ledger.path, directory)
        return directory / "checkpoints" / f"step-{self.step:06d}"

    def load(self, path: str | Path) -> None:
        """Goes on from the newest state in a directory of ``save``: models are loaded anew. Raises ``UserError`` without one."""
        directory = Path(path)
        if not (directory / "checkpoints").is_dir():
            raise UserError(f"{directory} has no saved state of a session")
        self.close()
        ledger = directory / self._loop.parts.ledger.path.name
        if ledger.exists() and directory != self.run_dir:
            shutil.copy2(ledger, self.run_dir)
        self.open(directory)

    @property
    def _trainer(self) -> Any:
        return self._loop.parts.runtime.trainer

    def _metrics(self, update: Update) -> dict[str, float]:
        if update.refused is not None:
            raise RunError(f"step {self.step + 1}: {update.refused}")
        return update.metrics.result()

    @contextmanager
    def _plugins(self, loss: Loss | None) -> Iterator[PluginManager]:
        """Yields the session's plugins, or the loss alone. Raises ``UserError`` for a role that the session does not have."""
        if loss is None:
            yield self.manager
            return
        with closing(PluginManager.from_specs([spec_of(loss)])) as manager:
            have = {need.name: need.trainable for need in self._needs.roles}
            for need in merge_needs(manager).roles:
                if have.get(need.name) != need.trainable:
                    trains = " to train" if need.trainable else ""
                    raise UserError(f"the loss needs the role {need.name}{trains}: start the session with algo, which loads it")
            yield manager

    def _checked(self, row: TrainingRow | Trajectory, number: int) -> Trajectory:
        """Returns the row as a trajectory. Raises ``UserError`` for one that the model cannot read."""
        if not isinstance(row, TrainingRow | Trajectory):
            raise UserError(f"row {number} is a {type(row).__name__}, not a TrainingRow")
        trajectory = row if isinstance(row, Trajectory) else row.trajectory(number)
        ids = [token for segment in trajectory.segments for token in segment.token_ids]
        vocabulary, _ = sizes(self.config.roles["actor"])
        if (odd := next((token for token in ids if not 0 <= token < (vocabulary or token + 1)), None)) is not None:
            raise UserError(f"row {number}: the model has no token {odd}; it has {vocabulary}")
        if len(ids) > (room := self._loop.parts.runtime.context_lengths["actor"]):
            raise UserError(f"row {number} has {len(ids)} tokens, and the model room for {room}")
        return trajectory

    def _batch(self, rows: Iterable[TrainingRow | Trajectory], manager: PluginManager) -> Experience:
        given = list(rows)
        if not given:
            raise UserError("there are no rows to train on")
        made = [self._checked(row, number) for number, row in enumerate(given)]
        advantages = {
            id(row): own.advantages if isinstance(own, TrainingRow) else own.advantage
            for row, own in zip(made, given, strict=True)
        }
        judged = [own.reward is not None for own in given]
        groups: dict[str, Group] = {}
        for row in made:
            groups.setdefault(row.group_id, Group(row.group_id, row.task, [])).trajectories.append(row)
        names = dict.fromkeys(name for row in made for name in row.rewards)
        rollout, needs = self.config.rollout, merge_needs(manager)
        batch = make_experience(
            list(groups.values()),
            dict.fromkeys(names, 1.0),
            step=self.step + 1,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            version=self.version,
        )
        add_prompts(batch, manager, needs, self.roles)
        add_outputs(batch, self._trainer, needs, self.config.old_logprobs_mode)
        known = [advantages[id(row)] is not None for row in batch.trajectories]
        if all(known):
            batch.advantages = _per_token([advantages[id(row)] for row in batch.trajectories], batch)
        elif any(known):
            raise UserError(f"row {known.index(False)} has no advantages, and others have some")
        elif all(judged) and manager.has("compute_advantages"):
            add_advantages(batch, manager, needs)
        add_extra(batch, manager, self._trainer, needs)
        return batch


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(each, int) for each in prompt)


def _per_token(values: Sequence[Any], batch: Experience) -> Tensor:
    """Returns ``[B, T]`` of numbers, or of one for each token."""
    shape = Rows.of(batch.completion_mask)
    lengths = shape.lengths.tolist()
    tokens = torch.cat([torch.as_tensor(own, dtype=torch.float32).expand(n) for own, n in zip(values, lengths, strict=True)])
    if not bool(torch.isfinite(tokens).all()):
        raise UserError("advantages are not all finite")
    return RaggedTensor(tokens, shape)


def _projected(gradients: Mapping[str, Tensor], size: int) -> Tensor:
    """Returns ``[size]``: each number's share is added at a random place under a random sign, the same for every gradient."""
    result, generator = torch.zeros(size), torch.Generator()
    for number, gradient in enumerate(gradients.values()):
        generator.manual_seed(number)
        places = torch.randint(size, (gradient.numel(),), generator=generator)
        signs = torch.randint(2, (gradient.numel(),), generator=generator) * 2.0 - 1.0
        result.index_add_(0, places, gradient.flatten() * signs)
    return result
