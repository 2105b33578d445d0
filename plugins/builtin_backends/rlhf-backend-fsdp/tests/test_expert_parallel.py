"""Experts that are split over ranks: gradients, steps, what is saved and synced are those of one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring import write_tiny_model
from rlhf_backend_fsdp import FSDP
from transformers import AutoConfig, AutoModelForCausalLM, DbrxConfig, DbrxForCausalLM

from rlhf_host import Needs, RoleNeed, UserError
from rlhf_host.settings import RoleConfig

WAYS = {
    "two": (2, {"expert_parallel": 2}),
    "four": (4, {"expert_parallel": 4}),
    "pieces": (4, {"expert_parallel": 2}),
    "copies": (4, {"expert_parallel": 2, "shard": 2}),
}
PARTS = ["whole", "frozen", "lora", "recomputed"]


def largest(found, expected):
    """The largest difference of a gradient, relative to the largest number of it, over all weights."""
    assert found.keys() == expected.keys()
    gaps = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    return max(
        gap / max(float(expected[name].abs().max()), 1e-9) for name, gap in gaps.items()
    )  # some are 0: of A beside a B of 0


def check_close(found, expected, before, bound=1e-3):
    assert found.keys() == expected.keys()

    def apart(one, other):
        return torch.cat([(one[name] - value).double().flatten() for name, value in other.items()]).norm()

    assert float(apart(found, expected) / apart(expected, before)) < bound


@pytest.fixture(scope="module")
def alone(group, experts):
    """Gradients of one process that holds everything, by what is trained."""
    return {what: group(1)("gradients", experts, kind="torch", what=what)[0]["gradients"] for what in PARTS}


@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(group, experts, alone, way, what):
    size, named = WAYS[way]
    for each in group(size)("gradients", experts, what=what, **named):
        gap = largest(each["gradients"], alone[what])
        print(f"{way}, {what}: {gap:.1e}")
        assert gap < 1e-5
        # Out and back, forward and backward, in each of two layers and every pass. A frozen one has no backward pass, and one that
        # is computed again goes out and back a third time.
        assert each["exchanges"] % {"frozen": 6, "recomputed": 10}.get(what, 8) == 0 < each["exchanges"]


@pytest.mark.parametrize("what", ["whole", "recomputed"])
def test_replayed_experts_are_computed_where_they_are(group, experts, alone, what):
    pytest.importorskip("rlhf_plugin_experts", reason="needs rlhf-plugin-experts")
    expected = group(1)("gradients", experts, kind="torch", what=what, replay=True)[0]["gradients"]
    assert largest(expected, alone[what]) > 0.1, "other experts have other gradients"
    for size, named in WAYS.values():
        for each in group(size)("gradients", experts, what=what, replay=True, **named):
            assert largest(each["gradients"], expected) < 1e-5


def test_the_loss_of_routers_is_that_of_whole_experts(group, experts, alone):
    expected = group(2)("gradients", experts, what="balanced")[0]["gradients"]
    assert largest(expected, alone["whole"]) > 1e-3
    for each in group(2)("gradients", experts, what="balanced", expert_parallel=2):
        assert largest(each["gradients"], expected) < 1e-5


def test_a_rank_without_rows_computes_the_tokens_of_others(group, experts, alone):
    for each in group(2)("gradients", experts, rows=[list(range(8)), []], expert_parallel=2):
        assert largest(each["gradients"], alone["whole"]) < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_one_process(group, experts, way):
    size, named = WAYS[way]
    expected = group(1)("steps", {"actor": experts}, 5, kind="torch")[0]
    found = group(size)("steps", {"actor": experts}, 5, **named)[0]
    check_close(found["weights"], expected["weights"], expected["before"])


@pytest.mark.parametrize("named", [{"offload": "cpu"}, {"pieces": True}, {"pieces": True, "shard": 2}], ids=str)
def test_experts_in_host_memory_or_read_in_pieces_step_the_same(group, experts, named):
    size = 4 if "shard" in named else 2
    expected = group(size)("steps", {"actor": experts}, 2, expert_parallel=2)[0]
    found = group(size)("steps", {"actor": experts}, 2, expert_parallel=2, **named)[0]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6)


def test_in_16_bits_experts_step_as_without(group, experts):
    expected = group(2)("steps", {"actor": experts}, 3, precision="bf16")[0]
    found = group(2)("steps", {"actor": experts}, 3, precision="bf16", expert_parallel=2)[0]
    check_close(found["weights"], expected["weights"], expected["before"], 0.1)


def test_a_model_that_is_not_trained_says_the_same(group, experts):
    rows = [[0, 1, 2, 3, 4, 6], [5, 7]]
    for pieces in (False, True):
        for each in group(2)("frozen", experts, rows, "lm", "float32", pieces, expert_parallel=2):
            whole, split = each["said"]
            assert torch.allclose(whole, split, atol=1e-5)
            assert each["held"][1] / each["held"][0] == pytest.approx(0.5, abs=0.05)


def test_adapters_of_experts_step_as_torch_does_and_are_taken_up(group, experts, tmp_path):
    before = group(1)("steps", {"actor": experts}, 0, kind="torch", what="adapted")[0]["weights"]
    expected = group(1)("steps", {"actor": experts}, 3, kind="torch", what="adapted")[0]["weights"]
    whole = group(2)("live", {"actor": experts}, tmp_path, what="adapted")[0]
    check_close(whole["weights"], expected, before)
    moved = "actor.model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(whole["weights"][moved], before[moved])
    loaded = group(1)("loaded_adapter", experts, tmp_path / "actor-model")[0]
    assert all(torch.allclose(loaded[name], value, atol=1e-6) for name, value in whole["saved"].items())
    said = group(2)("refusal", {"actor": experts}, what="adapted", expert_parallel=2)[0]
    assert "Qwen3MoeForCausalLM: experts with adapters of their own cannot be split" in said


# --- what leaves the ranks ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def life(group, experts, tmp_path_factory):
    """Four ranks' updates, and the directory of what they saved after the second one."""
    directory = tmp_path_factory.mktemp("life")
    return group(4)("live", {"actor": experts}, directory, expert_parallel=2)[0], directory


