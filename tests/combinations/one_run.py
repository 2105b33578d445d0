"""One case of the matrix: a run of two steps in this process, watched step by step."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from rlhf_host import hookimpl
from rlhf_host.arguments import Arguments
from rlhf_host.config.check import check
from rlhf_host.config.load import read_config
from rlhf_host.config.resolve import merge_needs, resolve
from rlhf_host.errors import UserError
from rlhf_host.models.dtypes import master_of
from rlhf_host.records.needs import Needs, RoleNeed
from rlhf_host.runtimes.local_runtime import LocalTrainer
from rlhf_host.training import run as runs
from rlhf_host.training.records import provenance
from rlhf_host.training.saved_rows import lines, write_lines

from .kinds import DATA, PLAIN, SCHEDULES, Files, Parity, named, names, required

STEPS = 2
LR = 1e-2
TIMES = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu", "rollout/")
CLOSE, ROUGH = 2e-4, 0.1
"""Nearness of log-probabilities, and of those that are computed in 16 bits."""
RAISED = re.compile(r"\b[A-Z]\w*(Error|Exception)\b")
"""Matches an error that is no refusal, but was told as one."""
STOPS = list(range(100, 140))
"""Tokens that end about half of the answers before their limit."""
TEMPERATURES = (1.0, 0.5)
SAMPLER = "grpo"
"""The algorithm of the run whose rollouts are saved."""


@dataclass(frozen=True)
class Case:
    """One combination; plugins by name, options as ``(name, value)``."""

    algo: str
    extension: str = PLAIN
    second: str = PLAIN
    data: str = "tasks"
    schedule: str = PLAIN
    temperature: float = 1.0
    model: str = PLAIN
    algo_option: tuple[str, Any] | None = None
    extension_option: tuple[str, Any] | None = None

    def __str__(self) -> str:
        options = [f"{whose}.{one[0]} {one[1]}" for whose, one in self._options if one is not None]
        parts = [self.algo, self.extension, self.second, self.data, self.schedule, self.model]
        return " · ".join(filter(None, [*parts, f"temperature {self.temperature:g}", *options]))

    @property
    def _options(self) -> list[tuple[str, tuple[str, Any] | None]]:
        return [(self.algo, self.algo_option), (self.extension, self.extension_option)]


@dataclass
class Found:
    """What became of a case. ``outcome``: ``run``, ``refused`` or ``wrong``."""

    case: Case
    outcome: str
    reasons: list[str] = field(default_factory=list)
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)


class Watch:
    """An extension that looks at every loss and every step, and writes down what is not as it should be."""

    def __init__(self, case: Case):
        self.case, self.wrong, self.metrics = case, list[str](), dict[int, Mapping[str, float]]()
        self.begun = False
        self.trains: list[bool] = []
        """For each update of the step, whether it has a row to train on: masks may leave nothing of chosen rows."""
        self._updates: dict[str, int] = {}

    def starts(self, loop: Any, started: Any) -> None:
        self.loop, self.needs, self.settings = loop, started.needs, started.roles
        self.roles = loop.parts.runtime.trainer.worker.roles
        self.first = self.last = self._weights()

    def _weights(self) -> dict[str, list[torch.Tensor]]:
        return {name: [each.clone() for each in self._of(name)] for name in self.roles}

    # --- losses -------------------------------------------------------------------------------

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        self.begun = True
        temperature = self.case.temperature if self.needs.samples else 1.0
        if batch.temperature != temperature:
            self.wrong.append(f"step {batch.step}: the batch is at temperature {batch.temperature}, not {temperature}")
        if role != "actor" or outputs.logprobs is None:
            return []
        self._compare("actor", "the pass", outputs.logprobs, batch, batch.action_mask, temperature)
        shared = [id(other.passes.model) for other in self.roles.values()]
        for name, values in batch.logprobs.items():
            own = name in self.roles and shared.count(id(self.roles[name].passes.model)) == 1 and name not in batch.prompts
            if own and name != "actor":
                self._compare(name, f"the role {name}", values, batch, batch.action_mask, temperature)
        new = batch.step == 1 and all(map(torch.equal, self._of("actor"), self.first["actor"]))
        if new and self.needs.samples and "saved" not in self.case.data:
            sampled = batch.action_mask & ~batch.sampler_logprobs.isnan()
            self._compare("actor", "the sampler", batch.sampler_logprobs, batch, sampled, temperature)
        return []

    def _of(self, role: str) -> list[torch.Tensor]:
        return [master_of(each).detach() for each in self.roles[role].passes.model.parameters()]

    @torch.no_grad()
    def _compare(self, role: str, what: str, values: Any, batch: Any, mask: Any, temperature: float) -> None:
        """Compares log-probabilities of the first rows with those of the plain model."""
        model = self.roles[role].passes.model
        for row in range(min(2, len(batch))):
            prompt, answer = (
                list(batch.prompt_ids[row]),
                batch.completion_ids[row].tolist()[: int(batch.completion_mask[row].sum())],
            )
            if not answer:
                continue
            logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            if logits.shape[-1] == 1:
                return
            expected = (logits.float() / temperature).log_softmax(-1)[range(len(answer)), answer]
            chosen = torch.tensor(mask[row].tolist()[: len(answer)])
            found = torch.tensor(values[row].tolist()[: len(answer)])
            gap = (found - expected)[chosen].abs()
            if not bool((gap < (ROUGH if self.case.model == "16 bits" else CLOSE)).all()):
                apart = f"{float(gap.max()):.2g} apart from those at temperature {temperature:g}"
                self.wrong.append(f"step {batch.step}: log-probabilities of {what} are {apart}")

    # --- steps --------------------------------------------------------------------------------

    @hookimpl
    def log_metrics(self, step, metrics):
        if not step:
            return
        self.metrics[step] = dict(metrics)
        self.wrong += [f"step {step}: {name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
        now = self._weights()
        moving = {
            id(self.roles[need.name].passes.model) for need in self.needs.roles if need.trainable and step > need.idle_steps
        }
        for need in self.needs.roles:
            if need.name in self.roles:
                self._look(need, step, metrics, now, shares=id(self.roles[need.name].passes.model) in moving)
        self.last, self.trains = now, []

    def _look(self, need: Any, step: int, metrics: Mapping[str, float], now: Mapping[str, Any], *, shares: bool) -> None:
        prefix = self.roles[need.name].prefix
        moved = not all(map(torch.equal, self.last[need.name], now[need.name]))
        trains = need.trainable and step > need.idle_steps
        rate = metrics.get(f"{prefix}lr")
        if trains:
            if rate is None:
                if moved or any(self.trains):
                    self.wrong.append(f"step {step}: {need.name} took no step, and {'moved' if moved else 'has a loss'}")
                return
            expected = self._expected(need)
            if not math.isclose(rate, expected, rel_tol=1e-6, abs_tol=1e-12):
                self.wrong.append(f"step {step}: the rate of {need.name} is {rate:g}, not {expected:g}")
            if moved != (expected > 0) and metrics[f"{prefix}grad_norm"] > 0:
                self.wrong.append(f"step {step}: {need.name} {'moved' if moved else 'did not move'} at rate {rate:g}")
            return
        if rate is not None or f"{prefix}grad_norm" in metrics or (need.trainable and f"{prefix}loss" in metrics):
            self.wrong.append(f"step {step}: {need.name} is idle and has a step's metrics")
        apart = need.source in now and not all(map(torch.equal, self.last[need.name], now[need.source]))
        follows = need.moves and step % need.follows.every == 0 and apart
        if not shares and moved != follows:
            self.wrong.append(f"step {step}: {need.name} {'moved, and nothing moves it' if moved else 'did not follow'}")

    def _expected(self, need: Any) -> float:
        """Returns the mean rate of the role's next updates, by the formula of its schedule."""
        settings, each = self.settings[need.name], sum(self.trains)
        total = (STEPS - need.idle_steps) * self.loop.parts.config.train.updates_per_batch
        done = self._updates.get(need.name, 0)
        self._updates[need.name] = done + each
        own = _of_roles(self.case)
        warm, low = own.get("warmup_steps", 0), own.get("min_lr_ratio", 0.0)
        shapes = {"constant": lambda x: 1.0, "linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}
        shape = shapes[own.get("schedule", "constant")]

        def share(update: int) -> float:
            if update < warm:
                return (update + 1) / warm
            value = shape(min(1.0, (update - warm) / max(1, total - warm)))
            return value if own.get("schedule") is None else low + (1 - low) * value

        return settings.peak_lr * sum(map(share, range(done, done + each))) / each


# --- runs ---------------------------------------------------------------------------------------


class Runs:
    """Runs cases. Everything that depends on the installation alone is done once."""

    def __init__(self, files: Files):
        self.files, self._numbers = files, itertools.count()
        self._needs: dict[Case, Needs] = {}

    def __call__(self, case: Case, watch: Watch | None = None) -> Found:
        watch, quiet = watch or Watch(case), io.StringIO()
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), _silent(), _once(watch):
                self._train(case, watch)
        except UserError as error:
            if not watch.begun and not RAISED.search(str(error)):
                return Found(case, "refused", str(error).splitlines())
            watch.wrong.append(f"{type(error).__name__} after the start: {error}")
        except Exception as error:
            watch.wrong.append(f"{type(error).__name__}: {error}")
        else:
            if len(watch.metrics) != STEPS:
                watch.wrong.append(f"{len(watch.metrics)} steps")
        if not watch.wrong and not watch.needs.samples and case.temperature != 1:
            plain = self(replace(case, temperature=1.0))
            if _values(plain.metrics) != _values(watch.metrics):
                watch.wrong.append("rollout.temperature changes metrics of a data set")
        return Found(case, "wrong" if watch.wrong else "run", watch.wrong, watch.metrics)

    def _train(self, case: Case, watch: Watch) -> None:
        run, asked = self._resolved(case, watch, self._more(case, watch))
        with contextlib.closing(run.plugins()) as manager:
            check(run, manager, merge_needs(manager))
            self.config = run.config.model_copy(update={"run_dir": str(self.files.folder / f"run-{next(self._numbers)}")})
            runs.train(self.config, manager, rows=asked.rows)

    def _more(self, case: Case, watch: Watch) -> dict[str, Any]:
        """Returns settings that follow from what the plugins need: models of roles, schedules of those that train, a reward."""
        needs = self._needs_of(case, watch)
        there = {need.name for need in needs.roles if need.source is not None} | {"actor"}
        sources = {need.source or need.name for need in needs.roles} - there
        trained = {need.name for need in needs.roles if need.trainable} | {"actor"}
        more: dict[str, Any] = {f"roles.{name}.model": str(self.files.model) for name in sources}
        more |= {f"roles.{name}.{key}": value for name in trained for key, value in _of_roles(case).items()}
        if needs.samples and needs.rewards and "saved" not in DATA[case.data]:
            more["reward"] = DATA[case.data].get("rewards", Parity)
        return more

    def _needs_of(self, case: Case, watch: Watch) -> Needs:
        key = replace(case, data="tasks", schedule=PLAIN, temperature=1.0, model=PLAIN)
        if key not in self._needs:
            run, _ = self._resolved(key, watch, {})
            with contextlib.closing(run.plugins()) as manager:
                self._needs[key] = merge_needs(manager)
        return self._needs[key]

    def roles(self, case: Case) -> tuple[RoleNeed, ...] | None:
        """Returns the roles that the plugins need; ``None`` if they are refused."""
        try:
            return self._needs_of(case, Watch(case)).roles
        except UserError:
            return None

    def _resolved(self, case: Case, watch: Watch, more: Mapping[str, Any]) -> tuple[Any, Arguments]:
        asked = Arguments({}, {**self._settings(case, watch), **more})
        loaded = read_config([asked.settings])
        config = loaded.config.model_copy(update={"tracker": {}})
        return resolve(config, loaded.origins, "train", asked.objects), asked

    def _settings(self, case: Case, watch: Watch) -> dict[str, Any]:
        extensions: dict[str, Any] = {}
        for name, option, alias in ((case.extension, case.extension_option, case.extension), (case.second, None, case.second)):
            if name and alias not in extensions:
                own = {} if option is None else dict([option])
                extensions[alias] = {"name": name, **required("extension", name, self.files.texts), **own}
        algo = {} if case.algo_option is None else dict([case.algo_option])
        data = {key: value for key, value in DATA[case.data].items() if key not in ("rewards", "saved")}
        if case.algo in names("agent") and "agent" not in data and "saved" not in DATA[case.data]:
            data["agent"] = named("agent", case.algo).name
        if (known := DATA[case.data].get("saved")) is not None:
            data["from_trajectories"] = str(self.files.saved(case.temperature, known=known))
        settings = {
            "algo": {"name": case.algo, **required("algo", case.algo, self.files.texts), **algo},
            "with": {**extensions, "watch": watch},
            "roles.actor.model": str(self.files.model),
            "roles.actor.lr": LR,
            "rollout": {"n": 4, "max_new_tokens": 6, "stop_token_ids": STOPS, "temperature": case.temperature},
            "train": {"steps": STEPS, "batch_size": 2, "threads": 1},
            "checkpoint": {"every": 0, "final": False},
            "trajectories": {"every": 0},
            "kernels": "none",
            **data,
        }
        if case.model == "adapter":
            settings["roles.actor.lora.rank"] = 2
        if case.model == "16 bits":
            settings["train"]["autocast"] = "bfloat16"
        for key, value in SCHEDULES[case.schedule].items():
            if key != "role":
                settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
        return settings

    def save_rollouts(self) -> None:
        """Writes the files of saved rollouts, at each temperature."""
        for temperature in TEMPERATURES:
            watch = Writer(Case(SAMPLER, temperature=temperature))
            found = self(watch.case, watch)
            assert found.outcome == "run", found.reasons
            origin = provenance(self.config.model_dump(mode="json"), "train")
            parts = [lines(step, "train", rows, origin, self.files.folder) for step, rows in watch.rows.items()]
            write_lines(self.files.saved(temperature, known=True), parts)
            rows = [json.loads(line) for line in b"".join(parts).splitlines()]
            for row in rows:
                for segment in row["segments"] if row["sample"] % 2 else ():
                    if segment["kind"] == "action":
                        segment["logprobs"] = [math.nan] * len(segment["token_ids"])
            self.files.saved(temperature, known=False).write_text("".join(json.dumps(row) + "\n" for row in rows))


