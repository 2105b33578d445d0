"""Runs from Python: ``rlhf_host.train`` and similar functions accept what the command line accepts, and Python objects too.

Plugins may be names, classes or instances with hooks, and rewards plain functions; data may be rows in memory. Every other
setting is a keyword, as a section, ``train={"steps": 10}``, or dotted, ``**{"train.steps": 10}``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_host.arguments import Arguments, Settings, configured, in_arguments, speaking
from rlhf_host.config.check import check, check_evaluation
from rlhf_host.config.defaults import RunTraits
from rlhf_host.config.load import read_config
from rlhf_host.config.resolve import merge_needs
from rlhf_host.config.resumed import check_resume
from rlhf_host.config.run_dir import require_run, with_run_dir
from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.config.tree import SHORT
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Sampling
from rlhf_host.records.needs import Needs, Outcome
from rlhf_host.runs.directory import RunDirectory
from rlhf_host.runs.models import run_model, run_of

if TYPE_CHECKING:
    from rlhf_host.keywords import (
        CheckpointSettings,
        EvalSettings,
        PipelineSettings,
        RoleSettings,
        RolloutSettings,
        TrainSettings,
        TrajectoryLogSettings,
    )
    from rlhf_host.training.session import Session

Plugin = Any
"""A name (``[ALIAS=]NAME``), a mapping of ``name`` and its options, or a class or instance with hooks; a reward may be a
function too (``plugins.reward_functions.FunctionReward`` lists its arguments).
"""

Plugins = Any
"""One plugin, a list of them, or a mapping of aliases to them."""

Data = Any
"""A path, hub name or task plugin's name, a list of these, or rows: a list of dicts, a mapping from columns to lists, a
``datasets`` object, a data frame."""


@dataclass(slots=True, repr=False)
class Run:
    """A finished or interrupted training run."""

    run_dir: Path
    outcome: Outcome
    config: RunConfig
    _asked: Arguments

    def __repr__(self) -> str:
        return f"Run({self.outcome.status} at step {self.outcome.step}, {str(self.run_dir)!r})"

    @property
    def files(self) -> RunDirectory:
        """Contents of its directory: settings, curves, trajectories, the outcome of every draw."""
        return RunDirectory(self.run_dir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, one per logged step; without the jsonl tracker, the last step's only."""
        return self.files.metrics or [{**self.outcome.metrics, "step": self.outcome.step}]

    @property
    def model(self) -> Path:
        """The directory of the trained model. Raises ``UserError`` if none was written (``checkpoint.final`` false)."""
        return run_model(self.run_dir).path

    def evaluate(self, **settings: Any) -> dict[str, float]:
        """Evaluates the trained model on ``eval.data``, else the training data, with the run's rewards; ``settings`` as for
        ``evaluate``.
        """
        return evaluate(checkpoint=self.run_dir, _asked=self._asked, **settings)

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        n: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int = 0,
    ) -> list[list[str]]:
        """Sample from the trained model.

        Args:
            prompts: texts, or lists of chat messages.
            n: answers per prompt.
            max_new_tokens: default: as in training.
            temperature: default: as in training; 0: greedy.
            seed: fixes the samples.
        """
        from rlhf_host.data.chat import render_prompts
        from rlhf_host.data.templates import for_chat
        from rlhf_host.models.loading import load_tokenizer
        from rlhf_host.training.session import session

        if isinstance(prompts, str):
            raise UserError("generate takes a list of prompts: generate([prompt])")
        role, rollout, data = RoleConfig(model=str(self.model)), self.config.rollout, self.config.data
        tokenizer = load_tokenizer(role)
        sampling = Sampling(
            max_new_tokens=max_new_tokens or rollout.max_new_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids),
        )
        prompt_ids = render_prompts(prompts, for_chat(tokenizer, data), data.system_prompt, data.template)
        config = self.config.model_copy(update={"roles": {"actor": role}})
        with session(config, tokenizer=tokenizer) as running:
            answers = running.generate(prompt_ids, sampling, n=n, seed=seed)
        return [
            [str(tokenizer.decode(list(row.token_ids), skip_special_tokens=True)) for row in samples] for samples in answers
        ]


