"""Python takes what the command line takes: every setting, and every option of every installed plugin, by both ways."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlhf_host import hookimpl
from rlhf_host.arguments import Arguments
from rlhf_host.cli.plugin_names import left_out
from rlhf_host.config.flag_names import CHOICES, known_flags
from rlhf_host.config.flags import parse
from rlhf_host.config.load import read_config
from rlhf_host.config.resolve import resolve
from rlhf_host.config.tree import MANY, SINGLE, Names, annotation_at
from rlhf_host.config.yaml_file import plain
from rlhf_host.errors import UserError
from rlhf_host.plugins.discovery import DISABLE, discover
from rlhf_host.plugins.options import members, options_model
from rlhf_host.plugins.selection import load

BASE = {"algo": "rloo", "reward": "math_verifier", "actor.model": "m", "data": "arithmetic"}
TEXTS = [
    "some",
    "auto",
    "bfloat16",
    "linear",
    "http://127.0.0.1:1/v1",
    "actor=1",
    "token-mean",
    "sequence-mean-token-sum",
    "<a> </a>",
    "PATH",
]
NUMBERS = [3, 2, 1, 0.5, 0.25, 0, 4096]
BESIDE: dict[str, dict[str, Any]] = {
    "reward.prm.join": {"reward.prm.template": "text"},
    "reward.prm.good": {
        "reward.prm.form": "tags",
        "reward.prm.bad": "b",
        "reward.prm.model": "m",
        "reward.prm.template": "text",
    },
    "reward.prm.bad": {
        "reward.prm.form": "tags",
        "reward.prm.good": "a",
        "reward.prm.model": "m",
        "reward.prm.template": "text",
    },
    "reward.prm.device": {"reward.prm.form": "labels", "reward.prm.model": "m", "reward.prm.template": "text"},
    "with.reward_scaling.reward": {"with.reward_scaling.low": 0},
    "algo.ld_alpha": {"algo.loss": "sigmoid"},
}
"""What some options need."""


def words(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line has them."""
    argv = []
    for name, value in settings.items():
        for item in value if isinstance(value, list) and value else [value]:
            argv += [f"--{name}", item if isinstance(item, str) else json.dumps(item)]
    return argv


def typed(settings: dict[str, Any]) -> dict[str, Any]:
    """The resolved configuration of a command line."""
    loaded = read_config([], parse(words(settings)), quickstart=False)
    return resolve(loaded.config, loaded.origins).config.model_dump()


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """The same from Python."""
    arguments = Arguments({}, {name.replace("-", "_"): value for name, value in settings.items()})
    loaded = read_config([arguments.settings], quickstart=False)
    return resolve(loaded.config, loaded.origins, "train", arguments.objects).config.model_dump()


def candidates(annotation: Any, default: Any = None) -> Iterator[Any]:
    """Values that a setting of this type may take, and that are not its default."""
    for member in members(annotation):
        origin, inner = get_origin(member) or member, get_args(member)
        if member is Any or origin is Path:
            yield "some"
        elif origin is Literal:
            yield from (value for value in inner if value != default)
        elif origin is bool:
            yield not default
        elif origin in (int, float):
            yield from (number for number in NUMBERS if number != default and (origin is float or number % 1 == 0))
        elif origin is str:
            yield from TEXTS
        elif origin in (list, tuple, set):
            yield from ([each, each] for each in candidates(inner[0]))
            yield from ([each] for each in candidates(inner[0]))
        elif origin is dict:
            yield from ({"one": each} for each in candidates(inner[1]))
    yield from [] if default is None or default is PydanticUndefined else [default]


def by_both_ways(name: str, annotation: Any, default: Any, base: dict[str, Any]) -> str:
    """Returns what is wrong with a setting from Python; empty: nothing. Raises ``LookupError`` if no value is accepted at all."""
    for value in candidates(annotation, default):
        try:
            wanted = typed({**base, name: value})
        except UserError:
            continue
        try:
            found = given({**base, name: value})
        except UserError as error:
            return f"{name}={value!r}: {error}"
        return "" if found == wanted else f"{name}={value!r}: another configuration"
    raise LookupError(name)


def every_setting(whole: bool) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """Yields name, type and default of each setting, and what to set beside it.

    Args:
        whole: else of each kind of plugins only the first one, and of each section the first setting.
    """
    kinds, sections = set[str](), set[str]()
    for name in known_flags():
        head, *rest = name.replace("-", "_").split(".")
        section = name.rpartition(".")[0]
        if name not in (*SINGLE, *MANY, "eval.reward") and (whole or section not in sections):
            sections.add(section)
            annotation = str if name in ("data", "eval.data") else annotation_at((*Names().place(head)[0], *rest))
            yield name, annotation, None, {key: value for key, value in BASE.items() if key != name}
    for info in discover():
        key = CHOICES.get(info.kind)
        if key is None or info.kind in ("tasks", "preset") or (info.kind in kinds and not whole):
            continue
        prefix = key if key in SINGLE else f"{key}.{info.name}"
        fields = options_model(load(info)).model_fields
        required = {f"{prefix}.{field}": next(candidates(of.annotation)) for field, of in fields.items() if of.is_required()}
        kinds.update([info.kind] if fields else [])
        for field, of in fields.items():
            chosen = {**BASE, key: info.name, **required}
            name = f"{prefix}.{of.alias or field}"
            beside = {**chosen, **BESIDE.get(name, {})}
            yield name, of.annotation, of.default, {each: value for each, value in beside.items() if each != name}


