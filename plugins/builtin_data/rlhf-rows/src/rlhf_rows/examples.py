"""Rows of data sets that have answers, as prompts and completions: one reader for each form of row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rlhf_host import Message
from rlhf_host.internals import (
    THOUGHTS,
    Malformed,
    Origin,
    RowContext,
    as_list,
    check_text,
    get,
    kind_of,
    listed,
    messages_of,
    sharegpt_message,
    system_of,
    text_of,
    turns_of,
)
from rlhf_host.rendering import is_transcript, reasoning_of
from rlhf_host.rendering import text_of as words_of
from rlhf_rows.conditions import conditioned
from rlhf_rows.token_rows import read_token_rows
from rlhf_rows.units import Row
from rlhf_rows.values import Text, answer_of, label_of, number_of

ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_SWITCHES = ("on", "off", "true", "false", "yes", "no", "none", "low", "medium", "high")
"""Values of a column that tells if, or how much, the model reasoned."""

NOTHING, IN_ROWS = RowContext(), Origin(kept=True)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its completions: one, or the chosen and the rejected one, and perhaps a gold one. A ``Message`` list is a
    conversation.
    """

    prompt: Text
    """Prompt. An empty list: the completion is the whole conversation. An empty text: the completion is the whole text."""
    completions: tuple[Text, ...]
    columns: tuple[Mapping[str, float], ...] = ({},)
    """Columns of each completion."""
    steps: tuple[tuple[str, float], ...] = ()
    """Texts and labels of the completion's steps."""
    own_turns: bool = False
    """True if the texts contain their turns already, so no chat template is used."""
    tokens: tuple[Row, ...] = ()
    """Tokens in the row; if present, nothing else matters."""
    beside: RowContext = NOTHING


@dataclass(frozen=True, slots=True)
class Reading:
    """Facts that readers need beside the row."""

    prompt_key: str | None = None
    label_key: str | None = None
    split_at: str | None = None
    condition: str | None = None
    chat: bool = True
    """True if conversations go through a chat template."""
    vocabulary: int | None = None
    """Number of token ids."""
    hh_chat: bool = False
    """True if transcripts become conversations."""
    ignore: Sequence[str] = ()
    """Columns and keys of messages that are not read."""
    origin: Origin = IN_ROWS
    """Origin of the row's pictures."""


Read: TypeAlias = Callable[[Mapping[str, Any], Reading], Example]


# --- supervised -------------------------------------------------------------------------------------------------------


def read_messages(row: Mapping[str, Any], reading: Reading) -> Example:
    messages = _conversation(row, reading, "messages", "conversations")
    _refuse_thoughts(row, messages)
    return Example([], (messages,))


def read_prompt_completion(row: Mapping[str, Any], reading: Reading) -> Example:
    answer = answer_of(get(row, "completion", "answer"), "completion", reading.ignore)
    _refuse_thoughts(row)
    prompt, (answer,) = _joined(_prompt(row, reading), (answer,), "completion")
    return Example(prompt, (answer,))


def read_generated(row: Mapping[str, Any], reading: Reading) -> Example:
    example = read_prompt_completion(row, reading)
    reward = number_of(get(row, "reward", "reward"), "reward")
    prompt = example.prompt if reading.condition is None else conditioned(example.prompt, reading.condition, reward)
    return Example(prompt, example.completions, ({"reward": reward},))


def read_text(row: Mapping[str, Any], reading: Reading) -> Example:
    key = reading.prompt_key or "text"
    if (role := next((name for name in ("role", "from", "speaker") if isinstance(row.get(name), str)), None)) is not None:
        raise Malformed(
            f"{role!r} names a speaker, but the row has a text and no messages: make conversations of the rows, or leave it unread"
            f" (data.ignore {role})"
        )
    return Example("", (text_of(get(row, key, "text"), key),))


def read_sharegpt(row: Mapping[str, Any], reading: Reading) -> Example:
    messages = _conversation(row, reading, "conversations")
    _refuse_thoughts(row, messages)
    return Example([], (messages,))