@speaking()
def train(
    *,
    algo: Plugin | None = None,
    rewards: Plugins | None = None,
    model: str | Path | None = None,
    data: Data | None = None,
    eval_data: Data | None = None,
    eval_rewards: Plugins | None = None,
    extensions: Plugins | None = None,
    agent: Plugin | None = None,
    trackers: Plugins | None = None,
    lr: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    n: int | None = None,
    max_new_tokens: int | None = None,
    rollout: RolloutSettings | None = None,
    train: TrainSettings | None = None,
    actor: RoleSettings | None = None,
    critic: RoleSettings | None = None,
    reference: RoleSettings | None = None,
    reward_model: RoleSettings | None = None,
    teacher: RoleSettings | None = None,
    eval: EvalSettings | None = None,
    checkpoint: CheckpointSettings | None = None,
    trajectories: TrajectoryLogSettings | None = None,
    pipeline: PipelineSettings | None = None,
    engine: Plugin | None = None,
    backend: Plugin | None = None,
    runtime: Plugin | None = None,
    sync: Plugin | None = None,
    kernels: Plugin | None = None,
    run_dir: str | Path | None = None,
    name: str | None = None,
    seed: int | None = None,
    config: Settings | None = None,
    resume: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    **settings: Any,
) -> Run:
    """Trains, as ``rlhf train`` does, and returns when the run has ended. Works inside a running event loop, as in notebooks.

    Args:
        algo: the algorithm.
        rewards: reward plugins or functions; they replace those of ``config``.
        model: the model to train: a directory, hub name or GGUF file.
        data: training data: a path or a name, a list of rows, a mapping from columns to lists, or a ``datasets.Dataset``. Which
            columns are meant is a setting, ``**{"data.prompt_key": "q"}``; for files also ``data={"sources": PATH,
            "prompt_key": "q"}``.
        eval_data: evaluation data.
        eval_rewards: rewards for evaluation; default: ``rewards``.
        extensions: filters, shaping, corrections.
        agent: plays the episodes.
        trackers: trackers in addition to the default ones.
        lr: peak learning rate of the actor.
        steps: training steps.
        batch_size: prompts per step, or rows of data that is trained on as it is.
        n: samples per prompt.
        max_new_tokens: longest answer per turn, in tokens.
        rollout: settings of sampling, as in ``rollout={"temperature": 0.8}``; and so on for every section.
        train: of updates.
        actor: of the trained model.
        critic: of the value model; ``reference``, ``reward_model`` and ``teacher`` likewise.
        eval: of evaluation.
        checkpoint: of checkpoints.
        trajectories: of the trajectory files.
        pipeline: of sampling ahead, with ``async_depth``.
        engine: what generates tokens; ``backend``, ``runtime``, ``sync`` and ``kernels`` likewise choose plugins.
        run_dir: where the run is written.
        name: of the run.
        seed: fixes data order, sampling and initial heads.
        config: what ``--config`` takes, or a list of that; all other arguments override it.
        resume: the directory of the run to continue; pass the run's Python objects again.
        force: with ``resume``, let the algorithm, seed, order of the data or models change too.
        dry_run: check everything, print what the run would be, and write nothing; the result has its whole ``config``.
        **settings: all other settings: dotted, ``**{"train.steps": 10, "algo.clip_eps": 0.1}``, ``debug``, or options under a
            plugin's name, ``kl={"coef": 0.1}``; ``disable``: installed plugins to ignore.

    Raises:
        UserError: settings or input cannot be used.
        RunError: the run had to stop.
    """
    named = {
        name: value for name, value in locals().items() if name not in ("config", "resume", "force", "dry_run", "settings")
    }
    for switch, value in {"force": force, "dry_run": dry_run}.items():
        if not isinstance(value, bool | None):
            raise UserError(f"{switch} is True or False, not {value!r}")
    asked = Arguments(named, settings)
    if resume is not None:
        if not isinstance(resume, str | Path):
            raise UserError(f"resume is a run directory, not {type(resume).__name__}")
        if config is not None or run_dir is not None:
            raise UserError("resume uses the run's own directory and settings: leave config and run_dir out")
        config = require_run(Path(resume))
    directory = None if resume is None else require_run(Path(resume)).parent
    with configured(asked, "train", config, resume=directory) as (run, manager):
        changes = [] if directory is None else check_resume(directory, run.config, force=force)
        if run.config.max_restarts and not RunTraits.of(run.config).runtime.remote:
            changes.append("max_restarts has no effect here: this process is all that the run has; supervised begins others")
        for warning in [*changes, *check(run, manager, merge_needs(manager))]:
            print(f"Warning: {in_arguments(warning)}", file=sys.stderr)
        again = None if directory is None else run.config.model_copy(update={"run_dir": str(directory)})
        ready = again or with_run_dir(run.config, make=not dry_run)
        if dry_run:
            from rlhf_host.cli.dry_run import dry_run as look

            look(ready, manager, directory, rows=asked.rows)
            return Run(Path(str(ready.run_dir)), Outcome("planned", 0), ready, asked)
        from rlhf_host.training.run import train as start

        outcome = start(ready, manager, resume=directory, rows=asked.rows, restarts=ready.max_restarts)
    return Run(Path(str(ready.run_dir)), outcome, ready, asked)


