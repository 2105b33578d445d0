"""One optimizer batch has one gradient, on one rank or two, however it is sharded and whatever ZeRO spreads.

Two processes are started once and serve every test: ``backend_runs.py`` is their program. What all tests of one kind of backend
look at is computed once for the kind (``life``).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_model

from . import backend_runs
from .backend_runs import (
    KINDS,
    PIECES,
    RECOMPUTED,
    SHARDS,
    SHORT,
    WHOLE,
    begin,
    buckets,
    contract,
    cut_off,
    frozen,
    go_on,
    infer,
    layer,
    live,
    refusal,
    save,
    second_copies,
    share,
    take_turns,
    train,
)
from .group import Group


@pytest.fixture(scope="module")
def group(fork, environment, tmp_path_factory):
    """``group(size, parts)`` starts so many processes."""
    groups = []

    def start(size: int, parts: int = 1, *, sliced: bool = False) -> Group:
        directory = tmp_path_factory.mktemp("ranks")
        groups.append(Group(fork, environment, directory, size, parts, backend_runs.__file__, sliced=sliced))
        return groups[-1]

    yield start
    for each in groups:
        each.close()


@pytest.fixture(scope="module")
def pair(group):
    return group(2)


@pytest.fixture(scope="module")
def single(group):
    return group(1)


@dataclass
class Life:
    """What ``live`` gave of both ranks, and where the checkpoint is."""

    first: dict[str, Any]
    second: dict[str, Any]
    directory: Path


@pytest.fixture(scope="module")
def life(pair, tiny_model, tmp_path_factory):
    """``life(kind)``: the same for all tests of the kind."""
    lives: dict[str, Life] = {}

    def of(kind: str) -> Life:
        if kind not in lives:
            directory = tmp_path_factory.mktemp(kind)
            lives[kind] = Life(*pair(live, tiny_model, kind, directory), directory)
        return lives[kind]

    return of


@pytest.fixture(scope="module")
def alone(tiny_model):
    """One rank, plain PyTorch: what all others are compared with."""
    return train(OneProcess(), tiny_model, "torch", WHOLE)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def change(run: dict[str, Any], role: str, updates: int = 3) -> torch.Tensor:
    before, after = run["weights"][0][role], run["weights"][updates][role]
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


# --- the same gradient --------------------------------------------------------------------------


def check_steps(run, other, alone, updates=3):
    """Both ranks took the steps of one process."""
    for role in ("actor", "critic"):
        expected = alone["gradients"][role][:updates]
        assert all(gradient.norm() > 0.01 for gradient in expected), "clipped at every step"
        for found in (run, other):
            assert gap(found["gradients"][role], expected) < 1e-5
        assert run["weights"][0][role].keys() == alone["weights"][0][role].keys()
        assert gap(change(run, role, updates), change(alone, role, updates)) < 1e-3
    for found in (run, other):
        assert found["metrics"] == [pytest.approx(metrics, rel=1e-4, abs=1e-5) for metrics in alone["metrics"][:updates]]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_gradient_and_take_the_steps_of_one(life, alone, kind):
    check_steps(life(kind).first, life(kind).second, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_rows_takes_the_steps_too(pair, alone, tiny_model, kind):
    check_steps(*pair(train, tiny_model, kind, SHARDS["one empty"], 2), alone, updates=2)


@pytest.mark.parametrize("kind", ["zero-2", "zero-3"])
def test_one_rank_alone_needs_no_group(single, alone, tiny_model, kind):
    (found,) = single(train, tiny_model, kind, WHOLE, 2)
    check_steps(found, found, alone, updates=2)


def test_metrics_name_every_row_and_both_roles_once(alone):
    metrics = alone["metrics"][0]
    assert (metrics["rows"], metrics["critic/rows"]) == (8.0, 8.0)
    assert {"grad_norm", "critic/grad_norm", "loss/entropy", "critic/loss/value", "ratio/max_log"} <= metrics.keys()
    assert metrics["lr"] == pytest.approx(0.5e-4), "half-way through the warm-up"


@pytest.mark.parametrize("kind", ["zero-2", "zero-3"])
def test_tied_embeddings_have_one_gradient(pair, tmp_path, kind):
    model = write_tiny_model(tmp_path / "tied", tied=True)
    expected = train(OneProcess(), model, "torch", WHOLE, 2)
    found, _ = pair(train, model, kind, SHARDS["uneven"], 2)
    assert gap(found["gradients"]["actor"], expected["gradients"]["actor"]) < 1e-5
    assert gap(change(found, "actor", 2), change(expected, "actor", 2)) < 1e-3


@pytest.mark.parametrize("kind", ["torch", "zero-2", "zero-3"])
def test_passes_without_gradient_take_shards_of_any_size(pair, tiny_model, kind):
    expected = infer(OneProcess(), tiny_model, "torch", WHOLE)
    for name in ("before", "after", "values", "scores"):
        for found in pair(infer, tiny_model, kind, SHARDS["one empty"]):
            wanted = expected[name][found["rows"]]
            assert found[name].shape[0] == len(found["rows"])
            if len(found["rows"]):
                assert torch.allclose(found[name], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["torch", "zero-1", "zero-2", "zero-3"])
def test_recomputing_layers_in_the_backward_pass_changes_nothing(pair, alone, tiny_model, kind):
    check_steps(*pair(train, tiny_model, kind + RECOMPUTED, SHARDS["uneven"], 2), alone, updates=2)


@pytest.mark.parametrize("kind", SHORT)
def test_weights_of_16_bits_are_trained_by_their_fp32_copies(life, alone, tiny_model, kind):
    expected = torch.cat([value.flatten() for value in alone_change(alone, tiny_model)])
    found, other = life(kind).first, life(kind).second
    assert found["dtypes"] == {torch.bfloat16}
    assert gap(found["gradients"]["actor"].float(), alone["gradients"]["actor"]) < 3e-2
    assert gap(found["change"], expected) < 5e-2
    assert torch.equal(found["change"], other["change"])


@pytest.mark.parametrize(
    "kind", ["zero-3", "zero-3-offload", "zero-3-two-copies", "zero-3 lora", "zero-3 frozen", "zero-3-bf16"]
)
def test_a_model_that_is_read_in_pieces_trains_as_one_that_was_whole(pair, tiny_model, kind):
    expected, _ = pair(train, tiny_model, kind, SHARDS["uneven"], 2)
    found, _ = pair(train, tiny_model, kind + PIECES, SHARDS["uneven"], 2)
    assert_equal(found["weights"][0], expected["weights"][0])
    for role in ("actor", "critic"):  # norms are summed in another order
        assert gap(change(found, role, 2), change(expected, role, 2)) < (2e-2 if "bf16" in kind else 1e-4)


@pytest.mark.parametrize(
    ("dtype", "pieces", "zero"),
    [
        ("bfloat16", True, {}),
        ("auto", False, {}),
        ("auto", True, {"offload_param": "cpu", "offload_optimizer": "cpu"}),
        ("bfloat16", True, {"zero_hpz_partition_size": 2}),
    ],
    ids=["pieces", "whole", "offload", "copies"],
)
def test_a_model_that_is_not_trained_is_split_and_says_the_same(pair, single, tiny_model, dtype, pieces, zero):
    """Its distribution is asked for inside the actor's passes too, of which a rank without rows runs as many as the other."""
    (alone,) = single(frozen, tiny_model, tiny_model, [list(range(8))], dtype, False)
    for shards in SHARDS.values():
        both = pair(frozen, tiny_model, tiny_model, shards, dtype, pieces, **zero)
        for each in both:
            whole, split = each["said"]
            assert torch.allclose(whole, split, atol=0.02 if dtype == "bfloat16" else 1e-6)  # micro-batches are others
            assert len(split) == 0 or split.any()
            assert each["held"][1] / each["held"][0] == pytest.approx(0.5, abs=0.05)
        moved = {name: both[0]["weights"][name] - value for name, value in alone["weights"].items()}
        assert max(float(value.abs().max()) for value in moved.values()) < 1e-4


