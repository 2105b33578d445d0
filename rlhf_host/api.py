"""Runs from Python: ``rlhf_host.train`` and its sisters take what the command line takes, and Python objects besides.

Plugins may be names, classes or instances with hooks, and rewards plain functions; data may be rows in memory. Every other
setting is a keyword, as a section, ``train={"steps": 10}``, or dotted, ``**{"train.steps": 10}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_host.cli.eval import model_of, run_of, with_defaults
from rlhf_host.cli.rollout import prompts_per_step
from rlhf_host.config.check import check, check_evaluation, check_replay, check_rollout
from rlhf_host.config.load import read_config
from rlhf_host.config.plan import Use, build_plugins, complete, merge_needs
from rlhf_host.config.run_dir import require_run, with_run_dir
from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.config.sections import MANY, SPELLINGS
from rlhf_host.config.trait_defaults import RunTraits
from rlhf_host.config.yaml_file import At
from rlhf_host.data.sources import PROMPT_KEYS, SPLITS
from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.python_objects import has_hooks
from rlhf_host.plugins.selection import PYTHON, parse_choice
from rlhf_host.records.episodes import Sampling, Trajectory
from rlhf_host.records.needs import Outcome

if TYPE_CHECKING:
    from rlhf_host.training.replay import Replay

Plugin = Any
"""A name (``[ALIAS=]NAME``), a mapping of ``name`` and its options, or a class or instance with hooks; a reward may be a
function too (``plugins.objects.FunctionReward`` says what it is called with)."""

Plugins = Any
"""One plugin, a list of them, or a mapping of aliases to them."""

Data = Any
"""A path, hub name or task plugin's name, a list of these, or rows: a list of dicts, a ``datasets`` object, a data frame."""


@dataclass(slots=True, repr=False)
class Run:
    """A finished or interrupted training run."""

    run_dir: Path
    outcome: Outcome
    config: RunConfig
    _asked: _Asked

    def __repr__(self) -> str:
        return f"Run({self.outcome.status} at step {self.outcome.step}, {str(self.run_dir)!r})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, one per logged step; without the jsonl tracker, the last step's only."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return [{**self.outcome.metrics, "step": self.outcome.step}]
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    @property
    def model(self) -> Path:
        """The directory of the trained model. Raises ``UserError`` where none was written (``checkpoint.final`` false)."""
        return model_of(self.run_dir)

    def evaluate(self, **settings: Any) -> dict[str, float]:
        """The trained model on ``eval.data``, else the training data, with the run's rewards; ``settings`` as of ``evaluate``."""
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
        from rlhf_host.models.loading import load_tokenizer
        from rlhf_host.training.run import generate_only

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
        prompt_ids = render_prompts(prompts, tokenizer, data.system_prompt, data.template)
        config = self.config.model_copy(update={"roles": {"actor": role}})
        answers = generate_only(config, tokenizer, prompt_ids, sampling, n=n, seed=seed)
        return [[str(tokenizer.decode(one.token_ids, skip_special_tokens=True)) for one in own] for own in answers]


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
    preset: str | Sequence[str] = (),
    config: str | Path | None = None,
    resume: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Train, as ``rlhf train`` does, and wait for it. Works inside a running event loop, as notebooks have.

    Args:
        algo: the algorithm.
        rewards: what judges; they replace those of ``config``.
        model: the model to train: a directory, hub name or GGUF file.
        data: what to train on. Columns as in files: ``data={"sources": PATH, "prompt_key": "q"}``, ``**{"data.prompt_key": "q"}``.
        eval_data: what to evaluate on.
        eval_rewards: what judges there; default: ``rewards``.
        extensions: filters, shaping, corrections.
        agent: how an episode is played.
        trackers: beside console and jsonl.
        preset: presets beneath.
        config: a YAML file; all other arguments lie on top.
        resume: the run directory to go on in; objects given to the run must be given again.
        **settings: all else that a configuration has, ``run_dir`` and ``debug`` among them.

    Raises:
        UserError: for settings or input that cannot be used.
        RunError: when the run had to stop.
    """
    asked = _Asked(settings)
    asked.plugin("algo", "algo", algo)
    asked.plugins("reward", "reward", rewards)
    asked.plugins("eval.reward", "reward", eval_rewards)
    asked.plugins("extensions", "extension", extensions)
    asked.plugin("agent", "agent", agent)
    asked.plugins("tracker", "tracker", trackers)
    asked.model(model)
    asked.data("data", data, "train")
    asked.data("eval.data", eval_data, "eval")
    if resume is not None:
        if config is not None or preset or "run_dir" in settings:
            raise UserError("resume goes on with the run's own directory and settings: leave config, preset and run_dir out")
        config = require_run(Path(resume))
    ready, manager = asked.build("train", config, preset)
    try:
        for warning in check(ready, manager, merge_needs(manager)):
            _say(f"Warning: {warning}")
        ready = ready.model_copy(update={"run_dir": str(resume)}) if resume is not None else with_run_dir(ready)
        from rlhf_host.training.run import train as run

        outcome = run(ready, manager, resume=None if resume is None else Path(resume), rows=asked.rows)
    finally:
        manager.close()
    if outcome.status == "failed":
        raise RunError(outcome.error or "the run failed")
    return Run(Path(str(ready.run_dir)), outcome, ready, asked)


def evaluate(
    *,
    model: str | Path | None = None,
    checkpoint: str | Path | None = None,
    rewards: Plugins | None = None,
    data: Data | None = None,
    agent: Plugin | None = None,
    preset: str | Sequence[str] = (),
    config: str | Path | None = None,
    _asked: _Asked | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Evaluate a model, as ``rlhf eval`` does; metrics under ``eval/``.

    Args:
        model: a model directory, hub name, GGUF file, checkpoint or run directory.
        checkpoint: instead: a run directory or a checkpoint in it, with the run's settings.
        rewards: what judges.
        data: what to answer.
        agent: how an episode is played.
        preset: presets beneath.
        config: a YAML file.
        **settings: all else that a configuration has, such as ``eval={"n": 4}``.

    Raises:
        UserError: for settings or input that cannot be used.
        RunError: when too many answers could not be judged.
    """
    asked = _Asked(settings, _asked)
    if checkpoint is not None and rewards is not None:
        asked.plugins("eval.reward", "reward", rewards)
    else:
        asked.plugins("reward", "reward", rewards)
    asked.plugin("agent", "agent", agent)
    asked.model(model)
    asked.data("eval.data", data, "eval")
    if checkpoint is not None:
        if config is not None or preset or model is not None:
            raise UserError("checkpoint brings the run's own model and settings: leave model, config and preset out")
        config = require_run(run_of(Path(checkpoint)))
    ready, manager = asked.build("evaluate", config, preset, None if checkpoint is None else str(checkpoint))
    try:
        check_evaluation(ready, manager)
        from rlhf_host.training.run import evaluate_only

        return evaluate_only(ready, manager, rows=asked.rows)
    finally:
        manager.close()