def load_run(run_dir: str | Path) -> Run:
    """Returns the run in a directory, as ``train`` returned it. Its Python objects are not restored.

    Raises:
        UserError: ``run_dir`` is not a run directory, or has plugins that are not installed.
    """
    files = RunDirectory(run_dir)
    config = read_config(require_run(files.path), quickstart=False).config
    about = files.about
    outcome = Outcome(files.status, files.step, files.path, error=about.get("error"), reason=about.get("stopped_by"))
    return Run(files.path, outcome, config, Arguments({}, {}))


@speaking()
def evaluate(
    *,
    model: str | Path | None = None,
    checkpoint: str | Path | None = None,
    rewards: Plugins | None = None,
    data: Data | None = None,
    agent: Plugin | None = None,
    output: str | Path | None = None,
    config: Settings | None = None,
    _asked: Arguments | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Evaluates a model, as ``rlhf eval`` does; returns metrics under ``eval/``.

    Args:
        model: a model directory, hub name, GGUF file, checkpoint or run directory.
        checkpoint: instead of ``model``: a run directory or a checkpoint in it, with the run's settings.
        rewards: reward plugins or functions.
        data: tasks to answer.
        agent: plays the episodes.
        output: a ``.jsonl`` file for all answers.
        config: what ``--config`` takes, or a list of that.
        **settings: all other settings, such as ``eval={"n": 4}``.

    Raises:
        UserError: settings or input cannot be used.
        RunError: too many answers could not be judged.
    """
    if "eval_data" in settings:
        raise UserError("eval_data is an argument of train; evaluate takes the tasks as data")
    judges = "rewards" if checkpoint is None and config is None else "eval_rewards"  # which a run or a file may have
    asked = Arguments(
        {judges: rewards, "agent": agent, "model": model, "eval_data": data}, settings, _asked, {**SHORT, "n": "eval.n"}
    )
    if checkpoint is not None:
        if config is not None or model is not None:
            raise UserError("checkpoint uses the run's own model and settings: leave model and config out")
        config = require_run(run_of(Path(checkpoint)) or Path(checkpoint))
    with configured(asked, "evaluate", config, None if checkpoint is None else str(checkpoint)) as (run, manager):
        check_evaluation(run.config, manager)
        from rlhf_host.training.evaluate_only import evaluate_only

        return evaluate_only(run.config, manager, None if output is None else Path(output), rows=asked.rows)


@contextmanager
def session(
    config: RunConfig | Settings | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    rewards: Plugins | None = None,
    extensions: Plugins | None = None,
    agent: Plugin | None = None,
    needs: Needs | None = None,
    **settings: Any,
) -> Iterator[Session]:
    """Starts a runtime with a model, for samples, conversations or log-probabilities by plain calls; ends it with the block.

    Args:
        config: what ``--config`` takes, or a complete configuration as commands have it, which leaves no room for other arguments.
        model: the actor.
        data: tasks for ``sample``.
        rewards: score the answers.
        extensions: filters of groups.
        agent: plays the episodes.
        needs: the roles to load; default: the actor, and frozen roles that plugins ask for.
        **settings: all other settings.

    Raises:
        UserError: settings or the model cannot be used.
    """
    from rlhf_host.training.session import session as run

    if isinstance(config, RunConfig):
        if settings or any(value is not None for value in (model, data, rewards, extensions, agent)):
            raise UserError("session has a whole configuration: leave its other arguments out")
        with run(config, needs=needs) as running:
            yield running
        return
    named = {"model": model, "data": data, "rewards": rewards, "extensions": extensions, "agent": agent}
    asked = Arguments(named, settings)
    with (
        speaking(),
        configured(asked, "rollout", config) as (ready, manager),
        run(ready.config, manager, needs=needs, rows=asked.rows) as running,
    ):
        yield running