def test_float16_that_deepspeed_cannot_split_on_a_cpu_is_refused(single, tiny_model):
    with pytest.raises(AssertionError, match="DeepSpeed splits no float16 weights on CPUs"):
        single(frozen, tiny_model, tiny_model, WHOLE, "float16", False)


def assert_equal(found, expected):
    for role in expected:
        differs = [name for name in expected[role] if not torch.equal(found[role][name], expected[role][name])]
        assert not differs, role


@pytest.mark.parametrize("kind", ["zero-1-bf16", "zero-2", "zero-2-offload-adam", "zero-3-offload", "zero-3-two-copies"])
def test_what_moves_away_between_phases_comes_back_as_it_was(pair, life, tiny_model, tmp_path, kind):
    found, _ = pair(take_turns, tiny_model, kind, tmp_path, moves=True)
    assert_equal(found["after"][2], life(kind).first["weights"][3])


@pytest.mark.parametrize("kind", ["zero-2-optimizer-away", "zero-3-optimizer-away"])
def test_the_optimizer_moves_alone_where_weights_may_stay(pair, life, tiny_model, tmp_path, kind):
    found, _ = pair(take_turns, tiny_model, kind, tmp_path, moves=True)
    assert found["parked"][2:] == [{"weights": False, "averages": True}] * 4
    assert_equal(found["after"][2], life(kind.removesuffix("-optimizer-away")).first["weights"][3])


