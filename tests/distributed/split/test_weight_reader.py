"""Models whose weights are read block by block: the same as those that are loaded whole, in less memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rlhf_host.config.schema import RoleConfig
from rlhf_host.distributed.split.weight_reader import load_sharded
from rlhf_host.errors import UserError
from rlhf_host.models import adapters
from rlhf_host.models.loading import load_model, save_model
from rlhf_host.models.passes import Passes

from ...models.miniatures import miniature

FAMILIES = [
    "llama",
    "qwen2",
    "gemma2",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "phi3",
    "falcon",
    "gemma3_text",
]
"""Tied and not, with windows and without, with experts that files have apart, with maps that files have together."""


def compared(role: RoleConfig, head: str = "lm") -> None:
    """Compares names, values, types, and what is trained."""
    whole, pieces = load_model(role, head=head, trainable=True), load_sharded(role, head=head)
    assert pieces is not None
    read = {name: tensor for bucket in pieces.weights() for name, tensor in bucket}
    found = {name: read.get(name, weight) for name, weight in pieces.model.named_parameters()}
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, weight in whole.named_parameters():
        assert torch.equal(found[name], weight), name
        own = pieces.model.get_parameter(name)
        assert (own.dtype, own.requires_grad) == (weight.dtype, weight.requires_grad), name
        assert own.is_meta == (name in read), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(pieces.model.get_buffer(name), buffer), name
    assert pieces.model.config.to_dict() == whole.config.to_dict()


@pytest.fixture
def saved(tmp_path):
    def save(family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        miniature(family).to(dtype).save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_pieces_is_the_model(saved, family):
    compared(RoleConfig(model=str(saved(family))))


@pytest.mark.parametrize("settings", [{"lora": {"rank": 4}}, {"freeze": ["*.mlp.*"]}, {"gradient_checkpointing": True}])
def test_settings_of_the_role_apply_to_pieces(tiny_model, settings):
    compared(RoleConfig(model=str(tiny_model), **settings))


def test_a_saved_adapter_is_beside_weights_in_pieces(tiny_model, tmp_path):
    model = load_model(RoleConfig(model=str(tiny_model), lora={"rank": 4}), trainable=True)
    for weight in adapters.adapter_weights(model).values():
        weight.data.normal_(generator=torch.Generator().manual_seed(0))
    save_model(model, tmp_path / "adapter")
    compared(RoleConfig(model=str(tiny_model), adapter=str(tmp_path / "adapter")))


def test_a_critic_has_a_new_head_or_that_of_its_files(tiny_model, tmp_path):
    compared(RoleConfig(model=str(tiny_model)), "scalar")
    critic = load_model(RoleConfig(model=str(tiny_model)), head="scalar", trainable=True)
    critic.score.weight.data.fill_(0.5)
    save_model(critic, tmp_path / "critic")
    compared(RoleConfig(model=str(tmp_path / "critic")), "scalar")


def test_weights_in_several_files_are_found(tiny_model, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path / "split", max_shard_size="40kB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    compared(RoleConfig(model=str(tmp_path / "split")))


def test_one_block_is_in_memory_at_a_time(tiny_model):
    pieces = load_sharded(RoleConfig(model=str(tiny_model)))
    names = [{name for name, _ in bucket} for bucket in pieces.weights()]
    assert sum(map(len, names)) == len(set().union(*names))
    blocks = [{name.split(".")[2] for name in bucket if ".layers." in name} for bucket in names]
    assert max(map(len, blocks)) == 1


def test_a_probe_has_every_kind_of_layer_once(saved):
    directory = saved("llama")
    config = transformers.AutoConfig.from_pretrained(directory)
    config.num_hidden_layers = 6
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    probe = load_sharded(RoleConfig(model=str(directory))).probe
    assert len(probe.model.layers) == 1
    assert all(weight.isfinite().all() and weight.unique().numel() > 1 for weight in probe.parameters())
    windows = miniature("gemma3_text")  # of two kinds
    windows.save_pretrained(directory.parent / "windows")
    assert len(load_sharded(RoleConfig(model=str(directory.parent / "windows"))).probe.model.layers) == 2


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_is_found_out_of_a_probe_holds_for_the_model(saved, family):
    role = RoleConfig(model=str(saved(family)), attn_implementation="sdpa" if family == "llama" else "auto")
    pieces, whole = load_sharded(role), load_model(role, trainable=True)
    found, expected = Passes(pieces.model, probe=pieces.probe), Passes(whole)
    assert (found.head.reads_logits, found.exact, found.device) == (expected.head.reads_logits, expected.exact, expected.device)
    own, other = found.head._head, expected.head._head
    assert (own.scale, own.softcap) == (other.scale, other.softcap)
    assert own.linear is pieces.model.get_output_embeddings()
    of_probe, of_whole = found._gathered[pieces.model], expected._gathered[whole]
    assert of_probe.share == pytest.approx(of_whole.share, rel=0.1), "fewer layers beside the same last norm"
    assert of_probe.layers == of_whole.layers == whole.config.num_hidden_layers
    assert found.model_flops == expected.model_flops


def test_what_can_only_be_loaded_whole_is(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "renamed")
    (tmp_path / "renamed/model.safetensors").rename(tmp_path / "renamed/weights.safetensors")
    assert load_sharded(RoleConfig(model=str(tmp_path / "renamed"))) is None


def damaged(directory: Path, change) -> RoleConfig:
    file = directory / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})
    return RoleConfig(model=str(directory))


def test_a_missing_weight_and_one_of_another_shape_are_refused(saved):
    role = damaged(saved("llama"), lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"is incomplete: no model\.layers\.1\.mlp\.up_proj\.weight \(and 0 more\)"):
        list(load_sharded(role).weights())

    def cut(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"][:3].clone()

    role = damaged(saved("qwen2"), cut)
    with pytest.raises(UserError, match=r"has model\.norm\.weight of \[3\], not of \[32\]"):
        list(load_sharded(role).weights())


def test_a_tied_weight_that_files_have_twice_is_loaded_whole(tmp_path):
    miniature("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    compared(RoleConfig(model=str(tmp_path / "tied")))

    def double(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    assert load_sharded(damaged(tmp_path / "tied", double)) is None


def test_layers_that_settings_name_need_not_be_in_the_probe(saved):
    directory = saved("llama")
    config = transformers.AutoConfig.from_pretrained(directory)
    config.num_hidden_layers = 3
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    compared(RoleConfig(model=str(directory), train_only=["model.layers.2.*"]))
    compared(RoleConfig(model=str(directory), lora={"rank": 2, "targets": ["model.layers.2.mlp.up_proj"]}))


def test_a_frozen_model_whose_adapter_is_merged_is_loaded_whole(tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    settings = RoleConfig(model=str(tiny_model), adapter=str(tmp_path), device="cpu")
    assert load_sharded(settings, trainable=False) is None
    assert load_sharded(settings) is not None


def test_a_frozen_model_has_its_head_in_the_files(tiny_model):
    with pytest.raises(UserError, match="head"):
        load_sharded(RoleConfig(model=str(tiny_model), device="cpu"), head="scalar", trainable=False)
