"""Rows of data sets that have answers, as prompts and completions: one reader for each form of row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

from rlhf_host.data.conditions import conditioned
from rlhf_host.data.row_reader import MISSING, Malformed, check_text, get, look_up
from rlhf_host.data.row_values import (
    Text,
    answer_of,
    is_sharegpt,
    kind_of,
    label_of,
    messages_of,
    number_of,
    sharegpt_message,
    sharegpt_of,
    text_of,
    tools_of,
)
from rlhf_host.data.units import Row
from rlhf_host.records.episodes import Message
from rlhf_host.records.numbers import Numbers

ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its completions: one, or the chosen and the rejected one. A ``Message`` list is a conversation."""

    prompt: Text
    """An empty list: the completion is the whole conversation. An empty text: the completion is the whole text."""
    completions: tuple[Text, ...]
    columns: tuple[Mapping[str, float], ...] = ({},)
    """Of each completion."""
    steps: tuple[tuple[str, float], ...] = ()
    """Texts and labels of the completion's steps."""
    tools: Sequence[Any] | None = None
    own_turns: bool = False
    """The texts write their turns themselves, so no chat template is used."""
    tokens: Row | None = None
    """What the row has in tokens; then nothing else matters."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What readers must know beside the row."""

    prompt_key: str | None = None
    label_key: str | None = None
    split_at: str | None = None
    condition: str | None = None
    chat: bool = True
    """Whether conversations go through a chat template."""
    vocabulary: int | None = None
    """Number of token ids."""
    hh_chat: bool = False
    """Transcripts become conversations."""


Read: TypeAlias = Callable[[Mapping[str, Any], Reading], Example]


# --- supervised -------------------------------------------------------------------------------------------------------


def read_messages(row: Mapping[str, Any], reading: Reading) -> Example:
    key = reading.prompt_key or ("messages" if "messages" in row or "conversations" not in row else "conversations")
    return Example([], (messages_of(get(row, key, "conversation"), key),), tools=tools_of(row))


def read_prompt_completion(row: Mapping[str, Any], reading: Reading) -> Example:
    prompt = _prompt(row, reading)
    return Example(prompt, (answer_of(get(row, "completion", "answer"), "completion"),), tools=tools_of(row))


def read_generated(row: Mapping[str, Any], reading: Reading) -> Example:
    example = read_prompt_completion(row, reading)
    reward = number_of(get(row, "reward", "reward"), "reward")
    prompt = example.prompt if reading.condition is None else conditioned(example.prompt, reading.condition, reward)
    return Example(prompt, example.completions, ({"reward": reward},))


def read_text(row: Mapping[str, Any], reading: Reading) -> Example:
    key = reading.prompt_key or "text"
    return Example("", (text_of(get(row, key, "text"), key),))


def read_sharegpt(row: Mapping[str, Any], reading: Reading) -> Example:
    key = reading.prompt_key or "conversations"
    return Example([], (sharegpt_of(row, key),), tools=tools_of(row))


def read_alpaca(row: Mapping[str, Any], reading: Reading) -> Example:
    instruction = text_of(get(row, "instruction", "prompt"), "instruction")
    answer = text_of(get(row, "output", "answer"), "output")
    context, system, history = (row.get(key) or "" for key in ("input", "system", "history"))
    for key, value in (("input", context), ("system", system)):
        if not isinstance(value, str):
            raise Malformed(f"{key!r} must be a text, not {kind_of(value)}")
        check_text(value, key)
    if reading.chat:
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for question, reply in _turns(history):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        words = f"{instruction}\n\n{context}" if context else instruction
        return Example([*messages, {"role": "user", "content": words}], ([{"role": "assistant", "content": answer}],))
    if history:
        raise Malformed("'history' has earlier turns, which need a chat template: use a tokenizer that has one")
    opening = system or (ALPACA_INPUT if context else ALPACA)
    middle = f"\n\n### Input:\n{context}" if context else ""
    return Example(f"{opening}\n\n### Instruction:\n{instruction}{middle}\n\n### Response:\n", (answer,), own_turns=True)


