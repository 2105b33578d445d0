"""Several ranks train as one, and what they save is taken up by any number of them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from rlhf_authoring.contracts.reinforce import actor
from rlhf_authoring.contracts.suite import all_checks
from transformers import AutoModelForCausalLM

from rlhf_host.models import load_model

BOTH = ["actor", "critic"]
CHECKS = [check.name for check in all_checks(("backend",)) if check.name != "ranks_step_as_one"]  # it starts ranks itself


def both(model):
    return dict.fromkeys(BOTH, model)


def apart(one, other):
    return torch.cat([(one[name] - value).double().flatten() for name, value in other.items()]).norm()


def check_close(found, expected, before, bound=1e-3):
    assert found.keys() == expected.keys()
    moved = apart(expected, before)
    gap = float(apart(found, expected) / moved)
    print(f"apart by {gap:.2e} of the distance moved, {float(moved):.3g}")
    assert gap < bound


@pytest.fixture(scope="module")
def twenty(group, model):
    return group(1)("steps", both(model), 20, kind="torch")[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_twenty_steps_with_uneven_rows_are_those_of_one_torch_rank(group, model, twenty, size):
    found = group(size)("steps", both(model), 20)[0]
    check_close(found["weights"], twenty["weights"], twenty["before"])


@pytest.mark.parametrize(("kind", "size"), [("torch", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4)])
@pytest.mark.parametrize("name", CHECKS)
def test_ranks_with_uneven_rows_keep_the_contract(group, tmp_path, name, kind, size):
    assert group(size)("contract", kind, name, tmp_path) == ["passed"] * size


@pytest.mark.parametrize("what", ["frozen", "lora", "recomputed"])
def test_what_is_trained_in_part_or_computed_again_steps_as_torch_does(group, model, what):
    expected = group(1)("steps", both(model), 3, what=what, kind="torch")[0]
    found = group(2)("steps", both(model), 3, what=what)[0]
    before = group(1)("steps", both(model), 0, what=what, kind="torch")[0]["weights"]
    check_close(found["weights"], expected["weights"], before)


def test_groups_of_ranks_hold_copies(group, model):
    expected = group(1)("steps", both(model), 3, kind="torch")[0]
    found = group(4)("steps", both(model), 3, shard=2)[0]
    check_close(found["weights"], expected["weights"], expected["before"])
    held = [each["held"] / each["whole"] for each in group(4)("pieces", {"actor": model}, 2**20, True, shard=2)]
    assert all(0.4 < share < 0.6 for share in held)


def test_in_16_bits_small_steps_are_kept(group, model):
    expected = group(1)("steps", both(model), 3, kind="torch")[0]
    found = group(2)("steps", both(model), 3, precision="bf16")[0]
    assert {value.dtype for value in found["weights"].values()} == {torch.float32}
    check_close(found["weights"], expected["weights"], expected["before"], 0.1)


def test_weights_that_live_in_host_memory_step_the_same(group, model):
    expected = group(1)("steps", both(model), 3, kind="torch")[0]
    check_close(group(2)("steps", both(model), 3, offload="cpu")[0]["weights"], expected["weights"], expected["before"])


def test_a_rank_without_rows_takes_part(group, model):
    expected = group(1)("steps", both(model), 3, kind="torch")[0]
    found = group(2)("steps", both(model), 3, rows=[list(range(8)), []])[0]
    check_close(found["weights"], expected["weights"], expected["before"])


def test_experts_and_routers_step_as_torch_does(group, experts):
    expected = group(1)("steps", {"actor": experts}, 3, kind="torch")[0]
    check_close(group(2)("steps", {"actor": experts}, 3)[0]["weights"], expected["weights"], expected["before"])


@pytest.mark.parametrize(
    ("size", "named"),
    [(1, {}), (2, {}), (4, {"shard": 2}), (2, {"what": "lora"}), (2, {"what": "frozen"}), (2, {"offload": "cpu"})],
    ids=["alone", "two", "copies", "lora", "frozen", "offload"],
)
def test_a_model_that_is_read_in_pieces_steps_as_one_that_was_whole(group, model, size, named):
    expected = group(size)("steps", both(model), 2, **named)[0]
    found = group(size)("steps", both(model), 2, pieces=True, **named)[0]
    assert all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())


def test_experts_are_read_in_pieces(group, experts):
    expected = group(2)("steps", {"actor": experts}, 2)[0]
    found = group(2)("steps", {"actor": experts}, 2, pieces=True)[0]
    assert all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())


@pytest.mark.parametrize(
    ("head", "dtype", "pieces", "named"),
    [
        ("lm", "bfloat16", True, {}),
        ("lm", "auto", False, {}),
        ("scalar", "bfloat16", False, {"offload": "cpu", "precision": "bf16"}),
    ],
    ids=["pieces", "whole", "head"],
)
@pytest.mark.parametrize("rows", [[[0, 1, 2, 3, 4, 6], [5, 7]], [[*range(8)], []]], ids=["uneven", "empty"])
def test_a_model_that_is_not_trained_is_split_and_says_the_same(group, scalar, rows, head, dtype, pieces, named):
    for each in group(2)("frozen", scalar, rows, head, dtype, pieces, **named):
        whole, split = each["said"]
        rounded = 0.1 if head == "scalar" else 0.02 if dtype == "bfloat16" else 1e-6  # micro-batches are others
        assert torch.allclose(whole, split, atol=rounded)
        assert len(split) == 0 or split.any()
        assert each["held"][1] / each["held"][0] == pytest.approx(0.5, abs=0.05)


def test_kernels_that_share_the_models_weights_are_split(group, model):
    expected = group(1)("steps", both(model), 3)[0]
    found = group(2)("twin", both(model), stale=False)[0]
    check_close(found["weights"], expected["weights"], expected["before"])
    (said,) = group(1)("twin", {"actor": model}, stale=True)
    assert said == (
        "the kernels' LlamaForCausalLM does not hold the weights of model.layers.0.mlp.up_proj there: set --kernels none"
    )


def test_what_fails_on_one_rank_fails_on_all_and_leaves_no_trace(group, model):
    first, second = group(2)("failures", both(model))
    expected = group(1)("steps", both(model), 1, kind="torch")[0]
    for each in (first, second):
        plugin, infinite, nan = each["said"]
        assert "task 99 is cursed" in plugin
        assert "the loss is" in infinite
        assert "the loss is" in nan
    assert all(torch.equal(first["untouched"][name], value) for name, value in first["before"].items())
    check_close(first["weights"], expected["weights"], expected["before"])


def test_passes_without_gradient_give_what_torch_gives(group, model):
    (whole,) = group(1)("infer", both(model), kind="torch")
    for part in group(2)("infer", both(model)):
        for found, expected in zip(part["found"], whole["found"], strict=True):
            for one, other in zip(found, expected, strict=True):
                other = other[part["rows"]]
                width = min(one.shape[1], other.shape[1])
                assert torch.allclose(one[:, :width], other[:, :width], atol=1e-5)


OTHERS = {
    "momentum": {"optimizer": "SGD", "optimizer_args": ["momentum=0.9", "dampening=0.1"]},
    "plain": {"optimizer": "SGD"},
    "sums": {"optimizer": "Adagrad", "optimizer_args": ["initial_accumulator_value=0.1"]},
    "most": {"optimizer": "AdamW", "optimizer_args": ["amsgrad=true"]},
    "steps": {"optimizer": "Rprop"},
    "nesterov": {"optimizer": "NAdam"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_step_as_torch_does_and_are_taken_up(group, model, tmp_path, name):
    named = OTHERS[name]
    expected = group(1)("steps", both(model), 3, kind="torch", **named)[0]
    whole = group(2)("live", both(model), tmp_path, **named)[0]
    check_close(whole["weights"], expected["weights"], expected["before"])
    found = group(2)("go_on", BOTH, tmp_path, **named)[0]
    assert all(torch.equal(found[key], value) for key, value in whole["weights"].items())
    check_close(group(1)("go_on", BOTH, tmp_path, **named)[0], whole["weights"], whole["saved"])
    assert "was written with optimizer" in group(1)("refusal", {"actor": model}, tmp_path, optimizer="RAdam")[0]


# --- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def life(group, model, tmp_path_factory):
    """Two ranks' updates, and the directory of what they saved after the second one."""
    directory = tmp_path_factory.mktemp("life")
    return group(2)("live", both(model), directory)[0], directory