@pytest.mark.parametrize("part", ["", " frozen", " lora"])
@pytest.mark.parametrize("kind", ["zero-0", "zero-1", "zero-2-bf16", "zero-3", "zero-3-persistent"])
def test_what_is_away_is_copied_as_it_is(pair, tiny_model, tmp_path, kind, part):
    """Saved while engines sample, in either order, and then trained: as a run in which nothing moves."""
    found, _ = pair(take_turns, tiny_model, kind + part, tmp_path / "away", moves=True)
    stayed, _ = pair(take_turns, tiny_model, kind + part, tmp_path / "stayed", moves=False)
    for name in ("after", "away"):
        for moved, expected in zip(found[name], stayed[name], strict=True):
            assert_equal(moved, expected)
    assert found["parked"][2:] == [{"weights": True, "averages": True}] * 4
    for file in (tmp_path / "stayed" / "2").glob("*-model/*.safetensors"):
        saved, expected = load_file(tmp_path / "away" / "2" / file.parent.name / file.name), load_file(file)
        assert saved.keys() == expected.keys()
        assert [name for name in saved if not torch.equal(saved[name], expected[name])] == []


@pytest.mark.parametrize(("name", "options"), [("torch", {}), *(("deepspeed", {"zero_stage": stage}) for stage in range(4))])
def test_the_contract_of_what_is_away_holds_where_things_move(single, name, options):
    assert single(contract, name, options) == ["passed"]