def read_tokens(row: Mapping[str, Any], reading: Reading) -> Example:
    if "input_ids" not in row:
        prompt, completion = (
            _ids(get(row, f"{name}_ids", "tokens"), f"{name}_ids", reading) for name in ("prompt", "completion")
        )
        if not prompt:
            raise Malformed("'prompt_ids' is empty: the first completion token needs a token before it")
        return _of_tokens([*prompt, *completion], [False] * len(prompt) + [True] * len(completion), "completion_ids")
    ids = _ids(row["input_ids"], "input_ids", reading)
    labels = row.get("labels")
    if labels is None:
        return _of_tokens(ids, [True] * len(ids), "input_ids")
    if not isinstance(labels, Sequence) or len(labels) != len(ids):
        raise Malformed("'labels' must be a list as long as 'input_ids'")
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, -100):
            raise Malformed(
                f"'labels' has {label!r} at {place} where 'input_ids' has {token}: a label is the token itself, or -100"
            )
    return _of_tokens(ids, [label != -100 for label in labels], "labels")


# --- pairs and single judgements --------------------------------------------------------------------------------------


def read_preference(row: Mapping[str, Any], reading: Reading) -> Example:
    columns: tuple[Mapping[str, float], ...] = ({"label": 1.0}, {"label": 0.0})
    if (margin := row.get("margin")) is not None:
        columns = tuple({**column, "margin": number_of(margin, "margin")} for column in columns)
    chosen, rejected = (answer_of(get(row, key, "answer"), key) for key in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise Malformed("'chosen' and 'rejected' must both be texts or both be lists of messages")
    if chosen == rejected:
        raise Malformed("'chosen' and 'rejected' are equal")
    prompt: Text
    own_turns = False
    if isinstance(chosen, list) and isinstance(rejected, list):
        if chosen[0]["role"] != "assistant" or "prompt" not in row:
            prompt, chosen, rejected = _common_messages(chosen, rejected)
        else:
            prompt = _prompt(row, reading)
    elif _has_prompt(row, reading):
        prompt = _prompt(row, reading)
    elif reading.split_at:
        (prompt, chosen), (other, rejected) = (
            _cut(text, reading.split_at, key) for text, key in ((chosen, "chosen"), (rejected, "rejected"))
        )
        own_turns = True
        if prompt != other:
            raise Malformed(f"the texts before the last {reading.split_at!r} differ between 'chosen' and 'rejected'")
    else:
        raise Malformed(
            "no 'prompt', and the texts do not say where the answer begins: set data.split_at to the text before it"
        )
    return Example(prompt, (chosen, rejected), columns, tools=tools_of(row), own_turns=own_turns)


def read_hh(row: Mapping[str, Any], reading: Reading) -> Example:
    texts = [text_of(get(row, key, "answer"), key) for key in ("chosen", "rejected")]
    for key, text in zip(("chosen", "rejected"), texts, strict=True):
        if not text.startswith("\n\nHuman:"):
            raise Malformed(f"{key!r} does not begin with '\\n\\nHuman:', as the others do")
    pair = read_preference({**row, "chosen": texts[0], "rejected": texts[1]}, Reading(split_at="\n\nAssistant:"))
    return _as_chat(pair) if reading.hh_chat else pair


def _as_chat(pair: Example) -> Example:
    """A pair of transcripts as a conversation and its two answers."""
    assert isinstance(pair.prompt, str)
    parts = re.split(r"\n\n(Human|Assistant):", pair.prompt.removesuffix("\n\nAssistant:"))[1:]
    turns = [(speaker, text.strip()) for speaker, text in zip(parts[::2], parts[1::2], strict=True)]
    if empty := [number for number, (_, text) in enumerate(turns, start=1) if not text]:
        raise Malformed(f"turn {empty[0]} of the transcript is empty")
    roles = {"Human": "user", "Assistant": "assistant"}
    prompt: list[Message] = [{"role": roles[speaker], "content": text} for speaker, text in turns]
    answers = tuple([{"role": "assistant", "content": str(text).strip()}] for text in pair.completions)
    return replace(pair, prompt=prompt, completions=answers, own_turns=False)


def read_sharegpt_pair(row: Mapping[str, Any], reading: Reading) -> Example:
    key = reading.prompt_key or "conversations"
    prompt = sharegpt_of(row, key)
    answers = {name: [sharegpt_message(get(row, name, "answer"), name)] for name in ("chosen", "rejected")}
    return read_preference({**row, **answers, "prompt": prompt}, Reading())


def read_unpaired(row: Mapping[str, Any], reading: Reading) -> Example:
    example = read_prompt_completion(row, reading)
    key = reading.label_key or "label"
    label = {"label": label_of(get(row, key, "label"), key, soft=False)}
    return Example(example.prompt, example.completions, (label,), tools=example.tools)


def read_kto_tag(row: Mapping[str, Any], reading: Reading) -> Example:
    key = reading.prompt_key or next((name for name in ("messages", "conversations") if name in row), "messages")
    messages = sharegpt_of(row, key) if is_sharegpt(row.get(key)) else messages_of(get(row, key, "conversation"), key)
    if messages[-1]["role"] != "assistant":
        raise Malformed(f"{key!r} must end with the assistant's message that the label is about")
    label = {"label": label_of(get(row, "kto_tag", "label"), "kto_tag", soft=False)}
    if len(messages) < 2:
        raise Malformed(f"{key!r} has no message before the assistant's")
    return Example(messages[:-1], (messages[-1:],), (label,), tools=tools_of(row))


def read_stepwise(row: Mapping[str, Any], reading: Reading) -> Example:
    prompt = _prompt(row, reading)
    steps, labels = get(row, "completions", "steps"), get(row, "labels", "labels")
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
        raise Malformed("'completions' and 'labels' must be lists of one length")
    if not steps:
        raise Malformed("'completions' has no steps")
    texts = [text_of(step, "completions") for step in steps]
    values = [label_of(label, "labels", soft=True) for label in labels]
    return Example(prompt, ("".join(texts),), steps=tuple(zip(texts, values, strict=True)))


# --- parts -----------------------------------------------------------------------------------------------------------


def _has_prompt(row: Mapping[str, Any], reading: Reading) -> bool:
    return look_up(row, reading.prompt_key or "prompt") is not MISSING


def _prompt(row: Mapping[str, Any], reading: Reading) -> Text:
    key = reading.prompt_key or "prompt"
    prompt = get(row, key, "prompt")
    if not isinstance(prompt, list):
        return text_of(prompt, key)
    messages = messages_of(prompt, key)
    if messages[-1]["role"] == "assistant":
        raise Malformed(f"{key!r} ends with an assistant's message; end it with what the model is to answer")
    return messages


def _common_messages(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """The prompt that two conversations share; at least the last answer of each is left."""
    most = min(len(chosen), len(rejected)) - 1
    shared = next((number for number in range(most) if chosen[number] != rejected[number]), most)
    if not shared:
        raise Malformed("'chosen' and 'rejected' have no first message in common, so there is no prompt")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _cut(text: Any, at: str, key: str) -> tuple[str, str]:
    before, mark, answer = text.rpartition(at)
    if not mark:
        raise Malformed(f"{key!r} has no {at!r}, after which the answer begins")
    if not answer.strip():
        raise Malformed(f"the answer of {key!r}, after the last {at!r}, is empty")
    return before + mark, answer


def _ids(value: Any, key: str, reading: Reading) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(token) is int for token in value):
        raise Malformed(f"{key!r} must be a list of token ids")
    for token in value:
        if token < 0 or (reading.vocabulary is not None and token >= reading.vocabulary):
            raise Malformed(f"{key!r} has the token {token}, and the tokenizer has {reading.vocabulary}")
    return list(value)


def _of_tokens(ids: list[int], trained: list[bool], key: str) -> Example:
    """The prompt is all before the first trained token, and at least one token."""
    if not any(trained[1:]):
        raise Malformed(f"{key!r} has no token to train after the first")
    begin = trained.index(True, 1)
    spans, place = [], 0
    for wanted, run in groupby(trained[begin:]):
        end = place + len(list(run))
        spans += [(place, end)] if wanted else []
        place = end
    return Example("", (), tokens=Row(Numbers("i", ids[:begin]), Numbers("i", ids[begin:]), tuple(spans)))


def _turns(history: Any) -> list[tuple[str, str]]:
    if not history:
        return []
    if not isinstance(history, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history):
        raise Malformed("'history' must be a list of [question, answer]")
    return [(text_of(question, "history"), text_of(reply, "history")) for question, reply in history]