def rollout(
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    rewards: Plugins | None = None,
    extensions: Plugins | None = None,
    agent: Plugin | None = None,
    steps: int | None = None,
    rollouts: int | None = None,
    output: str | Path | None = None,
    preset: str | Sequence[str] = (),
    config: str | Path | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """Sample and score as the first steps of ``train`` would, without training, as ``rlhf rollout`` does.

    Args:
        model: the model to sample from.
        data: what to answer.
        rewards: what judges; without any the trajectories are unjudged, and ``replay`` can judge them.
        extensions: filters of groups.
        agent: how an episode is played.
        steps: batches of ``train.batch_size`` prompts; default: 1.
        rollouts: instead of steps: so many trajectories, rounded up to whole prompts.
        output: a ``.jsonl`` file for them.
        preset: presets beneath.
        config: a YAML file.
        **settings: all else that a configuration has.

    Raises:
        UserError: for settings or input that cannot be used.
        RunError: when too many trajectories could not be judged.
    """
    asked = _Asked(settings)
    asked.plugins("reward", "reward", rewards)
    asked.plugins("extensions", "extension", extensions)
    asked.plugin("agent", "agent", agent)
    asked.model(model)
    asked.data("data", data, "train")
    ready, manager = asked.build("rollout", config, preset)
    try:
        check_rollout(ready, manager)
        from rlhf_host.training import saved_rows
        from rlhf_host.training.records import provenance
        from rlhf_host.training.run import rollout_only

        if output is not None:
            saved_rows.check_output(Path(output))
        found: list[Trajectory] = []
        parts: list[bytes] = []
        origin = provenance(ready.model_dump(mode="json"), "train")

        def take_in(step: int, collected: Any) -> None:
            rows = collected.trajectories_in_order()
            found.extend(rows)
            parts.append(saved_rows.lines(step, "train", rows, origin))

        rollout_only(ready, manager, prompts_per_step(ready, steps, rollouts), take_in, rows=asked.rows)
        if output is not None:
            saved_rows.write_lines(Path(output), parts)
        return found
    finally:
        manager.close()


def replay(
    saved: str | Path | Sequence[Trajectory],
    *,
    algo: Plugin | None = None,
    rewards: Plugins | None = None,
    extensions: Plugins | None = None,
    model: str | Path | None = None,
    preset: str | Sequence[str] = (),
    config: str | Path | None = None,
    **settings: Any,
) -> Replay:
    """Score saved trajectories again and compute their advantages again, as ``rlhf replay`` does.

    Args:
        saved: a file of ``rlhf rollout``, a run directory or its ``trajectories/``, or what ``rollout`` returned.
        algo: computes advantages.
        rewards: judge anew; default: rewards stay as saved.
        extensions: filters and changes of rewards.
        model: only where a plugin asks for a role.
        preset: presets beneath.
        config: a YAML file.
        **settings: all else that a configuration has.

    Raises:
        UserError: for settings or input that cannot be used.
        RunError: when a plugin gives something unusable.
    """
    asked = _Asked(settings)
    asked.plugin("algo", "algo", algo)
    asked.plugins("reward", "reward", rewards)
    asked.plugins("extensions", "extension", extensions)
    asked.model(model)
    ready, manager = asked.build("replay", config, preset)
    try:
        check_replay(ready)
        from rlhf_host.training.replay import replay as run
        from rlhf_host.training.saved_rows import SavedStep, read_steps

        if isinstance(saved, str | Path):
            steps = read_steps(Path(saved))
        elif saved:
            steps = [SavedStep(1, "train", list(saved), {}, where="the trajectories")]
        else:
            raise UserError("there are no trajectories to replay")
        return run(ready, manager, steps)
    finally:
        manager.close()


# --- from arguments to a configuration ----------------------------------------------------------


class _Asked:
    """Arguments as settings in the form of a file, and the objects that stand behind their names.

    Args:
        settings: sections and dotted names.
        known: objects of an earlier run, for its names.
    """

    def __init__(self, settings: Mapping[str, Any], known: _Asked | None = None):
        self.given: dict[tuple[str, str], Any] = dict(known.given) if known else {}
        self.rows: dict[str, Iterable[Mapping[str, Any]]] = dict(known.rows) if known else {}
        self._tree: dict[str, Any] = {}
        self._own: set[tuple[str, str]] = set()
        for name, value in settings.items():
            if name in MANY or name in SPELLINGS:  # as files spell them
                key = SPELLINGS.get(name, name)
                self.plugins(key, MANY[key], value)
            else:
                self._put(name, value)

    def plugin(self, path: str, kind: str, value: Plugin | None) -> None:
        if value is not None:
            self._put(path, self._choice(kind, value)[1])

    def plugins(self, path: str, kind: str, values: Plugins | None) -> None:
        if values is None:
            return
        if isinstance(values, Mapping):
            pairs = [self._choice(kind, value if value is not None else alias, alias) for alias, value in values.items()]
        else:
            listed = values if isinstance(values, list | tuple) else [values]
            pairs = [self._choice(kind, value) for value in listed]
        chosen: dict[str, Any] = {}
        for alias, tree in pairs:
            if alias in chosen:
                raise UserError(f"{path}: {alias!r} is chosen twice: give a mapping of aliases, {{'one': ..., 'other': ...}}")
            chosen[alias] = tree
        self._put(path, chosen)

    def model(self, value: str | Path | None) -> None:
        if value is None:
            return
        if not isinstance(value, str | Path):
            raise UserError(
                f"model is a directory, hub name or GGUF file, not {type(value).__name__}: write it with save_pretrained first"
            )
        self._put("actor.model", str(value))

    def data(self, path: str, value: Data | None, split: str) -> None:
        if value is None:
            return
        rows = _rows(value, split)
        if rows is None:
            if not isinstance(value, str | Path | list | tuple | Mapping):
                raise UserError(f"{path} is a path, a name, or rows with a prompt each, not {type(value).__name__}")
            self._put(path, value)
            return
        spec = f"{PYTHON}:{path.replace('.', '_')}"
        self.rows[spec] = rows
        self._put(f"{path}.sources", [spec])

    def build(
        self, use: Use, path: str | Path | None, preset: str | Sequence[str], checkpoint: str | None = None
    ) -> tuple[RunConfig, PluginManager]:
        """The configuration, complete, and its plugins.

        Raises:
            UserError: one line per mistake.
        """
        presets = [preset] if isinstance(preset, str) else list(preset)
        loaded = read_config(path, (), presets, settings=_at(self._tree, ()), quickstart=use != "replay")
        for notice in loaded.notices:
            _say(notice)
        config = loaded.config
        if use == "evaluate":
            config = with_defaults(config, checkpoint)
        ready = complete(config, loaded.origins, use, self.given)
        elsewhere = [name for kind, name in self._own if kind in ("algo", "extension")]
        if elsewhere and RunTraits.of(ready).runtime.remote:
            raise UserError(
                f"{elsewhere[0]!r} is a Python object, and the runtime {ready.runtime.plugin} has workers in other processes: "
                "leave runtime out, or install it as a plugin (rlhf plugins new)"
            )
        return ready, build_plugins(ready, use, self.given)

    def _put(self, path: str, value: Any) -> None:
        """Lay a value at a dotted path, into what is there."""
        *parents, last = path.split(".")
        tree = self._tree
        for part in parents:
            inner = tree.setdefault(part, {})
            if part in ("data",) and not isinstance(inner, Mapping):
                inner = tree[part] = {"sources": inner}
            if not isinstance(inner, dict):
                raise UserError(f"{path}: {part} is given already, as {inner!r}")
            tree = inner
        if isinstance(value, Mapping):
            own: dict[str, Any] = {}
            inside = _Asked({})
            for key, item in value.items():
                inside._put(str(key), item)
            own = inside._tree
            value = {**tree[last], **own} if isinstance(tree.get(last), dict) else own
        elif last in tree:
            raise UserError(f"{path} is given twice")
        tree[last] = value

    def _choice(self, kind: str, value: Plugin, alias: str | None = None) -> tuple[str, dict[str, Any]]:
        """An alias and the choice in the form of a file."""
        tree: dict[str, Any] = {}
        if isinstance(value, Mapping):
            tree = {key: item for key, item in value.items() if key not in ("name", "plugin")}
            value = value.get("plugin", value.get("name", alias))
            if value is None:
                raise UserError(f"{kind}: a mapping needs the plugin's 'name'")
        if isinstance(value, str):
            own, spec = parse_choice(value)
            return alias or own, {**tree, "plugin": spec}
        name = alias or _name_of(kind, value)
        if self.given.get((kind, name), value) is not value and (kind, name) in self._own:
            raise UserError(f"two objects go by the name {name!r}: give a mapping of aliases, {{'one': ..., 'other': ...}}")
        self.given[kind, name] = value
        self._own.add((kind, name))
        return name, {**tree, "plugin": f"{PYTHON}:{name}"}


def _name_of(kind: str, value: Any) -> str:
    """A name that flags can spell."""
    if not callable(value) and not has_hooks(value):
        raise UserError(f"{kind}: {type(value).__name__} is neither a plugin's name nor an object with hooks")
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if name.isidentifier() else kind  # a lambda


def _rows(value: Data, split: str) -> Iterable[Mapping[str, Any]] | None:
    """Rows in memory, or ``None`` for what names a source or is a section of settings."""
    if isinstance(value, str | Path):
        return None
    if isinstance(value, Mapping):
        if not hasattr(value, "column_names"):
            return None
        # a dict of the splits of a dataset
        found = next((name for name in SPLITS[split] if name in value), None)
        if found is None:
            raise UserError(f"the dataset has the splits {', '.join(value)}: give one of them, data=dataset[SPLIT]")
        return value[found]
    if isinstance(value, list | tuple):
        rows = [row for row in value if isinstance(row, Mapping) and not _names_source(row)]
        if not rows and value:
            return None
        if len(rows) < len(value):
            raise UserError("data mixes rows and names of sources: give one or the other")
        return list(value)
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return value.to_dict("records")
    if hasattr(value, "column_names"):
        return value
    if isinstance(value, Iterable):
        return list(value)
    return None


def _names_source(row: Mapping[str, Any]) -> bool:
    return "path" in row and not any(key in row for key in PROMPT_KEYS)


def _at(value: Any, path: tuple[str, ...]) -> At:
    """Settings as a file's tree has them; their places are dotted names."""
    where = ".".join(path)
    if isinstance(value, Mapping):
        return At({str(key): _at(item, (*path, str(key))) for key, item in value.items()}, where)
    if isinstance(value, list | tuple):
        return At([_at(item, path) for item in value], where)
    return At(str(value) if isinstance(value, Path) else value, where)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