def read_alpaca(row: Mapping[str, Any], reading: Reading) -> Example:
    instruction = text_of(get(row, "instruction", "prompt"), "instruction")
    answer = text_of(get(row, "output", "answer"), "output")
    _refuse_thoughts(row)
    context, history, system = row.get("input") or "", row.get("history"), system_of(row)
    if not isinstance(context, str):
        raise Malformed(f"'input' must be a text, not {kind_of(context)}")
    check_text(context, "input")
    if reading.chat:
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for question, reply in turns_of(history):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        words = f"{instruction}\n\n{context}" if context else instruction
        return Example([*messages, {"role": "user", "content": words}], ([{"role": "assistant", "content": answer}],))
    if history:
        raise Malformed("'history' has earlier turns, which need a chat template: use a tokenizer that has one")
    opening = system or (ALPACA_INPUT if context else ALPACA)
    middle = f"\n\n### Input:\n{context}" if context else ""
    return Example(f"{opening}\n\n### Instruction:\n{instruction}{middle}\n\n### Response:\n", (answer,), own_turns=True)


def read_tokens(row: Mapping[str, Any], reading: Reading) -> Example:
    return Example("", (), tokens=read_token_rows(row, reading.vocabulary, reading.ignore))


# --- pairs and single judgements --------------------------------------------------------------------------------------


