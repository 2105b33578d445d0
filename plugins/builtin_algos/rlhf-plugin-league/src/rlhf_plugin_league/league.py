"""The extension ``league``."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import shutil
from collections.abc import Coroutine, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlhf_host import Episode, Group, Metric, Needs, RoleNeed, RunContext, RunError, UserError, hookimpl
from rlhf_plugin_league.pool import Draw, Pool, Record, drawn

log = logging.getLogger(__name__)

FOLDER = "league"
"""Folder of the saved steps, in the run's directory."""


class League:
    """The opponent of a group of episodes is drawn from a pool: its own model, and earlier steps of this run. Works with any agent
    that asks for ``policy.role("opponent")`` and scores its games."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

        role: str = Field("opponent", pattern=r"^[a-z][a-z0-9_]*$", description="the frozen role that the agent asks for")
        draw: Draw = Field(
            "pfsp", description="pfsp: who beats the policy comes more often; uniform; latest: the newest saved step alone"
        )
        power: float = Field(2.0, ge=0, description="p of pfsp's f_hard(x) = (1 - x)^p, where x is the policy's win rate")
        every: int = Field(10, ge=1, description="steps between two that are saved as opponents")
        size: int = Field(8, ge=1, description="saved steps in the pool; the oldest leaves")
        at_once: int = Field(2, ge=1, description="opponents that are drawn for a step; so many models are in memory")
        decay: float = Field(0.99, gt=0, le=1, description="weight of earlier games in a win rate after each new one")
        rivals: list[str] = Field([], description="models of other runs that are in the pool all the time, with commas between")

        @field_validator("rivals", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return [each for each in value.split(",") if each] if isinstance(value, str) else value

        @model_validator(mode="after")
        def _has_use_for_all(self) -> League.Options:
            if self.at_once > self.size:
                raise ValueError(f"at_once {self.at_once} is more than the pool saves (size {self.size}): lower it")
            if twice := next((model for model in self.rivals if self.rivals.count(model) > 1), None):
                raise ValueError(f"rivals has {twice} twice: name each model once")
            return self

    def __init__(self, options: Options):
        self.options = options
        rivals = [f"rival_{number}" for number in range(1, len(options.rivals) + 1)]
        self.places = [f"{options.role}_{number}" for number in range(1, options.at_once + 1)]
        """Roles whose weights become those of saved steps."""
        self.pool = Pool([options.role, *rivals], options.size, options.decay)
        self.seats: list[str] = []
        """The members that play in the present step. One may have several seats."""
        self.left: dict[str, int] = {}
        """Members whose files are still there → the step at which they left."""
        self.step: dict[str, Record] = {}
        """Games of the present step, by member."""
        self.unscored = 0
        """Rows of the present step without a score."""
        self.asked = False
        """True if an episode has asked for an opponent."""
        self._loaded: dict[str, str] = {}
        """Place → the member whose weights it has."""
        self._playing: dict[str, str] = {}
        """Group → its opponent."""
        self._context: RunContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @hookimpl
    def needs(self) -> Needs:
        own, rivals = [self.options.role, *self.places], zip(self.pool.fixed[1:], self.options.rivals, strict=True)
        return Needs(
            data="prompts",
            roles=(
                *(RoleNeed(name, generates=True) for name in own),
                *(RoleNeed(name, source=model, generates=True) for name, model in rivals),
            ),
        )

    @hookimpl
    def check_run(self, config: Mapping[str, Any]) -> None:
        roles = config["roles"]
        for name in ("actor", *self.places):
            if (roles.get(name) or {}).get("quantize"):
                raise UserError(f"league: saved steps are whole weights, which 4 bits cannot take: leave {name}.quantize out")
        if config["sync"]["adapter"] == "adapter":
            raise UserError("league: with sync.adapter adapter the trainer gives no whole weights to save: leave it out")
        for name in self.places:
            if own := sorted({"model", "adapter"} & {key for key, value in (roles.get(name) or {}).items() if value}):
                raise UserError(
                    f"league: {name} gets the weights of saved steps: leave {name}.{own[0]} out; another opponent is"
                    f" {self.options.role}.{own[0]}, or one of league.rivals"
                )

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Loads the opponents of the next step. Raises ``UserError`` where their weights cannot be changed, or are gone."""
        if context.processes is None or context.run_dir is None:
            log.warning("league: nothing is trained here, so the opponent is the model of the role %s", self.options.role)
            return
        ends = context.processes()
        if lacking := next((name for name in self.places if f"role {name}" not in ends), None):
            raise UserError(f"league: this runtime cannot change the weights of the role {lacking}: use --runtime local")
        self._context, self._loop = context, asyncio.get_running_loop()
        self._folder = (context.run_dir / FOLDER).absolute()
        for name in self.pool.saved:
            if not (self._folder / name).is_dir():
                raise UserError(f"league: {self._folder / name} is gone, an opponent of this run: begin a new run")
        for path in self._folder.glob("*"):
            if re.match(r"\.?step-\d", path.name) and path.name not in {*self.pool.records, *self.left}:
                shutil.rmtree(path, ignore_errors=True)  # of steps that this run has not reached yet
        if len(self.seats) != self.options.at_once or any(name not in self.pool.records for name in self.seats):
            self._draw(max(context.resume_step, 0) + 1)  # the first draw, or other settings than before
        try:
            await self._load()
        except RunError as error:
            raise UserError(f"league: {error}: put the files back, or begin a new run") from error

    @hookimpl
    def choose_role(self, episode: Episode, role: str) -> str | None:
        """Held-out games are played against the role's own model, which stays as it is."""
        if role != self.options.role or episode.split != "train" or not self.seats:
            return None
        self.asked = True
        seat = random.Random(f"league {episode.seed}").randrange(len(self.seats))
        member = self._playing[episode.group_id] = self.seats[seat]
        return next((place for place, loaded in self._loaded.items() if loaded == member), member)

    @hookimpl
    def keep_group(self, group: Group) -> bool:
        """Notes the results of a group: scores of final rows, in [0, 1]."""
        member = self._playing.pop(group.group_id, None)
        for row in group.trajectories:
            if member is None or not row.final:
                continue
            if row.score is None:
                self.unscored += 1
            else:
                self.pool.note(member, row.score)
                self.step.setdefault(member, Record()).add(row.score)
        return True

    @hookimpl
    def step_metrics(self, step: int) -> list[Metric]:
        games, won = (sum(getattr(record, name) for record in self.step.values()) for name in ("games", "won"))
        values = {"games": games, "unscored": float(self.unscored), "pool": float(len(self.pool.records))}
        if games:
            values["win_rate"] = won / games
        known = {name: record for name, record in self.pool.records.items() if record.games}
        values |= {f"win_rate/{name}": record.win_rate for name, record in known.items()}
        return [Metric(name, value) for name, value in values.items()]

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Saves the step if it is due, and draws and loads the opponents of the next one."""
        if self._context is None:
            return
        self._tell_of_agents()
        self._playing.clear()
        self.step, self.unscored = {}, 0
        self._wait(self._turn(step))

    def _tell_of_agents(self) -> None:
        """Raises ``UserError`` if the only agent asks for no opponent."""
        assert self._context is not None
        if not self.asked:
            nobody = f"no episode has asked for policy.role({self.options.role!r})"
            if not self._context.config["agents"]:
                raise UserError(f"league: {nobody}: choose an agent that does, or leave league out")
            log.warning("league: %s so far", nobody)
        elif self.unscored and not any(record.games for record in self.pool.records.values()):
            log.warning("league: no game has a score so far (1 won, 0.5 drawn, 0 lost), so all opponents seem equal")

    async def _turn(self, step: int) -> None:
        assert self._context is not None
        assert self._context.processes is not None
        if step % self.options.every == 0:
            name = f"step-{step:06d}"
            await self._context.processes()["trainer"].run(f"{__package__}.weights:save", directory=str(self._folder / name))
            self.left |= dict.fromkeys(self.pool.add(name), step)
        self._remove(step)
        self._draw(step + 1)
        await self._load()

    def _draw(self, step: int) -> None:
        assert self._context is not None
        start = random.Random(f"league {self._context.seed} {step}").random()
        self.seats = drawn(self.pool.weights(self.options.draw, self.options.power), self.options.at_once, start)

    async def _load(self) -> None:
        """Loads what the seats need and no place has."""
        assert self._context is not None
        assert self._context.processes is not None
        wanted = {name for name in self.seats if name not in self.pool.fixed}
        free = [place for place in self.places if self._loaded.get(place) not in wanted]
        ends = self._context.processes()
        for place, name in zip(free, sorted(wanted - {*self._loaded.values()}), strict=False):
            self._loaded.pop(place, None)
            directory, version = str(self._folder / name), int(name.removeprefix("step-"))
            await ends[f"role {place}"].run(f"{__package__}.weights:load", directory=directory, version=version)
            self._loaded[place] = name

    def _remove(self, now: int) -> None:
        """Removes the files of members that left before this step, where no checkpoint has them in its pool."""
        folder = self._folder.with_name("checkpoints")
        numbers = [int(found[1]) for path in folder.glob("*") if (found := re.match(r"\.?step-(\d+)", path.name))]
        for name, at in list(self.left.items()):
            first = int(name.removeprefix("step-"))
            if at < now and not any(first <= number <= at for number in numbers):
                shutil.rmtree(self._folder / name, ignore_errors=True)
                del self.left[name]

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for work on the run's event loop, which does not run between two steps with ``--debug``."""
        assert self._loop is not None
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        else:
            self._loop.run_until_complete(work)

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        games = {name: [record.games, record.won] for name, record in self.step.items()}
        state = {"pool": self.pool.state_dict(), "seats": list(self.seats), "left": dict(self.left), "step": games}
        return state | {
            "asked": self.asked,
            "unscored": self.unscored,
            "role": self.options.role,
            "rivals": self.options.rivals,
        }

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state back. Rivals are known by their models: those that are not named any more lose their records."""
        models = ["", *self.options.rivals]
        own = dict(zip(models, self.pool.fixed, strict=True))
        names = {state.get("role", own[""]): own[""]}
        for number, model in enumerate(state.get("rivals", self.options.rivals), 1):
            if model in own:
                names[f"rival_{number}"] = own[model]
            else:
                log.warning("league: the rival %s is not named any more, and its games are forgotten", model)
        names |= {name: name for name in state["pool"] if name.startswith("step-")}
        self.pool.load_state_dict({names[name]: values for name, values in state["pool"].items() if name in names})
        self.seats, self.left = [names.get(name, "") for name in state["seats"]], dict(state["left"])
        self.step = {names[name]: Record(*values) for name, values in state["step"].items() if name in names}
        self.asked, self.unscored = state["asked"], state["unscored"]
