"""Checks of runtimes: the same numbers as in one process, weights under their versions, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf_authoring.contracts import generators
from rlhf_authoring.contracts.generators import PROMPTS, close_shared, shared
from rlhf_authoring.contracts.reinforce import NAME, actor, batch, installed, manager_of
from rlhf_authoring.contracts.subject import Broken, Subject, check, expect, finish
from rlhf_authoring.contracts.traces import leaves_nothing
from rlhf_host import RunError, Segment, Task, Trajectory, UserError, hookimpl
from rlhf_host.internals import PluginManager, beyond, completions, runtime_plugin, runtime_start, start_runtime, train
from rlhf_host.models import load_tokenizer, quiet_transformers
from rlhf_host.protocols import RuntimeStart, RuntimeTraits
from rlhf_host.settings import (
    DataConfig,
    DataSource,
    PluginChoice,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    merge_needs,
    resolve,
)

CLOSE = 1e-3
"""Largest distance of numbers from the local runtime's, relative to the larger."""
WAIT_S = 300.0


class _Notes:
    """A reward that counts vowels, and the metrics of every step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    @hookimpl
    def score(self, trajectories: Sequence[Any]) -> list[float]:
        return [sum(letter in "aeiou" for letter in trajectory.text) / 8 for trajectory in trajectories]

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append(metrics)


LOCAL = Subject("runtime", "local")


def _config(subject: Subject, run_dir: str | None = None) -> RunConfig:
    """Three steps of a tiny run on the runtime."""
    config = RunConfig(
        roles={"actor": actor()},
        algo=PluginChoice(name=NAME),
        data=DataConfig(sources=[DataSource(path="arithmetic")]),
        tracker={},
        runtime=PluginChoice(name=subject.name, **subject.options),
        placement=list(subject.placement),
        rollout=RolloutConfig(n=4, max_new_tokens=8),
        train=TrainConfig(steps=3, batch_size=4, threads=1),
        run_dir=run_dir,
    )
    return resolve(config).config


def _manager(config: RunConfig, notes: _Notes) -> PluginManager:
    return PluginManager([*resolve(config).plugins().loaded, *manager_of(reward=notes, tracker=notes).loaded])


def _start(config: RunConfig) -> RuntimeStart:
    manager = _manager(config, _Notes())
    return runtime_start(config, manager, merge_needs(manager), load_tokenizer(config.roles["actor"]), 10, {})


class Rig(generators.Rig):
    """A started runtime with one trained role."""

    def __init__(self, subject: Subject):
        with installed(), quiet_transformers():
            config = _config(subject)
            self.runtime = start_runtime(config, _start(config)).runtime
        engine = self.runtime.engine
        expect(engine is not None, "it starts no engine")
        assert engine is not None
        self.generator = engine
        super().__init__(engine, self.runtime.close, WAIT_S)

    def weights(self) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder, quiet_transformers():
            finish(self.runtime.save_role("actor", Path(folder)))
            return load_file(Path(folder, "model.safetensors"))


@check()
def traits_and_description_come_first(subject: Subject) -> None:
    """``traits`` and ``describe`` start nothing: traits are the same at each look, a description is lines of text."""
    with installed(), leaves_nothing("describe", "describe without starting anything"):
        start = _start(_config(subject))
        subject.traits(RuntimeTraits)
        lines = list(subject.build().describe(start))
        expect(lines and all(isinstance(line, str) and line for line in lines), f"describe gave {lines}; give lines of text")


@check()
def a_role_that_cannot_be_loaded_leaves_nothing(subject: Subject) -> None:
    """A role that cannot be loaded is a ``UserError`` at ``start``, in its own words, and no process stays."""
    with installed(), leaves_nothing("a failed start", "end it before raising"), tempfile.TemporaryDirectory() as empty:
        config = _config(subject)
        start = _start(config)
        start = replace(start, roles={name: role.model_copy(update={"model": empty}) for name, role in start.roles.items()})
        try:
            runtime_plugin(config).start(start)
        except UserError as error:
            expect("config.json" in str(error), f"start raises {error}: the reason of the process that failed is lost")
            return
        raise Broken("start loads a role from an empty directory")


@check()
def trainers_compute_as_one_process_does(subject: Subject) -> None:
    """Outputs come back in the order of rows, however few there are; updates have the metrics, and leave the weights, that they
    have in one process; what is not finite is refused."""
    rig, spoiled = shared(subject, Rig), batch()
    with contextlib.closing(Rig(LOCAL)) as local:
        for rows in (batch(), batch().select([4])):
            here, there = (one.runtime.trainer.outputs("actor", "logprobs", rows) for one in (local, rig))
            expect(there.shape == here.shape and there.dtype == torch.float32, f"outputs are {there.dtype} {list(there.shape)}")
            expect(torch.allclose(there, here, atol=CLOSE), "outputs are not what one process gives, row by row")
        for seed in range(2):
            mine, other = (one.runtime.trainer.update(batch(seed), sampled_now=True) for one in (rig, local))
            expect(mine.refused is None, f"an update was refused: {mine.refused}")
            _expect_close(mine.metrics.result(), other.metrics.result(), "an update's")
        assert spoiled.advantages is not None
        spoiled.advantages[6] = float("nan")
        refused = rig.runtime.trainer.update(spoiled, sampled_now=True).refused
        expect(refused is not None and "nan" in refused, f"a loss that is not finite is not refused ({refused!r})")
        _expect_same_weights(rig.weights(), local.weights())


def _expect_close(there: dict[str, float], here: dict[str, float], whose: str) -> None:
    gaps = {name: abs(there.get(name, math.inf) - value) for name, value in here.items()}
    far = [name for name, value in here.items() if not gaps[name] <= CLOSE * max(1e-2, abs(value))]
    apart = [f"{name} {there.get(name)} instead of {here[name]:.6g}" for name in far]
    expect(not apart, f"{whose} metrics are not the local runtime's: {', '.join(apart[:3])}")


def _expect_same_weights(there: dict[str, Tensor], here: dict[str, Tensor]) -> None:
    wrong = [name for name, value in here.items() if not torch.allclose(there[name], value, rtol=CLOSE, atol=1e-5)]
    expect(not wrong, f"the weights are not the local runtime's: {', '.join(wrong[:3])}")


@check()
def failures_of_a_plugin_name_it(subject: Subject) -> None:
    """A hook that raises where the models are ends the update with a ``RunError`` that names plugin and cause; others go on."""
    rig = shared(subject, Rig)
    spoiled = batch()
    spoiled.advantages = None
    try:
        rig.runtime.trainer.update(spoiled, sampled_now=True)
    except RunError as error:
        expect(f"algo:{NAME}" in str(error), f"a hook's failure comes out as {error}; it must name the plugin")
    else:
        raise Broken("a hook that raises does not end the update")
    rig.runtime.trainer.outputs("actor", "logprobs", batch())


@check()
def syncs_bring_the_trainers_weights(subject: Subject) -> None:
    """After ``sync`` the engine and all targets have the version, and tokens carry it with the trainer's log-probabilities."""
    rig = shared(subject, Rig)
    for version in (4, 5):
        rig.runtime.trainer.update(batch(version), sampled_now=True)
        rig.wait(rig.runtime.sync(version), "sync")
        held = [rig.generator.version, *(target.engine.version for target in rig.runtime.targets)]
        expect(set(held) == {version}, f"after the sync of version {version} engine and targets have {held}")
        generations = rig.sample()
        expect({version for one in generations for version in one.versions} == {version}, "tokens do not carry the version")
        rows = [
            Trajectory("e", f"g{n}", Task(""), [Segment("prompt", list(ids)), Segment("action", one.token_ids)])
            for n, (ids, one) in enumerate(zip(PROMPTS, generations, strict=True))
        ]
        own = rig.runtime.trainer.outputs("actor", "logprobs", completions(rows, 1.0))
        gap = max(abs(float(own[n, i]) - value) for n, one in enumerate(generations) for i, value in enumerate(one.logprobs))
        most = CLOSE if rig.runtime.exact else 0.2
        expect(gap <= most, f"sampled log-probabilities are {beyond(gap, most)} nats from the trainer's")