def test_the_second_copy_of_zero_plus_plus_is_spread_over_as_many_ranks_as_asked(pair, tiny_model):
    sizes = [value.numel() for value in AutoModelForCausalLM.from_pretrained(tiny_model).parameters()]
    assert pair(second_copies, tiny_model, "zero-3-two-copies") == [[-(-size // 2) for size in sizes]] * 2


# --- layers split over processes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(group):
    """Four processes: two ranks, each of two processes that have half of every layer."""
    return group(4, parts=2)


@pytest.fixture(scope="module")
def split_lives(halves, tiny_model, tmp_path_factory):
    return halves(live, tiny_model, "zero-1-split", tmp_path_factory.mktemp("split"))


def test_two_ranks_of_split_layers_have_the_gradient_and_take_the_steps_of_one(halves, split_lives, alone, tiny_model):
    assert halves(layer, tiny_model, "zero-1-split") == [(32, 32)] * 4, "half of 64 rows"
    for found in split_lives:
        check_steps(found, found, alone)


def test_a_rank_of_split_layers_without_rows_takes_the_steps_too(halves, alone, tiny_model):
    assert halves(layer, tiny_model, "zero-2-split") == [(32, 32)] * 4
    for found in halves(train, tiny_model, "zero-2-split", SHARDS["one empty"], 2):
        check_steps(found, found, alone, updates=2)


def test_split_layers_fail_on_all_processes_and_leave_no_trace(split_lives):
    for found in split_lives:
        assert [said.split(":")[0] for said in found["said"]] == ["extension", "actor", "actor"]
        check_untouched(found)


def test_split_layers_come_out_whole(halves, tiny_model, tmp_path):
    found = halves(save, tiny_model, "zero-1-split", tmp_path / "saved")[0]
    expected = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert torch.equal(written[name], value)


def test_split_layers_resume_bit_for_bit(split_lives):
    check_same(split_lives[0]["resumed"], split_lives[0]["weights"][3])


# --- lines cut into slices ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut(group):
    """Four processes: two ranks, each of two processes that compute half of every line."""
    return group(4, parts=2, sliced=True)


@pytest.mark.parametrize("kind", ["torch", "zero-2", "zero-3"])
def test_ranks_of_slices_have_the_gradient_and_take_the_steps_of_one(cut, alone, tiny_model, kind):
    first, *others = cut(train, tiny_model, kind, SHARDS["uneven"])
    for other in others:
        check_steps(first, other, alone)


def test_a_rank_of_slices_without_rows_takes_the_steps_too(cut, alone, tiny_model):
    for found in cut(train, tiny_model, "zero-2", SHARDS["one empty"], 2):
        check_steps(found, found, alone, updates=2)


def test_slices_and_split_layers_are_not_mixed(cut, tiny_model):
    assert "both split a rank's work" in cut(refusal, tiny_model, "zero-2-split", Path("none"))[0]


def alone_change(alone: dict[str, Any], model: Path) -> list[torch.Tensor]:
    """The actor's change in the order of its parameters."""
    names = [name for name, _ in AutoModelForCausalLM.from_pretrained(model).named_parameters()]
    before, *_, after = alone["weights"]
    return [after["actor"][name] - before["actor"][name] for name in names]


# --- what goes wrong on one rank ----------------------------------------------------------------


def check_untouched(found):
    """By batches that fail; and only the good ones after them count."""
    check_same(found["after_failures"], found["weights"][0])
    assert found["updates"] == 3


def check_same(found, expected):
    for role in expected:
        assert found[role].keys() == expected[role].keys()
        assert all(torch.equal(found[role][name], expected[role][name]) for name in expected[role])


@pytest.mark.parametrize("kind", SHORT)
def test_what_overflows_in_16_bits_is_forgotten(life, kind):
    for found in (life(kind).first, life(kind).second):
        assert "actor: the gradient norm is inf" in found["said"]
        check_untouched(found)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_no_trace(life, kind):
    for found in (life(kind).first, life(kind).second):
        plugin, loss, gradient = found["said"]
        assert "task 99 is cursed" in plugin
        assert loss.startswith(("actor: the loss is inf", "actor: the loss is -inf"))
        assert "actor: the gradient norm is" in gradient
        check_untouched(found)


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, *SHORT])
def test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped(life, kind):
    whole = life(kind).first["weights"][3]
    for role in whole:
        assert sum(value.numel() for value in whole[role].values()) > 20_000
    check_same(life(kind).first["resumed"], whole)


def check_taken_up(whole, resumed, alone):
    """By another number of ranks or kind of optimizer: the same update, but for rounding."""
    for role in whole:
        expected, found = ({"weights": [alone["weights"][0], weights]} for weights in (whole, resumed))
        assert gap(change(found, role, 1), change(expected, role, 1)) < 1e-3


@pytest.mark.parametrize("kind", ["zero-0", "zero-1", "zero-2", "zero-3"])
def test_another_number_of_ranks_takes_up_a_checkpoint(pair, single, life, alone, tiny_model, tmp_path, kind):
    of_two = life(kind)
    check_taken_up(of_two.first["weights"][3], single(go_on, tiny_model, kind, of_two.directory)[0], alone)
    (of_one,) = single(begin, tiny_model, kind, tmp_path)
    check_taken_up(of_one, pair(go_on, tiny_model, kind, tmp_path)[0], alone)
    for directory in (of_two.directory, tmp_path):
        assert not list(directory.rglob("*universal*"))


@pytest.mark.parametrize(
    ("first", "second"), [("zero-1", "zero-2"), ("zero-2-offload", "zero-1"), ("zero-2", "zero-2-offload-adam")]
)
def test_one_rank_takes_up_what_two_saved_by_another_stage_or_optimizer(single, life, alone, tiny_model, first, second):
    whole, resumed = life(first).first["weights"][3], single(go_on, tiny_model, second, life(first).directory)[0]
    check_taken_up(whole, resumed, alone)


@pytest.fixture(scope="module")
def saved_by_one(single, tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    single(begin, tiny_model, "zero-2", directory)
    return directory


def test_a_checkpoint_that_would_run_code_is_refused(single, saved_by_one, tiny_model, tmp_path):
    shutil.copytree(saved_by_one, tmp_path, dirs_exist_ok=True)
    assert single(refusal, tiny_model, "zero-2", tmp_path) == ["loaded"]
    (file,) = (tmp_path / "actor").rglob("*optim_states.pt")
    torch.save({"optimizer_state_dict": Payload(tmp_path / "ran")}, file)
    assert "reading it could run code, which is refused" in single(refusal, tiny_model, "zero-2", tmp_path)[0]
    assert not (tmp_path / "ran").exists()


class Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_what_a_checkpoint_cannot_be_resumed_with_is_said(single, saved_by_one, tiny_model, tmp_path):
    shutil.copytree(saved_by_one, tmp_path, dirs_exist_ok=True)
    assert single(refusal, tiny_model, "zero-1", tmp_path) == ["loaded"]
    assert "written with zero_stage 2, this run has 3" in single(refusal, tiny_model, "zero-3", tmp_path)[0]
    assert "written with precision fp32, this run has bf16" in single(refusal, tiny_model, "zero-2-bf16", tmp_path)[0]
    (tmp_path / "actor" / "shape.json").unlink()
    assert "was not written by the deepspeed backend" in single(refusal, tiny_model, "zero-2", tmp_path)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["torch", "zero-2", "zero-3", "zero-3-persistent"])
def test_gathered_weights_are_the_whole_state_tied_heads_included(pair, tmp_path, kind, tied):
    source = write_tiny_model(tmp_path / "source", tied=tied)
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    found, _ = pair(save, source, kind, tmp_path / "saved")
    assert found.keys() == expected.keys()
    assert "lm_head.weight" in found
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["zero-1", "zero-2-bf16", "zero-3", "zero-3 frozen"])
def test_every_rank_keeps_and_writes_its_share_of_a_model(pair, tiny_model, tmp_path, kind):
    found = pair(share, tiny_model, kind, tmp_path)
    for each in found:
        assert each["held"] < 0.6 * each["whole"]
        # What is gathered, a copy of it, and this process's part of that in host memory.
        assert each["most"] <= each["held"] + 3 * max(20_000, each["largest"])
    assert sum(each["held"] for each in found) == found[0]["whole"]
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    expected = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    written = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    dtype = torch.bfloat16 if kind in SHORT else torch.float32
    assert all(torch.equal(written[name], value.to(dtype)) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["zero-2", "zero-3"])
def test_a_model_that_a_killed_rank_did_not_write_does_not_load(pair, tiny_model, tmp_path, kind):
    pair(cut_off, tiny_model, kind, tmp_path)
    torn = tmp_path / "model-00002-of-00002.safetensors"
    assert torn.stat().st_size
    with pytest.raises(UserError, match=r"cannot load the model|damaged"):
        load_model(RoleConfig(model=str(tmp_path), device="cpu"))
    torn.unlink()
    with pytest.raises(UserError, match=r"cannot load the model|damaged"):
        load_model(RoleConfig(model=str(tmp_path), device="cpu"))


def test_stage_3_gathers_no_more_than_a_bucket_at_a_time(pair, tiny_model):
    found, elsewhere = pair(buckets, tiny_model, "zero-3", 10_000)
    sizes = [sum(size for _, size in bucket) for bucket in found]
    largest = max(size for bucket in found for _, size in bucket)
    assert max(sizes) <= max(10_000, largest)
    assert len(sizes) > 5
    assert elsewhere == [[]] * len(found), "other ranks take part and keep nothing"
