"""Commands of other projects that train nothing, and the command that does the same here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rlhf_host.commands import visible
from rlhf_translate.credentials import without_secrets
from rlhf_translate.elsewhere import key_of
from rlhf_translate.shell.word import Word


class _Task(NamedTuple):
    program: re.Pattern[str]
    """Words that run it, joined by blanks."""
    what: str
    here: str
    """Command here; ``{NAME}`` is the value of an option there, or the name itself."""
    options: Mapping[str, str] = {}
    """``NAME`` → names of the option there."""


_MODEL = {"MODEL": "pretrain model_name_or_path actor.model_name_or_path model_path local_dir"}
_OPENRLHF = r"(?:.*[./])?openrlhf[./]cli[./]"

_TASKS = (
    _Task(
        re.compile(rf"{_OPENRLHF}lora_combiner(?:\.py)?"),
        "merges an adapter",
        "rlhf merge-lora {ADAPTER} --base {MODEL} --output {DIRECTORY}",
        {**_MODEL, "ADAPTER": "lora_path", "DIRECTORY": "output_path"},
    ),
    _Task(
        re.compile(rf"{_OPENRLHF}serve_rm(?:\.py)?"),
        "serves a reward model",
        "rlhf serve-reward {MODEL} --port {PORT} --host {HOST}",
        {"MODEL": "reward_pretrain reward.model_name_or_path reward_model_path", "PORT": "port", "HOST": "host"},
    ),
    _Task(
        re.compile(rf"{_OPENRLHF}interactive_chat(?:\.py)?|(?:.*/)?interactive_chat\.py"),
        "talks to a model",
        "rlhf chat {MODEL}",
        {**_MODEL, "MODEL": "pretrain"},
    ),
    _Task(
        re.compile(rf"{_OPENRLHF}batch_inference(?:\.py)?|(?:.*/)?batch_inference\.py"),
        "samples or scores",
        "rlhf generate --model {MODEL} --data {DATA} --output {FILE} --reward NAME, and rlhf replay FILE for scores alone",
        {**_MODEL, "DATA": "dataset", "FILE": "output_path"},
    ),
    _Task(
        re.compile(r"(?:.*[./])?(?:verl[./]model_merger(?:[./]__main__)?|legacy_model_merger|model_merger)(?:\.py)?"),
        "writes checkpoints for transformers, which ours are; in another place",
        "rlhf export RUN_DIR -o {DIRECTORY}",
        {"DIRECTORY": "target_dir"},
    ),
    _Task(re.compile(r"(?:.*[./])?verl[./]trainer[./]main_eval(?:\.py)?"), "evaluates", "rlhf eval --model MODEL --data FILE"),
    _Task(
        re.compile(r"(?:.*[./])?verl[./]trainer[./]main_generation\w*(?:\.py)?"),
        "samples",
        "rlhf generate --model MODEL --data FILE --output FILE.jsonl",
    ),
    _Task(
        re.compile(r"(?:.*/)?examples/data_preprocess/\w+\.py"),
        "prepares data, which needs no preparation here",
        "rlhf data show PATH",
    ),
    _Task(re.compile(r"(?:.*/)?trl chat"), "talks to a model", "rlhf chat {MODEL}", _MODEL),
    _Task(re.compile(r"(?:.*/)?trl env"), "shows versions", "rlhf doctor"),
    _Task(
        re.compile(r"(?:.*/)?trl vllm[-_]serve|(?:.*/)?trl[./]scripts[./]vllm_serve(?:\.py)?"),
        "serves a model for a run; a run here starts its own with --engine vllm --placement rollout=N, or asks with --engine http",
        "vllm serve {MODEL}",
        {"MODEL": "model"},
    ),
    _Task(
        re.compile(r"(?:.*/)?(?:trl[./]scripts[./]|scripts/)?merge_(?:lora|adapter)(?:\.py)?"),
        "merges an adapter",
        "rlhf merge-lora DIRECTORY",
    ),
    _Task(
        re.compile(r"(?:.*/)?accelerate merge-weights"),
        "merges shards of a checkpoint; ours are whole",
        "rlhf export RUN_DIR -o DIRECTORY",
    ),
    _Task(
        re.compile(r"(?:.*/)?accelerate estimate-memory"),
        "says what memory a model needs",
        "rlhf plan --model MODEL --algo NAME",
    ),
    _Task(re.compile(r"(?:.*/)?accelerate (?:test|env|config)"), "looks at the machine", "rlhf doctor"),
)


def answer(words: Sequence[Word]) -> str | None:
    """Returns what a command does and the command here, if it is one that trains nothing."""
    for place, word in enumerate(words):
        launcher = word.text.rpartition("/")[2] in ("trl", "accelerate") and place + 1 < len(words)
        name = f"{word.text} {words[place + 1].text}" if launcher else word.text
        if task := next((task for task in _TASKS if task.program.fullmatch(name)), None):
            return f"{visible(name)} trains nothing: it {task.what}: {_filled(task, words[place + 1 :])}"
    return None


def _filled(task: _Task, words: Sequence[Word]) -> str:
    given: dict[str, str] = {}
    for word, value in pairwise([*words, Word("-", 0)]):
        name, equals, text = word.text.partition("=")
        known = text if equals else value.text
        if name.startswith("-") and known and not known.startswith("-") and not (word.missing or value.missing):
            given[key_of(name)] = visible(without_secrets(known))
    values = {
        slot: next((shlex.quote(given[name]) for name in names.split() if name in given), slot)
        for slot, names in task.options.items()
    }
    flags = [part for part in task.here.format(**values).split(" --") if part.split()[-1] not in _OPTIONAL]
    return " --".join(flags)


_OPTIONAL = ("PORT", "HOST")
"""Options whose default does where the command there has none."""