def test_a_resumed_run_is_value_for_value_the_one_that_never_stopped(group, life):
    whole, directory = life
    found = group(2)("go_on", BOTH, directory)[0]
    assert found.keys() == whole["weights"].keys()
    assert all(torch.equal(found[name], value) for name, value in whole["weights"].items())
    assert apart(whole["weights"], whole["saved"]) > 0


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_ranks_takes_up_a_checkpoint(group, life, size):
    whole, directory = life
    found = group(size)("go_on", BOTH, directory)[0]
    check_close(found, whole["weights"], whole["saved"])


def test_a_model_that_was_written_during_a_step_loads_without_the_backend(life):
    whole, directory = life
    for name, head in (("actor", "lm"), ("critic", "scalar")):
        assert len(list((directory / f"{name}-model").glob("model-*.safetensors"))) == 2
        loaded = load_model(actor(model=str(directory / f"{name}-model")), head=head).state_dict()
        assert all(torch.equal(value, whole["saved"][f"{name}.{key}"]) for key, value in loaded.items())
    plain = AutoModelForCausalLM.from_pretrained(directory / "actor-model").state_dict()
    assert all(torch.equal(value, whole["saved"][f"actor.{key}"]) for key, value in plain.items())


def test_an_adapter_is_saved_and_taken_up(group, model, tmp_path):
    whole = group(2)("live", {"actor": model}, tmp_path, what="lora")[0]
    assert (tmp_path / "actor-model" / "adapter_model.safetensors").is_file()
    loaded = group(1)("loaded_adapter", model, tmp_path / "actor-model")[0]
    assert all(torch.allclose(loaded[name], value, atol=1e-6) for name, value in whole["saved"].items())