class Writer(Watch):
    """Keeps what a run sampled."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.rows: dict[int, list[Any]] = {}

    @hookimpl
    def log_trajectories(self, step, trajectories):
        self.rows[step] = list(trajectories)


def _of_roles(case: Case) -> Mapping[str, Any]:
    own: Mapping[str, Any] = SCHEDULES[case.schedule].get("role", {})
    return own


def _values(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    return {step: {name: value for name, value in row.items() if not name.startswith(TIMES)} for step, row in metrics.items()}


@contextlib.contextmanager
def _once(watch: Watch) -> Iterator[None]:
    """Leaves out what a start does for its directory and its process alone, and lets ``watch`` see the run."""
    begin, update = runs._run, LocalTrainer.update

    def seen(loop: Any, started: Any, *rest: Any) -> Any:
        watch.starts(loop, started)
        return begin(loop, started, *rest)

    def counted(trainer: Any, batch: Any, **settings: Any) -> Any:
        watch.trains.append(batch.advantages is not None or bool(batch.loss_mask.any()))
        return update(trainer, batch, **settings)

    nothing = contextlib.nullcontext
    with (
        patch.object(runs, "_run", seen),
        patch.object(LocalTrainer, "update", counted),
        patch.object(runs, "write_start", lambda *_: None),
        patch.object(runs, "frozen", nothing),
    ):
        yield


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