@check()
def requests_are_cancelled_one_by_one(subject: Subject) -> None:
    """A request that is cancelled leaves the others as they are, and the engine free."""
    rig = shared(subject, Rig)
    rig.wait(rig.runtime.sync(6), "sync")
    rig.cancel_every_other()


@check()
def state_comes_back(subject: Subject) -> None:
    """``load_state`` takes back what ``save_state`` wrote, a folder for each trained role, and refuses other roles' state."""
    rig = shared(subject, Rig)
    with tempfile.TemporaryDirectory() as folder:
        finish(rig.runtime.save_state(Path(folder)))
        written = sorted(path.name for path in Path(folder).iterdir())
        expect(written == ["actor"], f"save_state wrote {written}, expected a folder for each trained role: ['actor']")
        rig.runtime.load_state(Path(folder))
        Path(folder, "actor").rename(Path(folder, "critic"))
        with contextlib.suppress(UserError):
            rig.runtime.load_state(Path(folder))
            raise Broken("it takes a critic's state for the actor's; raise UserError")


@check()
def closing_fails_what_waits(subject: Subject) -> None:
    """``close`` fails requests that wait with ``RunError``; again it does nothing."""
    close_shared()
    rig = Rig(subject)
    rig.wait(rig.runtime.sync(7), "sync")
    rig.close_with_a_request()


@check()
def three_steps_are_the_local_runtimes(subject: Subject) -> None:
    """A run of three steps has the metrics and the model of the same run on the local runtime, and leaves no process or thread."""
    close_shared()
    here, model = _short_run(LOCAL)
    with leaves_nothing("the run", "end it in close"):
        there, other = _short_run(subject)
    for one, two in zip(there, here, strict=True):
        _expect_close(one, {name: two[name] for name in ("loss", "grad_norm", "reward/mean", "entropy")}, "a step's")
    _expect_same_weights(other, model)


def _short_run(subject: Subject) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    notes = _Notes()
    with installed(), tempfile.TemporaryDirectory() as folder, quiet_transformers():
        config = _config(subject, run_dir=folder)
        train(config, _manager(config, notes))
        return notes.rows, load_file(Path(folder, "model", "model.safetensors"))
