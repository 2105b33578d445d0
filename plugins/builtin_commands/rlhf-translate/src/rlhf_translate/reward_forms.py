"""Reward functions written for other projects' trainers, called as those call them: the entry point of ``rlhf.reward_forms``.

TRL (``GRPOTrainer``, ``reward_funcs``), verl (``custom_reward_function``: ``compute_score``) and OpenRLHF (``reward_func``).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from rlhf_host import PluginError, Reward, ScoreContext, Task, Trajectory, Unjudged
from rlhf_host.commands import asks_to_stop
from rlhf_host.protocols import RewardForm

Rewards: TypeAlias = list[Reward | Unjudged | BaseException]
"""An exception: the function raised it for that row."""

LABELS = ("label", "answer", "ground_truth", "solution", "target", "output", "labels")
"""A column of one of these names, where the data do not have it beside the label, is the label."""

OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of its functions beside columns."""


def form_of(function: Callable[..., Any]) -> RewardForm | None:
    """``(prompts, completions, **columns)`` of TRL, ``(data_source, solution_str, ground_truth, extra_info)`` of verl, ``(queries,
    prompts, labels)`` of OpenRLHF.
    """
    names = set(inspect.signature(function).parameters)
    if names & {"completions", "completion_ids"}:
        return TRL(function)
    if "solution_str" in names:
        return Verl(function)
    return OpenRLHF(function) if "queries" in names else None


class _Form:
    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def lack(self, task: Task) -> str | None:
        return None


class TRL(_Form):
    """One call for the group; if it raises, rows are tried one by one, and those for which it does not raise are called together
    again. ``None`` in the answer means that the function does not apply to the row: it adds nothing.
    """

    def lack(self, task: Task) -> str | None:
        parameters = inspect.signature(self.function).parameters.values()
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        wanted = {one.name for one in parameters if one.default is one.empty and one.kind not in variable}
        missing = sorted(wanted - {*OF_TRL, *task.metadata})
        for name in missing:
            if name not in LABELS or task.ground_truth is None:
                return f"the function takes {name!r}, and the row has no such column" + " or label" * (name in LABELS)
        return None

    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> Any:
        return _driven(_without_culprits(trajectories), lambda rows: self._group(rows, context))

    def _group(self, rows: Sequence[Trajectory], context: ScoreContext) -> Any:
        metrics = dict[str, float]()
        columns = {name: [row.task.metadata.get(name) for row in rows] for row in rows for name in row.task.metadata}
        given = columns | {
            "prompts": [row.task.prompt for row in rows],
            "completions": [_completion(row) for row in rows],
            "completion_ids": [[token for part in row.completion for token in part.token_ids] for row in rows],
            "trainer_state": SimpleNamespace(global_step=context.step),
            "log_extra": lambda name, values: None,
            "log_metric": lambda name, value: metrics.update({str(name): float(value)}),
        }
        labels = [row.task.ground_truth for row in rows]
        return _called(self.function, given, labels, partial(_applied, metrics, len(rows)))


class Verl(_Form):
    """One call for each row. Of a dict, ``score`` is the reward, ``acc`` the score, and other numbers are metrics."""

    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> Any:
        judged = []
        for row in trajectories:
            told = dict(row.task.metadata)
            truth = row.task.ground_truth
            if truth is None and isinstance(told.get("reward_model"), Mapping):
                truth = told["reward_model"].get("ground_truth")
            turns = {"num_turns": len(row.actions), "rollout_reward_scores": {}}
            given = {
                "data_source": told.get("data_source", row.task.source),
                "solution_str": row.full_text,
                "ground_truth": truth,
                "extra_info": turns | dict(told.get("extra_info") or {}),
            }
            judged.append(_attempt(partial(_called, self.function, given, [], lambda answer: [_of_dict(answer)], whole=truth)))
        return _together(judged)


