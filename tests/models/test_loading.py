"""Models come from a directory, the hub or a GGUF file, ready for training; what cannot work is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models import locations
from rlhf_host.models.loading import configuration, host_copy, load_model, load_tokenizer, sizes
from rlhf_host.models.locations import find_model
from rlhf_host.models.passes import Passes
from rlhf_host.once import looked_up_once

from .miniatures import miniature

PROMPTS, IDS = [[5, 6, 7], [8, 9]], torch.tensor([[10, 11, 12], [13, 14, 15]])
MASK = torch.ones_like(IDS, dtype=torch.bool)


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "half"
    config = Qwen2Config(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        attention_dropout=0.3,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def role(model: Path | str | None, **settings) -> RoleConfig:
    return RoleConfig(model=None if model is None else str(model), device="cpu", **settings)


def test_a_command_reads_a_configuration_once(bfloat16_model, tmp_path, monkeypatch):
    directory, read, reads = Path(shutil.copytree(bfloat16_model, tmp_path / "model")), AutoConfig.from_pretrained, []
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *words, **options: reads.append(words) or read(*words, **options))
    with looked_up_once():
        assert sizes(role(directory)) == sizes(role(directory)) == (40, 32768)
        configuration(find_model(str(directory)), role(directory)).vocab_size = 7  # whoever asked may change theirs
        assert sizes(role(directory))[0] == 40
    assert len(reads) == 1
    file = directory / "config.json"
    file.write_text(file.read_text().replace('"vocab_size": 40', '"vocab_size": 41'))
    assert sizes(role(directory))[0] == 41
    assert len(reads) == 2


def test_trainable_weights_are_float32_and_frozen_ones_as_they_were_saved(bfloat16_model):
    trained = load_model(role(bfloat16_model), trainable=True)
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in trained.parameters())
    frozen = load_model(role(bfloat16_model))
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert load_model(role(bfloat16_model, dtype="float32")).dtype == torch.float32
    with pytest.raises(UserError, match=r"kept in float32.*train\.autocast"):
        load_model(role(bfloat16_model, dtype="bfloat16"), trainable=True)


def test_dropout_is_gone_from_the_model_but_not_from_its_config(bfloat16_model):
    model = load_model(role(bfloat16_model), trainable=True).train()
    assert model.model.layers[0].self_attn.attention_dropout == 0.0
    assert model.config.attention_dropout == 0.3


def test_a_model_that_was_saved_loads_again_as_it_was(tiny_model, tmp_path):
    model = load_model(role(tiny_model), trainable=True)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    expected = Passes(model, shared_prefix="off").forward(PROMPTS, IDS, MASK).logprobs
    model.save_pretrained(tmp_path / "saved")
    load_tokenizer(role(tiny_model)).save_pretrained(tmp_path / "saved")
    again = load_model(role(tmp_path / "saved"), trainable=True)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # The last bit of a product may depend on where its weights lie in memory.
    assert torch.allclose(Passes(again).forward(PROMPTS, IDS, MASK).logprobs, expected, rtol=0, atol=1e-6)
    assert load_tokenizer(role(tmp_path / "saved")).decode([5, 6]) == load_tokenizer(role(tiny_model)).decode([5, 6])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)


def test_gradient_checkpointing_is_for_trainable_roles(tiny_model):
    assert load_model(role(tiny_model, gradient_checkpointing=True), trainable=True).is_gradient_checkpointing
    assert not load_model(role(tiny_model, gradient_checkpointing=True)).is_gradient_checkpointing


def test_as_many_layers_are_recomputed_as_are_asked_for(tiny_model, monkeypatch):
    def recomputed(setting):
        layers = load_model(role(tiny_model, gradient_checkpointing=setting), trainable=True).model.layers
        return [layer.gradient_checkpointing for layer in layers]

    assert [recomputed(setting) for setting in (True, 2, 1, False)] == [[True] * 2, [True] * 2, [True, False], [False] * 2]
    assert recomputed("auto") == [True] * 2, "until memory has decided"
    with pytest.raises(UserError, match="3: LlamaForCausalLM has 2 layers that can be recomputed one by one; true"):
        recomputed(3)
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "rlhf-plan:plan")
    with pytest.raises(UserError, match="gradient_checkpointing auto: no package that plans memory is installed"):
        recomputed("auto")


def test_the_attention_implementation_is_a_setting(tiny_model):
    eager = load_model(role(tiny_model, attn_implementation="eager"))
    assert eager.config._attn_implementation == "eager"
    sdpa = load_model(role(tiny_model))
    torch.testing.assert_close(
        *(Passes(model, shared_prefix="off").forward(PROMPTS, IDS, MASK).logprobs for model in (eager, sdpa)),
        rtol=1e-5,
        atol=1e-5,
    )
    with pytest.raises(UserError, match="cannot load the model"):
        load_model(role(tiny_model, attn_implementation="flash_attention_2"))


def test_a_new_critic_begins_at_zero_and_survives_saving(tiny_model, tmp_path):
    critic = load_model(role(tiny_model), head="scalar", trainable=True)
    found = Passes(critic).forward(PROMPTS, IDS, MASK, outputs=frozenset({"values", "scores"}))
    assert not found.values.any()
    assert found.scores.shape == (2,)
    with torch.no_grad():
        critic.score.weight.normal_()
    expected = Passes(critic).forward(PROMPTS, IDS, MASK, outputs=frozenset({"values"})).values
    critic.save_pretrained(tmp_path / "critic")
    for trainable in (True, False):
        again = load_model(role(tmp_path / "critic"), head="scalar", trainable=trainable)
        assert torch.equal(Passes(again).forward(PROMPTS, IDS, MASK, outputs=frozenset({"values"})).values, expected)


def test_a_frozen_scalar_role_needs_a_trained_head(tiny_model, tmp_path):
    with pytest.raises(UserError, match="has no scalar head"):
        load_model(role(tiny_model), head="scalar")
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    assert load_model(role(tmp_path / "reward"), head="scalar").score.out_features == 1


def test_a_frozen_scalar_role_never_has_a_random_head(tmp_path):
    size = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(**size, num_labels=2)).save_pretrained(tmp_path / "classes")
    for trainable in (False, True):  # a trained one would be thrown away
        with pytest.raises(UserError, match="has a head with 2 outputs, and a scalar head has one"):
            load_model(role(tmp_path / "classes"), head="scalar", trainable=trainable)
    BertForSequenceClassification(BertConfig(**size, num_labels=1)).save_pretrained(tmp_path / "encoder")
    with pytest.raises(UserError, match="BertForSequenceClassification has no scalar head: give a causal model"):
        load_model(role(tmp_path / "encoder"), head="scalar")


@pytest.mark.parametrize("family", ["codegen", "rwkv", "cpmant"])
def test_configurations_without_a_padding_token_get_a_scalar_head(family, tiny_model, tmp_path):
    miniature(family).save_pretrained(tmp_path / "model")
    critic = load_model(role(tmp_path / "model", tokenizer=str(tiny_model)), head="scalar", trainable=True)
    torch.nn.init.ones_(critic.score.weight)
    critic.save_pretrained(tmp_path / "critic")
    again = load_model(role(tmp_path / "critic"), head="scalar")
    values = (Passes(model).forward(PROMPTS, IDS, MASK, outputs=frozenset({"values"})).values for model in (critic, again))
    torch.testing.assert_close(*values)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("blt", "BltForCausalLM cannot have a scalar head"),
        ("trocr", "TrOCRForCausalLM cannot have a scalar head"),
        ("ctrl", "CTRLForSequenceClassification has no scalar head"),
    ],
)
def test_families_that_cannot_have_a_scalar_head_are_refused_by_name(family, message, tmp_path):
    miniature(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        load_model(role(tmp_path), head="scalar", trainable=True)


def write_gguf(path: Path, hidden: int = 32, vocabulary: int = 40) -> numpy.ndarray:
    """A random one-layer Llama in the format of llama.cpp; returns its embedding."""
    gguf = pytest.importorskip("gguf")
    writer, random = gguf.GGUFWriter(path, "llama"), numpy.random.default_rng(0)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // 2)
    writer.add_vocab_size(vocabulary)
    square = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{name}.weight": (hidden, hidden) for name in square}
    shapes |= {name: (hidden,) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")}
    shapes |= {"token_embd.weight": (vocabulary, hidden), "output.weight": (vocabulary, hidden)}
    tensors = {name: random.standard_normal(shape, dtype=numpy.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        quantized = name.startswith("blk") and tensor.ndim == 2
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(
            name, gguf.quants.quantize(tensor, kind) if quantized else tensor, raw_dtype=kind if quantized else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors["token_embd.weight"]


def test_a_gguf_file_becomes_an_ordinary_float32_model(tiny_model, tmp_path):
    embedding = write_gguf(tmp_path / "model.gguf")
    model = load_model(role(tmp_path / "model.gguf"), trainable=True)
    assert torch.equal(model.get_input_embeddings().weight.detach(), torch.from_numpy(embedding))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path / "saved")
    again = load_model(role(tmp_path / "saved"))
    assert torch.equal(Passes(again).forward(PROMPTS, IDS, MASK).logprobs, Passes(model).forward(PROMPTS, IDS, MASK).logprobs)
    critic = load_model(role(tmp_path / "model.gguf", tokenizer=str(tiny_model)), head="scalar", trainable=True)
    assert torch.equal(critic.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    assert not critic.score.weight.any()


def test_a_gguf_file_in_16_bits_has_positions_in_32(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    model = load_model(role(tmp_path / "model.gguf", dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_a_tokenizer_without_a_pad_token_pads_with_eos(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(role(tmp_path / "model"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None


def test_a_tokenizer_may_lie_elsewhere(tiny_model, tmp_path):
    assert load_tokenizer(role(tmp_path / "nowhere", tokenizer=str(tiny_model))).eos_token == "<eos>"


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "no JSON", '{"metadata": {}}', '{"weight_map": {"a": "b"}}', '{"metadata": {}, "weight_map": {}}']
    + [f'{{"metadata": {{}}, "weight_map": {names}}}' for names in ('["a"]', '{"a": 3}', "null")],
)
def test_an_index_that_names_no_files_is_damaged(tiny_model, tmp_path, text):
    shutil.copytree(tiny_model, tmp_path / "model")
    index = tmp_path / "model/model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(UserError, match=f"^{index} is damaged: it needs 'metadata', and a 'weight_map'"):
        load_model(role(tmp_path / "model"))


def test_what_is_no_model_is_refused_with_a_way_out(tiny_model, tmp_path, monkeypatch):
    def message(name: Path | str | None) -> str:
        with pytest.raises(UserError) as caught:
            load_model(role(name))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "--actor.model" in message(None)
    assert f"did you mean '{tiny_model.name}'?" in message(tiny_model.parent / "tinny")
    assert "no such file or directory" in message(tmp_path / "x" / "y")
    assert "not a GGUF file" in message(tiny_model / "config.json")
    (tmp_path / "weights.gguf").write_bytes(b"not really")
    assert "cannot load the model" in message(tmp_path / "weights.gguf")
    assert f"give the GGUF file itself: {tmp_path / 'weights.gguf'}" in message(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in message(tmp_path / "empty")
    monkeypatch.chdir(tiny_model.parent)
    assert "did you mean 'tiny'?" in message("tinny")


def test_a_device_that_is_not_there_is_refused(tiny_model):
    with pytest.raises(UserError, match="device 'gpu' cannot be used here"):
        load_model(RoleConfig(model=str(tiny_model), device="gpu"))


def test_weights_must_be_safetensors_and_complete(tiny_model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.save(model.state_dict(), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match="only pickled weights"):
        load_model(role(copy))
    settings = json.loads((tiny_model / "config.json").read_text())
    shutil.copy(tiny_model / "model.safetensors", copy)
    (copy / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": settings["num_hidden_layers"] + 1}))
    with pytest.raises(UserError, match=r"is incomplete: no model\.layers\.2"):
        load_model(role(copy))


def test_damaged_weights_are_an_error_in_one_line(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "copy")
    weights = tmp_path / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"^cannot load the model .*copy.*: "):
        load_model(role(tmp_path / "copy"))


def test_without_a_network_a_hub_name_fails_at_once(monkeypatch):
    monkeypatch.setattr(locations, "hub_answers", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    with pytest.raises(UserError, match="not in the local cache, and the hub cannot be reached"):
        find_model("nobody/no-such-model")
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="not in the local cache, and HF_HUB_OFFLINE is set, so the hub is not asked"):
        find_model("nobody/no-such-model")
    with pytest.raises(UserError, match="not a hub name"):
        find_model("what is this")


def test_a_copy_in_host_memory_is_of_plain_tensors():
    class Local(torch.Tensor):
        """As a ``DTensor``: ``data_ptr`` of every one is 0."""

    plain = torch.ones(2)
    copy = host_copy({"a": [plain, plain], "b": torch.nn.Parameter(plain)})
    assert copy["a"][0] is copy["a"][1]
    with pytest.raises(TypeError, match="host_copy got a Local: copy its local tensor"):
        host_copy({"a": plain.as_subclass(Local)})