def test_what_a_checkpoint_cannot_be_resumed_with_is_said(group, model, tied, life, tmp_path):
    shutil.copytree(life[1] / "actor", tmp_path / "actor")
    one, models = group(1), {"actor": model}
    assert one("refusal", models, tmp_path) == ["accepted"]
    assert "written with precision fp32, this run has bf16" in one("refusal", models, tmp_path, precision="bf16")[0]
    assert "is of another model" in one("refusal", {"actor": tied}, tmp_path)[0]
    assert "is of another model" in one("refusal", models, tmp_path, what="lora")[0]
    shape = tmp_path / "actor" / "fsdp.json"
    shape.write_text(json.dumps({**json.loads(shape.read_text()), "updates": None}))
    assert "is damaged" in one("refusal", models, tmp_path)[0]
    shape.unlink()
    assert "was not written by the fsdp backend" in one("refusal", models, tmp_path)[0]


class Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_checkpoint_that_would_run_code_is_refused(group, model, life, tmp_path):
    shutil.copytree(life[1] / "actor", tmp_path / "actor")
    description = tmp_path / "actor" / "state" / ".metadata"
    described = pickle.loads(description.read_bytes())
    described.planner_data = Payload(tmp_path / "ran")
    description.write_bytes(pickle.dumps(described))
    assert "reading it could run code, which is refused" in group(1)("refusal", {"actor": model}, tmp_path)[0]
    assert not (tmp_path / "ran").exists()
    for file in description.parent.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    description.write_bytes((life[1] / "actor/state/.metadata").read_bytes())
    assert "cannot be read" in group(1)("refusal", {"actor": model}, tmp_path)[0]


# --- weights ------------------------------------------------------------------------------------


def test_gathered_weights_are_the_whole_state_tied_heads_included(group, tied, tmp_path):
    found = group(2)("live", {"actor": tied}, tmp_path)[0]
    assert found["saved"].keys() == found["before"].keys()
    assert "actor.lm_head.weight" in found["saved"]
    assert torch.equal(found["saved"]["actor.lm_head.weight"], found["saved"]["actor.model.embed_tokens.weight"])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "actor-model").state_dict()
    assert all(torch.equal(plain[name], found["saved"][f"actor.{name}"]) for name in plain)


@pytest.mark.parametrize("everywhere", [False, True])
def test_no_rank_holds_the_whole_model(group, model, everywhere):
    first, second = group(2)("pieces", {"actor": model}, 10_000, everywhere)
    for each in (first, second):
        assert each["held"] < 0.6 * each["whole"]
        assert each["averages"] == 2 * each["held"]
    assert first["held"] + second["held"] == first["whole"]
    largest = max(size for bucket in first["buckets"] for _, size in bucket)
    assert max(sum(size for _, size in bucket) for bucket in first["buckets"]) <= max(10_000, largest)
    assert second["buckets"] == (first["buckets"] if everywhere else [[]] * len(first["buckets"]))


def test_every_rank_keeps_and_writes_its_share_of_a_model(group, model, tmp_path):
    found = group(2)("share", {"actor": model}, tmp_path)
    for each in found:
        assert each["held"] < 0.6 * each["whole"]
        # A bucket, and the one that was given before it.
        assert each["most"] <= 2 * max(10_000, each["largest"]) < 0.6 * each["whole"]
    assert sum(each["held"] for each in found) == found[0]["whole"]


@pytest.mark.parametrize("kept", ["all", "optimizer"])
def test_taking_turns_changes_nothing(group, model, tmp_path, kept):
    named = {"offload_while_sampling": kept}
    here = group(2)("take_turns", both(model), tmp_path / "here", moves=False, **named)[0]
    gone = group(2)("take_turns", both(model), tmp_path / "gone", moves=True, **named)
    for (before, after), (other_before, other_after) in zip(gone[0]["found"], here["found"], strict=True):
        assert all(torch.equal(before[name], value) for name, value in other_before.items())
        assert all(torch.equal(after[name], value) for name, value in other_after.items())
    for each in gone:
        assert all(parked == {"weights": kept == "all", "averages": True} for parked in each["away"])
    for path in (tmp_path / "here").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "gone" / path.relative_to(tmp_path / "here")).read_bytes()


# --- refusals -----------------------------------------------------------------------------------


def test_groups_that_do_not_come_out_even_are_refused(group, model):
    said = group(2)("refusal", {"actor": model}, shard=3)
    assert said == ["backend.shard 3 does not divide the 2 ranks of the role's group"] * 2