class OpenRLHF(_Form):
    """One call for each row, with lists of one. Queries are prompt and completion with special tokens."""

    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> Any:
        judged = []
        for row in trajectories:
            text = partial(_with_special_tokens, context.tokenizer, row)
            labels = [row.task.ground_truth]
            query = text([token for part in row.segments for token in part.token_ids])
            given = {"queries": [query], "prompts": [text(row.prompt_ids)], "labels": labels}
            judged.append(_attempt(partial(_called, self.function, given, labels, _of_one)))
        return _together(judged)


def _with_special_tokens(tokenizer: Any, row: Trajectory, ids: Sequence[int]) -> str:
    if tokenizer is None:
        return _text(row, ids)  # in a replay without a model, which may have to say that it needs one
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _text(row: Trajectory, ids: Sequence[int]) -> str:
    if row.decode is None:
        raise ValueError(f"trajectory {row.episode_id} has no decoder: text is available inside a run")
    return row.decode(ids)


def _called(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    labels: Sequence[Any],
    judge: Callable[[Any], Rewards],
    *,
    whole: Any = None,
) -> Any:
    """Call it with what its parameters ask for, and judge what it gives, now or when that is there."""
    arguments: dict[str, Any] = {}
    places: list[Any] = []
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        arguments = {name: value for name, value in given.items() if name not in ("log_extra", "log_metric", "trainer_state")}
    for one in parameters:
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            continue
        if one.name in given:
            value = given[one.name]
        elif one.name in LABELS and (labels or whole is not None):
            value = labels or whole
        elif one.default is not one.empty:
            continue
        else:
            known = ", ".join(name for name in given if name not in ("log_extra", "log_metric", "trainer_state"))
            raise PluginError(f"the reward function takes {one.name!r}, and the data have no such column; there are {known}")
        if one.kind is one.POSITIONAL_ONLY:
            places.append(value)
        else:
            arguments[one.name] = value
    answer = function(*places, **arguments)
    return _later(answer, judge) if inspect.isawaitable(answer) else judge(answer)


async def _later(answer: Any, judge: Callable[[Any], Rewards]) -> Rewards:
    return judge(await answer)


def _attempt(work: Callable[[], Any]) -> Any:
    """Returns what it gives, or the exception that it raises, as that of its row."""
    try:
        return work()
    except BaseException as error:
        return [error]


def _together(judged: Sequence[Any]) -> Any:
    if any(map(inspect.isawaitable, judged)):
        return _gathered(judged)
    return [reward for rewards in judged for reward in rewards]


async def _gathered(judged: Sequence[Any]) -> Rewards:
    answers = await asyncio.gather(*map(_settled, judged))
    return [reward for answer in answers for reward in ([answer] if isinstance(answer, BaseException) else answer)]


async def _settled(one: Any) -> Any:
    """``sys.exit`` in a function is an error like others: of a task it would end the event loop."""
    try:
        return (await one) if inspect.isawaitable(one) else one
    except BaseException as error:
        return error


Steps: TypeAlias = Generator[Sequence[Trajectory], Any, Rewards]
"""Asks for the rewards of rows, is sent them or the exception that was raised, and returns those of all."""


def _without_culprits(rows: Sequence[Trajectory]) -> Steps:
    answer = yield rows
    if not isinstance(answer, BaseException):
        return answer
    if asks_to_stop(answer) or len(rows) == 1 or type(answer).__name__ == "BdbQuit":
        raise answer
    alone = []
    for row in rows:
        alone.append((yield [row]))
    rest = [row for row, one in zip(rows, alone, strict=True) if not isinstance(one, BaseException)]
    again: Any = []
    if rest:
        again = (yield rest) if len(rest) < len(rows) else answer
    if isinstance(again, BaseException):
        raise again
    found = iter(again)
    return [one if isinstance(one, BaseException) else next(found) for one in alone]


