"""Agents of OpenRLHF (``--agent_func_path``): ``AgentInstanceBase``, ``MultiTurnAgentExecutor`` and ``AgentExecutorBase``.

Up to OpenRLHF 0.9.2 an executor gets its engine and a queue for results when it is made, and ``execute`` three arguments.
Texts of these agents hold the template's own tokens, so they are tokenised as they stand; what was sampled is not.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

from rlhf_host import Episode, EpisodeFailed, Needs, NoRoom, Policy, Sampling, Trajectory, UserError, hookimpl


class AgentInstanceBase:
    """Replacement for OpenRLHF's class, if OpenRLHF is not installed."""

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        return states


class AgentExecutorBase:
    """Replacement for OpenRLHF's class: that of versions up to 0.9.2 plays one instance for each episode by itself."""

    def __init__(
        self,
        agent_instance_cls: type | None = None,
        max_steps: int = 0,
        max_length: int = 0,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ):
        self.agent_instance_cls, self.max_steps, self.max_length = agent_instance_cls, max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue

    async def generate(self, prompt_ids: Sequence[int], sampling_params: Any) -> Any:
        async for output in self.llm_engine.generate({"prompt_token_ids": list(prompt_ids)}, sampling_params, ""):
            return output

    async def execute(self, prompt: str, label: Any, sampling_params: Any) -> None:
        if self.agent_instance_cls is None:
            raise EpisodeFailed(f"{type(self).__name__} has no execute of its own, and was made without an instance's class")
        instance = await _made(self.agent_instance_cls)
        text = str((await instance.reset({"observation": prompt, "label": label}))["observation"])
        ids, ranges, reward, score, logs = _ids(self.hf_tokenizer, text), list[tuple[int, int]](), 0.0, None, {}
        for _ in range(self.max_steps):
            sampling_params.max_tokens = self.max_length - len(ids)
            if sampling_params.max_tokens <= 0:
                break
            output = (await self.generate(ids, sampling_params)).outputs[0]
            ranges.append((len(ids), len(ids) + len(output.token_ids)))
            states = {"observation_text": text, "action_text": output.text, "label": label, "sampling_params": sampling_params}
            told = await instance.step(states)
            reward += _number(told["rewards"])
            score, logs = told.get("scores", reward), told.get("extra_logs") or {}
            feedback = str(told.get("environment_feedback") or "")
            text, ids = text + output.text + feedback, [*ids, *output.token_ids, *_ids(self.hf_tokenizer, feedback)]
            sampling_params = told.get("sampling_params") or sampling_params
            if told["done"]:
                break
        result = {"prompt": prompt, "label": label, "observation_tokens": ids, "action_ranges": ranges}
        await self.result_queue.put({**result, "reward": reward, "scores": score, "extra_logs": logs})


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Replacement for OpenRLHF's class: plays one instance for each episode."""

    def __init__(self, agent_instance_cls: type):
        super().__init__(agent_instance_cls)


@contextmanager
def importable() -> Iterator[None]:
    """Makes ``openrlhf.utils.agent`` importable inside the block, with these classes, if OpenRLHF is not installed."""
    try:
        importlib.import_module("openrlhf.utils.agent")
    except ImportError:  # not there, or not all that it imports
        for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
            del sys.modules[name]
    else:
        yield
        return
    modules = {name: ModuleType(name) for name in ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")}
    for known in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor):
        setattr(modules["openrlhf.utils.agent"], known.__name__, known)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


MADE_WITH = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
"""Arguments with which OpenRLHF up to 0.9.2 makes an executor."""
MAX_STEPS = 10_000
"""Most answers of an episode there."""


async def _made(instance: type) -> Any:
    """Returns an instance of the class, whose ``__init__`` may be async, as in OpenRLHF's own pages."""
    if not inspect.iscoroutinefunction(instance.__init__):  # type: ignore[misc]
        return instance()
    made = instance.__new__(instance)
    await made.__init__()  # type: ignore[misc]
    return made


def _is_older(chosen: type) -> bool:
    """Returns True for an executor of OpenRLHF up to 0.9.2, whose ``execute`` gets no engine."""
    execute = inspect.signature(getattr(chosen, "execute", lambda llm_engine: None)).parameters
    free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in execute.values())
    return not free and "llm_engine" not in execute and not issubclass(chosen, MultiTurnAgentExecutor)