def test_a_checkpoint_holds_whole_experts_for_any_number_of_ranks(group, life):
    whole, directory = life
    assert not torch.equal(*(whole[key]["actor.model.layers.0.mlp.experts.down_proj"] for key in ("saved", "weights")))
    for size, named in (
        (4, {"expert_parallel": 2}),
        (4, {"expert_parallel": 4}),
        (2, {"expert_parallel": 2}),
        (2, {}),
        (1, {}),
    ):
        found = group(size)("go_on", ["actor"], directory, **named)[0]
        check_close(found, whole["weights"], whole["saved"])


def test_whole_experts_are_split_when_a_run_is_taken_up(group, experts, tmp_path):
    whole = group(2)("live", {"actor": experts}, tmp_path)[0]
    found = group(4)("go_on", ["actor"], tmp_path, expert_parallel=4)[0]
    check_close(found, whole["weights"], whole["saved"])


def test_the_models_files_have_all_experts(life, experts):
    whole, directory = life
    saved = AutoModelForCausalLM.from_pretrained(directory / "actor-model").state_dict()
    first = AutoModelForCausalLM.from_pretrained(experts).state_dict()
    assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in first.items()}
    assert all(torch.equal(value, whole["saved"][f"actor.{name}"]) for name, value in saved.items())
    assert AutoConfig.from_pretrained(directory / "actor-model").num_experts == 4
    files = sorted((directory / "actor-model").glob("model-*.safetensors"))
    assert len(files) == 4


def test_a_process_holds_its_experts_alone(group, experts):
    for size, named in WAYS.values():
        found = group(size)("pieces", {"actor": experts}, 10_000, True, **named)
        share = 1 / (named.get("shard") or size)
        for each in found:
            assert each["held"] / each["whole"] == pytest.approx(share, abs=0.02)
            assert each["averages"] == 2 * each["held"]
        # Buckets for engines have whole weights, and the same on every rank.
        assert found[0]["buckets"] == group(1)("pieces", {"actor": experts}, 10_000, True)[0]["buckets"]


# --- refusals -------------------------------------------------------------------------------------


def checked(count, path, name="actor"):
    needs = Needs(data="prompts", roles=(RoleNeed(name, trainable=True, source=None),))
    begin = SimpleNamespace(needs=needs, roles={name: RoleConfig(model=str(path), device="cpu")})
    FSDP(FSDP.Options(expert_parallel=count)).check(begin, {})


def test_numbers_that_do_not_come_out_even_are_refused(group, experts):
    with pytest.raises(
        UserError, match=r"expert_parallel 3 does not divide the 4 experts of Qwen3MoeForCausalLM \(model.layers"
    ):
        checked(3, experts)
    checked(2, experts)
    said = group(2)("refusal", {"actor": experts}, expert_parallel=4)
    assert said == ["backend.expert_parallel 4 does not divide the 2 ranks that split a copy of the weights"] * 2
    said = group(2)("refusal", {"actor": experts}, expert_parallel=2, shard=1)
    assert said == ["backend.expert_parallel 2 does not divide the 1 ranks that split a copy of the weights"] * 2


def test_models_without_experts_or_with_unknown_ones_are_refused(group, model, tmp_path):
    with pytest.raises(UserError, match=r"splits experts, and no model of this run has any \(actor\): leave it out"):
        checked(2, model)
    path = write_tiny_model(tmp_path / "dbrx")
    config = DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=58, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    DbrxForCausalLM(config).save_pretrained(path)
    with pytest.raises(UserError, match=r"DbrxForCausalLM has experts, but not by transformers' interface for them"):
        checked(2, path)
    assert "DbrxForCausalLM has experts" in group(2)("refusal", {"actor": path}, expert_parallel=2)[0]
