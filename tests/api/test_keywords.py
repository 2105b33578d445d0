"""Arguments of the functions in Python: named as the schema names them, typed, and named in messages."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import rlhf_host
from rlhf_host.arguments import in_arguments
from rlhf_host.config.schema import RunConfig
from rlhf_host.config.tree import SHORT, SHORTHANDS, fields_of

from ..scripts_as_modules import load_script

OTHERWISE = {"roles": "actor", "reward": "rewards", "with": "extensions", "tracker": "trackers"}
DOTTED = {"agents", "placement", "max_restarts", "async_depth", "in_flight_updates", "from_trajectories", "debug"}
"""Settings that are arguments of no name of their own."""


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/keywords.py")


def test_the_types_are_those_of_the_schema(script):
    written = Path(rlhf_host.__file__).with_name("keywords.pyi").read_text()
    assert ast.dump(ast.parse(script.text())) == ast.dump(ast.parse(written)), "python scripts/keywords.py writes them again"


def test_train_has_an_argument_for_every_section_and_short_name(script):
    arguments = inspect.signature(rlhf_host.train).parameters
    wanted = {OTHERWISE.get(name, name) for name in fields_of(RunConfig)} - DOTTED
    wanted |= {name.replace("-", "_") for name in (*SHORT, *SHORTHANDS)}
    assert wanted <= set(arguments)
    for name, model in script.sections().items():
        if name != "data":
            assert arguments[name].annotation == f"{script.name_of(model)} | None", name


def right(text, label):
    return text.strip() == label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no algorithm is chosen: give algo=NAME (rlhf plugins --kind algo lists them)"),
        ({"algo": "rloo", "rewards": right, "n": 1}, "algo:rloo needs groups of 2 or more, and rollout.n is 1: set n=2"),
        ({"algo": "rloo", "rewards": right, "lr": "x"}, "lr: should be a valid number, not 'x'"),
        (
            {"algo": "rloo", "rewards": right, "steps": 2, "train": {"steps": 3}},
            "train.steps: is set already by steps: leave one out",
        ),
        (
            {"algo": "rloo", "rewards": right, "data": {"prompt": ["1+1=", "2+2="], "label": ["2"]}},
            "data: its columns have different lengths: prompt 2, label 1",
        ),
    ],
)
def test_messages_speak_of_arguments(arguments, message):
    with pytest.raises(rlhf_host.UserError) as error:
        rlhf_host.train(**arguments)
    assert message in str(error.value)
    assert "--" not in str(error.value).replace("--kind", "")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("set --train.shared-prefix off", "set train.shared_prefix off"),
        ("did you mean '--actor.lr' or '--reward-model.lr'?", "did you mean lr or reward_model.lr?"),
        (
            "add --with tis, or --eval.data PATH; rlhf train --resume R",
            "add extensions tis, or eval_data=PATH; rlhf train --resume R",
        ),
    ],
)
def test_flags_become_arguments(told, said):
    assert in_arguments(told) == said