def player_of(chosen: Any) -> InstancePlayer | ExecutorPlayer | OlderPlayer | None:
    """Returns the player of an agent of OpenRLHF; None for anything else."""
    if not isinstance(chosen, type):
        return None
    bases = {base.__name__ for base in chosen.__mro__[1:]}
    if "AgentInstanceBase" in bases:
        return InstancePlayer(chosen)
    if "AgentExecutorBase" not in bases:
        return None
    if _is_older(chosen):
        return OlderPlayer(chosen)
    if inspect.iscoroutinefunction(chosen.__init__):
        raise UserError(f"{chosen.__name__} has an async __init__: only classes of AgentInstanceBase may")
    try:
        executor = chosen()
    except Exception as error:
        raise UserError(f"{chosen.__name__} cannot be made without arguments: {type(error).__name__}: {error}") from error
    theirs = ("openrlhf.utils.agent", __name__)
    own = any("execute" in vars(base) for base in chosen.__mro__ if not base.__module__.endswith(theirs))
    if not own and (instance := getattr(executor, "agent_instance_cls", None)) is not None:
        return InstancePlayer(instance)
    if not own:
        raise UserError(f"{chosen.__name__} has no execute of its own, and no agent_instance_cls")
    return ExecutorPlayer(executor)


@dataclass(slots=True)
class Params:
    """Sampling parameters as these agents know them, those of vLLM. They may lower ``max_tokens`` and add stops."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = 1

    @classmethod
    def of(cls, sampling: Sampling) -> Params:
        of = sampling
        return cls(of.max_new_tokens, of.temperature, of.top_p, of.top_k, of.min_p, list(of.stop))

    def sampling(self, run: Sampling) -> Sampling:
        shown = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return replace(run, max_new_tokens=max(1, int(self.max_tokens)), stop=tuple(self.stop or ()), **shown)


class _Player:
    def needs(self) -> Needs:
        return Needs(rewards=False)


class InstancePlayer(_Player):
    """``reset``, then ``step`` for each answer."""

    def __init__(self, instance: type):
        self.instance = instance

    @hookimpl
    def needs(self) -> Needs:
        return super().needs()

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        tokenizer, instance, label = policy.tokenizer, await _made(self.instance), episode.task.ground_truth
        ids = _prompt_ids(episode)
        prompt = _text(tokenizer, ids)
        first = await instance.reset({"observation": prompt, "label": label})
        text = str(first["observation"])
        ids = ids if text == prompt else _ids(tokenizer, text)
        params, rewards, metrics = Params.of(policy.sampling), list[float](), dict[str, float]()
        score, cut = None, False
        while True:
            try:
                answer = await policy.generate(ids, _within(params, policy))
            except NoRoom:
                if not rewards:
                    raise
                cut = True
                break
            action = _text(tokenizer, answer.token_ids)
            told = await instance.step(
                {"observation_text": text, "action_text": action, "label": label, "sampling_params": params}
            )
            rewards.append(_number(told["rewards"]))
            score = told.get("scores", score)
            metrics |= {str(name): _number(value) for name, value in (told.get("extra_logs") or {}).items()}
            feedback = str(told.get("environment_feedback") or "")
            text, ids = text + action + feedback, [*ids, *answer.token_ids, *_ids(tokenizer, feedback)]
            params = told.get("sampling_params") or params
            if told["done"]:
                break
        [row] = policy.trajectories()
        row.agent_rewards, row.metrics, row.score = list(rewards), metrics, _share(score)
        if cut:
            row.finish_reason = "length"
        return [row]


class ExecutorPlayer(_Player):
    """``execute`` plays the episode itself, with an engine that is the policy."""

    def __init__(self, executor: Any):
        self.executor = executor

    @hookimpl
    def needs(self) -> Needs:
        return super().needs()

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        prompt = _text(policy.tokenizer, _prompt_ids(episode))
        params, task = Params.of(policy.sampling), episode.task
        given = {
            "prompt": prompt,
            "label": task.ground_truth,
            "sampling_params": params,
            "max_length": policy.max_tokens,
            "hf_tokenizer": policy.tokenizer,
            "llm_engine": _Engine(policy),
        }
        told = await self.executor.execute(**given)
        return _rows(policy, told)


class OlderPlayer(_Player):
    """The same with an executor that is made for each episode, and puts its result into a queue."""

    def __init__(self, executor: type):
        self.executor = executor
        known = inspect.signature(executor).parameters.values()
        free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known)
        own = [
            each.name for each in known if each.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        ]
        needed = [each.name for each in known if each.name in own and each.default is inspect.Parameter.empty]
        if others := [name for name in needed if name not in MADE_WITH]:
            raise UserError(
                f"{executor.__name__} needs {', '.join(others)} when it is made; OpenRLHF gives {', '.join(MADE_WITH)}"
            )
        if missing := [name for name in MADE_WITH if name not in own and not free]:
            raise UserError(
                f"{executor.__name__} does not take {', '.join(missing)}, and its execute takes no llm_engine either"
            )

    @hookimpl
    def needs(self) -> Needs:
        return super().needs()

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        results = asyncio.Queue[Mapping[str, Any]]()
        values = (MAX_STEPS, policy.max_tokens, _Stream(policy), policy.tokenizer, results)
        executor = self.executor(**dict(zip(MADE_WITH, values, strict=True)))
        prompt = _text(policy.tokenizer, _prompt_ids(episode))
        await executor.execute(prompt, episode.task.ground_truth, Params.of(policy.sampling))
        if results.qsize() != 1:
            raise EpisodeFailed(f"execute put {results.qsize()} results into result_queue: one is needed for each episode")
        return _rows(policy, results.get_nowait())


def _rows(policy: Policy, told: Mapping[str, Any]) -> list[Trajectory]:
    """Returns the policy's trajectories with what ``execute`` tells of them."""
    rows = policy.trajectories()
    if not rows:
        raise EpisodeFailed("the agent never asked the policy")
    final = next(row for row in rows if row.final)
    mine = [token for part in final.segments for token in part.token_ids]
    if list(told["observation_tokens"])[: len(mine)] != mine:
        raise EpisodeFailed("the agent's observation_tokens are not what the policy saw and sampled last")
    if told.get("reward") is not None:
        final.agent_rewards = [None] * (len(final.actions) - 1) + [_number(told["reward"])]
    final.score = _share(told.get("scores"))
    final.metrics = {str(name): _number(value) for name, value in (told.get("extra_logs") or {}).items()}
    return rows