def read_preference(row: Mapping[str, Any], reading: Reading) -> Example:
    columns: tuple[Mapping[str, float], ...] = ({"label": 1.0}, {"label": 0.0})
    if (margin := row.get("margin")) is not None:
        columns = tuple({**column, "margin": number_of(margin, "margin")} for column in columns)
    chosen, rejected = (answer_of(get(row, key, "answer"), key, reading.ignore) for key in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise Malformed("'chosen' and 'rejected' must both be texts or both be lists of messages")
    if chosen == rejected:
        raise Malformed("'chosen' and 'rejected' are equal")
    prompt: Text
    if _has_prompt(row, reading):
        prompt, (chosen, rejected) = _joined(_prompt(row, reading), (chosen, rejected), "chosen")
        return Example(prompt, (chosen, rejected), columns)
    if isinstance(chosen, list) and isinstance(rejected, list):
        if chosen[0]["role"] == "assistant" and "messages" in row:
            prompt = _question(_conversation(row, reading, "messages"), "messages")
            return Example(prompt, (chosen, rejected), columns)
        prompt, chosen, rejected = _common_messages(chosen, rejected)
        return Example(prompt, (chosen, rejected), columns)
    if not reading.split_at:
        raise Malformed(
            "no 'prompt', and the texts do not say where the answer begins: set data.split_at to the text before it"
        )
    (prompt, chosen), (other, rejected) = (
        _cut(text, reading.split_at, key) for text, key in ((chosen, "chosen"), (rejected, "rejected"))
    )
    if prompt != other:
        raise Malformed(f"the texts before the last {reading.split_at!r} differ between 'chosen' and 'rejected'")
    return Example(prompt, (chosen, rejected), columns, own_turns=True)


def read_triple(row: Mapping[str, Any], reading: Reading) -> Example:
    """Reads a pair, and ``reference``, a gold answer to the same prompt."""
    pair = read_preference(row, reading)
    try:
        gold = read_preference({**row, "chosen": row.get("reference")}, reading)
    except Malformed as fault:
        raise Malformed(str(fault).replace("'chosen'", "'reference'")) from fault
    if gold.prompt != pair.prompt:
        raise Malformed("'reference' and 'chosen' do not answer the same prompt")
    return replace(pair, completions=(*pair.completions, gold.completions[0]), columns=(*pair.columns, {"gold": 1.0}))


def read_hh(row: Mapping[str, Any], reading: Reading) -> Example:
    texts = [text_of(get(row, key, "answer"), key) for key in ("chosen", "rejected")]
    for key, text in zip(("chosen", "rejected"), texts, strict=True):
        if not text.startswith("\n\nHuman:"):
            raise Malformed(f"{key!r} does not begin with '\\n\\nHuman:', as the others do")
    pair = read_preference({**row, "chosen": texts[0], "rejected": texts[1]}, Reading(split_at="\n\nAssistant:"))
    return _as_chat(pair) if reading.hh_chat else pair


def _as_chat(pair: Example) -> Example:
    """Returns a pair of transcripts as a conversation and its two answers."""
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
    prompt = _conversation(row, reading, "conversations")
    answers = {
        name: [sharegpt_message(as_list(get(row, name, "answer")), name, reading.ignore)] for name in ("chosen", "rejected")
    }
    return read_preference({**row, **answers, "prompt": prompt}, Reading())


def read_unpaired(row: Mapping[str, Any], reading: Reading) -> Example:
    example = read_prompt_completion(row, reading)
    key = reading.label_key or "label"
    label = {"label": label_of(get(row, key, "label"), key, soft=False)}
    return Example(example.prompt, example.completions, (label,))


def read_kto_tag(row: Mapping[str, Any], reading: Reading) -> Example:
    messages, key = _conversation(row, reading, "messages", "conversations"), reading.prompt_key or "messages"
    if messages[-1]["role"] != "assistant":
        raise Malformed(f"{key!r} must end with the assistant's message that the label is about")
    label = {"label": label_of(get(row, "kto_tag", "label"), "kto_tag", soft=False)}
    if len(messages) < 2:
        raise Malformed(f"{key!r} has no message before the assistant's")
    return Example(messages[:-1], (messages[-1:],), (label,))


def read_stepwise(row: Mapping[str, Any], reading: Reading) -> Example:
    prompt = _prompt(row, reading)
    steps, labels = (listed(get(row, name, meaning)) for name, meaning in (("completions", "steps"), ("labels", "labels")))
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
        raise Malformed("'completions' and 'labels' must be lists of one length")
    if not steps:
        raise Malformed("'completions' has no steps")
    texts = [text_of(step, "completions") for step in steps]
    values = [label_of(label, "labels", soft=True) for label in labels]
    return Example(prompt, ("".join(texts),), steps=tuple(zip(texts, values, strict=True)))


# --- parts -----------------------------------------------------------------------------------------------------------


def _refuse_thoughts(row: Mapping[str, Any], messages: Sequence[Message] = ()) -> None:
    for name in filter(row.__contains__, THOUGHTS):
        text = row[name].strip() if isinstance(row[name], str) else ""
        known = (said for message in messages for said in (message["content"], reasoning_of(message)))
        if text and text.lower() not in _SWITCHES and not any(text in said for said in known):
            what, way = (
                "before an answer that is a text: write it into the answer, ",
                "give the answer as a message that has it",
            )
            if messages:
                what, way = "and no message has it: ", "give it to the assistant's message as 'reasoning_content'"
            raise Malformed(f"{name!r} has what was thought {what}{way}, or leave it unread (data.ignore {name})")


def _has_prompt(row: Mapping[str, Any], reading: Reading) -> bool:
    try:
        return get(row, reading.prompt_key or "prompt", "prompt") is not None
    except Malformed:
        return False


def _conversation(row: Mapping[str, Any], reading: Reading, *keys: str) -> list[Message]:
    key = reading.prompt_key or next((key for key in keys if key in row), keys[0])
    return messages_of(get(row, key, "conversation"), key, reading.ignore)


def _prompt(row: Mapping[str, Any], reading: Reading) -> Text:
    key = reading.prompt_key or "prompt"
    prompt = as_list(get(row, key, "prompt"))
    return _question(messages_of(prompt, key, reading.ignore), key) if isinstance(prompt, list) else text_of(prompt, key)


def _question(messages: list[Message], key: str) -> list[Message]:
    if messages[-1]["role"] == "assistant":
        raise Malformed(f"{key!r} ends with an assistant's message; end it with what the model is to answer")
    return messages


def _joined(prompt: Text, answers: tuple[Text, ...], key: str) -> tuple[Text, tuple[Text, ...]]:
    """Returns a prompt and its answers, without messages that answers repeat from the end of the prompt, or that contain the
    prompt.
    """
    if (
        isinstance(prompt, str)
        and is_transcript(prompt)
        and all(isinstance(each, str) and each.startswith(prompt) for each in answers)
    ):
        return prompt, tuple(answer[len(prompt) :] for answer in answers)
    talks = [answer for answer in answers if isinstance(answer, list)]
    if len(talks) < len(answers) or all(talk[0]["role"] == "assistant" for talk in talks):
        return prompt, answers
    if isinstance(prompt, str):
        shared, *rest = _common_messages(*talks) if len(talks) > 1 else (talks[0][:-1], talks[0][-1:])
        if all(words_of(message["content"]).strip() != prompt.strip() for message in shared):
            raise Malformed(f"'prompt' is none of the messages that {key!r} begins with (data.ignore prompt leaves it unread)")
        return shared, tuple(rest)
    most = min(len(prompt), *(len(talk) - 1 for talk in talks))
    same = next((n for n in range(most, 0, -1) if all(talk[:n] == prompt[-n:] for talk in talks)), 0)
    if not same:
        raise Malformed(f"{key!r} does not go on from 'prompt', and begins with another message than its last ones")
    if len(talks) == 1:
        return prompt, (talks[0][same:],)
    shared, *rest = _common_messages(*([*prompt[:-same], *talk] for talk in talks))
    return shared, tuple(rest)


def _common_messages(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """Returns the prompt that two conversations share; at least the last answer of each is left."""
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