def _driven(steps: Steps, judge: Callable[[Sequence[Trajectory]], Any]) -> Any:
    """Takes the steps; once a call must be awaited, the rest is done when that is."""
    try:
        asked = next(steps)
        while True:
            answer: Any
            try:
                answer = judge(asked)
            except BaseException as error:
                answer = error
            if inspect.isawaitable(answer):
                return _driven_later(steps, judge, answer)
            asked = steps.send(answer)
    except StopIteration as end:
        return end.value


async def _driven_later(steps: Steps, judge: Callable[[Sequence[Trajectory]], Any], waiting: Any) -> Rewards:
    try:
        while True:
            answer: Any = (await asyncio.gather(_settled(waiting)))[0]
            asked = steps.send(answer)
            try:
                waiting = judge(asked)
            except BaseException as error:
                waiting = error
    except StopIteration as end:
        return cast(Rewards, end.value)


def _completion(row: Trajectory) -> Any:
    """As TRL has it: messages where the prompt is some, else a text."""
    if isinstance(row.task.prompt, str):
        return row.full_text
    roles = {"action": "assistant", "observation": "tool"}
    return [{"role": roles[part.kind], "content": _text(row, part.token_ids)} for part in row.completion]


def _applied(metrics: Mapping[str, float], count: int, answer: Any) -> Rewards:
    values = _numbers(answer, count)
    kept = dict(metrics)
    return [value if isinstance(value, Exception) else Reward(value or 0.0, metrics=kept) for value in values]


def _of_one(answer: Any) -> Rewards:
    """Reads ``{"rewards", "scores", "extra_logs"}``, or the reward alone; each a number, a list or a tensor of one."""
    told: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {"rewards": answer}
    if "rewards" not in told:
        raise ValueError(f"the function gave no 'rewards'; it gave {', '.join(map(str, told)) or 'nothing'}")
    logs = {str(name): _one(value) for name, value in (told.get("extra_logs") or {}).items()}
    value, score = _one(told["rewards"]), _one(told.get("scores"))
    if value is None:
        return [Unjudged("the function gave None")]
    inside = score if score is not None and 0.0 <= score <= 1.0 else None  # theirs may be any number
    return [Reward(value, score=inside, metrics={name: number for name, number in logs.items() if number is not None})]


def _one(value: Any) -> float | None:
    number = None if value is None else _numbers(value, 1)[0]
    if isinstance(number, Exception):
        raise number
    return number


def _of_dict(answer: Any) -> Reward | Unjudged:
    if answer is None:
        return Unjudged("the function gave None")
    if not isinstance(answer, Mapping):
        return Reward(_number(answer), score=float(answer) if isinstance(answer, bool) else None)
    if answer.get("score") is None:
        raise ValueError(f"the function gave no 'score'; it gave {', '.join(map(str, answer)) or 'nothing'}")
    accuracy = None if answer.get("acc") is None else float(answer["acc"])
    plain = {str(name): value for name, value in answer.items() if name != "score" and isinstance(value, int | float)}
    feedback = answer["feedback"] if isinstance(answer.get("feedback"), str) else None
    metrics = {name: float(value) for name, value in plain.items()}
    return Reward(_number(answer["score"]), score=accuracy, metrics=metrics, feedback=feedback)


def _numbers(answer: Any, count: int) -> list[float | Exception | None]:
    """A number, ``None`` or what is wrong with it for each row, of a list or tensor; one number alone is every row's where there is
    one row.
    """
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(values, int | float) and count == 1:
        values = [values]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"the function gave a {type(answer).__name__}, expected a list of {count} numbers")
    values = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    if len(values) != count:
        raise ValueError(f"the function gave {len(values)} values for {count} rows")
    return [None if value is None else _number_or_problem(value) for value in values]


def _number_or_problem(value: Any) -> float | Exception:
    try:
        return _number(value)
    except Exception as error:
        return error


def _number(value: Any) -> float:
    number = float(value.item() if hasattr(value, "item") else value)
    if not math.isfinite(number):
        raise ValueError(f"the function gave {number}, which is no reward")
    return number
