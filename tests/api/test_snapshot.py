"""The API only grows: the snapshot is current, and nothing that the first API promised is gone."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent

HOW = """

Additions are welcome: record them with

    python scripts/api_snapshot.py

and look at the change of tests/api/snapshot.json. Only additions are allowed (docs/stability.md): whatever is removed, renamed,
reordered or newly demanded fails against tests/api/first_api.json too, and that file is never rewritten."""


@pytest.fixture
def first():
    return json.loads((HERE / "first_api.json").read_text(encoding="utf-8"))


@pytest.fixture
def now(api):
    return json.loads(json.dumps(api.describe()))


def leaves(value, path=()):
    """``(path, value)`` of everything in nested dicts and lists; items of a list go by their text."""
    items = value.items() if isinstance(value, dict) else zip(value, value, strict=True) if isinstance(value, list) else ()
    found = [leaf for key, inner in items for leaf in leaves(inner, (*path, str(key)))]
    return found or [(path, value)]


def test_the_snapshot_is_the_api(now):
    recorded = json.loads((HERE / "snapshot.json").read_text(encoding="utf-8"))
    old, new = ({"/".join(path): value for path, value in leaves(tree)} for tree in (recorded, now))
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key, ...) != new.get(key, ...))
    lines = [f"  {key}: recorded {old.get(key, 'nothing')!r}, now {new.get(key, 'nothing')!r}" for key in changed]
    order = json.dumps(recorded) != json.dumps(now)
    assert not lines, "the API is not the one recorded:\n" + "\n".join(lines) + HOW
    assert not order, "hooks, arguments or fields stand in another order than recorded" + HOW


def test_nothing_that_the_first_api_promised_is_broken(api, first, now):
    broken = api.broken_promises(first, now)
    assert not broken, "plugins written for the first API would break:\n  " + "\n  ".join(broken) + HOW


def test_the_snapshot_keeps_the_promises_too(api, first):
    recorded = json.loads((HERE / "snapshot.json").read_text(encoding="utf-8"))
    assert api.broken_promises(first, recorded) == []


def test_the_first_api_is_that_of_the_frozen_plugin(first):
    source = (HERE / "first_api_plugin/src/rlhf_plugin_first_api/__init__.py").read_text(encoding="utf-8")
    assert all(f"def {hook}(" in source for hook in first["hooks"]), "the frozen plugin has every hook that is promised"


def test_what_no_run_executes_yet_is_described_and_promised_to_nobody(api, first, now):
    assert first == json.loads(json.dumps(api.promised(first)))
    provisional = [("Segment", "support"), ("Task", "agent"), ("Task", "images"), ("Segment", "images"), ("Batch", "images")]
    for noun, field in provisional:
        assert field in now["nouns"][noun]["fields"]
        assert field not in first["nouns"][noun]["fields"]
    changed = copy.deepcopy(now)
    del changed["nouns"]["Segment"]["fields"]["support"], changed["names"]["rlhf_host.internals"]
    assert api.broken_promises(first, changed) == []


# --- what would be caught -----------------------------------------------------------------------


def reordered(mapping, name):
    """With ``name`` moved to the front."""
    return {name: mapping[name], **{key: value for key, value in mapping.items() if key != name}}


def lose_a_hook(api):
    del api["hooks"]["keep_group"]


def lose_an_argument(api):
    del api["hooks"]["score"]["arguments"]["context"]


def rename_an_argument(api):
    arguments = api["hooks"]["score"]["arguments"]
    arguments["scoring"] = arguments.pop("context")


def reorder_arguments(api):
    score = api["hooks"]["score"]
    score["arguments"] = reordered(score["arguments"], "context")


def allow_one_only(api):
    api["hooks"]["keep_group"]["calls"] = "one"


def move_to_the_controller(api):
    api["hooks"]["importance_weights"]["where"] = "controller"


def lose_a_field(api):
    del api["nouns"]["Reward"]["fields"]["turns"]


def reorder_fields(api):
    api["nouns"]["Reward"]["fields"] = reordered(api["nouns"]["Reward"]["fields"], "score")


def demand_a_field(api):
    api["nouns"]["Reward"]["fields"]["confidence"] = {"type": "float"}


def push_in_a_field(api):
    api["nouns"]["Reward"]["fields"] = {"confidence": {"type": "float", "default": "1.0"}, **api["nouns"]["Reward"]["fields"]}


def take_a_default_away(api):
    del api["nouns"]["LossTerm"]["fields"]["mask"]["default"]


def lose_a_noun(api):
    del api["nouns"]["Drop"]


def lose_a_property(api):
    del api["nouns"]["Trajectory"]["members"]["text"]


def lose_a_name(api):
    api["names"]["rlhf_host"].remove("Sampling")


def lose_a_policy_loss(api):
    api["names"]["rlhf_host.functional.policy_losses"].remove("pg")


def demand_of_a_function(api):
    api["functions"]["leave_one_out"].insert(-1, "weights: Tensor")


def lose_a_group(api):
    api["entry_points"].remove("rlhf.tasks")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lose_a_hook, "the hook keep_group is gone"),
        (lose_an_argument, "the argument of score 'context' is gone"),
        (rename_an_argument, "the argument of score 'context' is gone"),
        (reorder_arguments, "the arguments of score stand in another order"),
        (allow_one_only, "keep_group had the rule calls='and', and now has 'one'"),
        (move_to_the_controller, "importance_weights had the rule where='worker', and now has 'controller'"),
        (lose_a_field, "the field of Reward 'turns' is gone"),
        (reorder_fields, "the fields of Reward stand in another order"),
        (demand_a_field, "Reward.confidence is new and has no default"),
        (push_in_a_field, "Reward has a new field before an old one"),
        (take_a_default_away, "LossTerm.mask had a default and has none"),
        (lose_a_noun, "Drop is gone"),
        (lose_a_property, "Trajectory.text is gone"),
        (lose_a_name, "rlhf_host.Sampling is gone"),
        (lose_a_policy_loss, "rlhf_host.functional.policy_losses.pg is gone"),
        (demand_of_a_function, "functional.leave_one_out demands the new argument 'weights'"),
        (lose_a_group, "the entry-point group rlhf.tasks is gone"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_change_that_breaks_plugins_is_named(api, first, now, change, said):
    changed = copy.deepcopy(now)
    change(changed)
    assert said in "\n".join(api.broken_promises(first, changed))


def test_additions_break_nothing(api, first, now):
    grown = copy.deepcopy(now)
    grown["hooks"]["score"]["arguments"]["deadline_s"] = "float"
    grown["hooks"]["another"] = {"arguments": {}, "returns": "None", "calls": "each", "where": "controller", "per": "run"}
    grown["nouns"]["Reward"]["fields"]["confidence"] = {"type": "float", "default": "1.0"}
    grown["functions"]["leave_one_out"].insert(-1, "weights: Tensor | None = None")
    grown["names"]["rlhf_host"].append("Another")
    assert api.broken_promises(first, grown) == []