class _Engine:
    """Engine that ``execute`` gets as ``llm_engine``."""

    def __init__(self, policy: Policy):
        self._policy = policy

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any, **more: Any) -> Any:
        if any(more.values()):
            raise UserError(f"the policy reads text: {', '.join(more)} cannot be given to it")
        answer = await self._policy.generate(list(prompt_token_ids), _within(sampling_params, self._policy))
        logprobs = [
            {token: SimpleNamespace(logprob=value)} for token, value in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        text = _text(self._policy.tokenizer, answer.token_ids)
        ids = list(answer.token_ids)
        output = SimpleNamespace(token_ids=ids, text=text, logprobs=logprobs, finish_reason=answer.finish_reason)
        return SimpleNamespace(outputs=[output])


class _Stream:
    """Engine that executors of OpenRLHF up to 0.9.2 are made with: it yields outputs."""

    def __init__(self, policy: Policy):
        self._engine = _Engine(policy)

    async def generate(self, prompts: Mapping[str, Any], sampling_params: Any, request_id: str = "") -> AsyncIterator[Any]:
        if "prompt_token_ids" not in prompts or any(value for key, value in prompts.items() if key != "prompt_token_ids"):
            raise UserError(f"the policy takes prompt_token_ids alone, not {', '.join(prompts)}")
        yield await self._engine.generate(prompts["prompt_token_ids"], sampling_params)


def _within(params: Any, policy: Policy) -> Sampling:
    known = params if isinstance(params, Params) else Params.of(policy.sampling)
    if known is not params:  # an object of its own making
        known.max_tokens = getattr(params, "max_tokens", None) or known.max_tokens
        known.temperature = getattr(params, "temperature", known.temperature)
        known.stop = list(getattr(params, "stop", None) or ())
    return known.sampling(policy.sampling)


def _prompt_ids(episode: Episode) -> list[int]:
    ids = episode.task.prompt_ids
    if ids is None:
        raise EpisodeFailed("the task has no tokens")
    return list(ids)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _number(value: Any) -> float:
    values = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(values, list) and len(values) == 1:
        values = values[0]
    return float(values)


def _share(score: Any) -> float | None:
    """Returns the score as a share; OpenRLHF's scores may be any number."""
    number = None if score is None else _number(score)
    return number if number is not None and 0.0 <= number <= 1.0 else None