@pytest.mark.parametrize("whole", [False, True], ids=["some", "all"])
def test_every_setting_once_by_both_ways(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("some").write_text("http://127.0.0.1:8000\n")  # what settings that name a file read, if they do
    wrong, without, kinds = [], [], set()
    for name, annotation, default, base in every_setting(whole):
        try:
            wrong += filter(None, [by_both_ways(name, annotation, default, base)])
            kinds.add(name.partition(".")[0])
        except LookupError:
            without.append(f"{base.get('algo')} {name}")
    assert wrong == []
    assert without == (["dr_grpo algo.aggregation"] if whole else []), "dr_grpo refuses it: its loss is one aggregation"
    assert {"algo", "agent", "engine", "backend", "runtime", "sync", "reward", "with", "tracker", "train"} <= kinds


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({"rewards": "math_verifier,a=format", "reward.a.weight": 2}, "--reward math_verifier,a=format --reward.a.weight 2"),
        ({"rewards": ["format"], "reward.format.weight": 2}, "--reward format --reward.format.weight 2"),
        ({"rewards": {"name": "format", "weight": 2}}, "--reward format --reward.format.weight 2"),
        ({"eval_rewards": "format", "eval.reward.format.weight": 2}, "--eval.reward format --eval.reward.format.weight 2"),
        ({"extensions": ["kl"], "kl.coef": 0.1}, "--with kl --kl.coef 0.1"),
        ({"wandb": True}, "--wandb"),
        ({"actor.lora_rank": 4}, "--actor.lora-rank 4"),
        ({"data": "arithmetic", "data.arithmetic.max_samples": 4}, "--data arithmetic --data.arithmetic.max-samples 4"),
        ({"eval.data": None}, "--eval.data null"),
    ],
)  # fmt: skip
def test_forms_of_both_ways(arguments, flags):
    below = Arguments({}, {"eval.data": "arithmetic", "data": "arithmetic", "algo": "rloo", "actor.model": "m"}).settings
    by_flags = read_config([below], parse(flags.split()), quickstart=False)
    named = {name: value for name, value in arguments.items() if "." not in name}
    given = Arguments(named, {name: value for name, value in arguments.items() if name not in named})
    by_python = read_config([below, given.settings], quickstart=False)
    assert resolve(by_python.config, by_python.origins).config == resolve(by_flags.config, by_flags.origins).config


def test_objects_in_a_section_are_taken_as_beside_it():
    rows = [{"prompt": "1+1=", "label": "2"}]
    inside = Arguments({}, {"eval": {"data": rows, "reward": length, "n": 2}})
    beside = Arguments({"eval_data": rows, "eval_rewards": length}, {"eval.n": 2})
    assert (
        (inside.rows, inside.objects)
        == (beside.rows, beside.objects)
        == ({"python:eval_data": rows}, {("reward", "length"): length})
    )
    assert plain(inside.settings) == plain(beside.settings)


def length(text, label):
    return float(len(text))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": np.array([1, 2])}, "data is a path, a name, or rows with a prompt each, not list"),
        ({"data": (each for each in "ab")}, "data is a path, a name, or rows with a prompt each, not list"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(settings, message):
    with pytest.raises(UserError, match=re.escape(message.removesuffix("list"))):
        Arguments({}, settings)


def test_disable_takes_names_and_nothing():
    for value in (None, [], (), "", ["", None]):
        with left_out(Arguments({}, {"disable": value}).left_out):
            assert DISABLE not in os.environ
    with pytest.raises(UserError, match="--disable 3: no such plugin"), left_out(Arguments({}, {"disable": 3}).left_out):
        pass


def test_options_beside_an_object():
    class Mine:
        class Options(BaseModel):
            most: int = 3

        def __init__(self, options):
            self.options = options

        @hookimpl
        def score(self, trajectories):
            return [0.0 for _ in trajectories]

    arguments = Arguments({"rewards": {"name": Mine, "weight": 0.5}}, {"reward.Mine.most": 5})
    assert arguments.objects == {("reward", "Mine"): Mine}
    loaded = read_config([arguments.settings], quickstart=False)
    assert loaded.config.reward["Mine"].model_dump() == {"name": "python:Mine", "weight": 0.5, "most": 5}
