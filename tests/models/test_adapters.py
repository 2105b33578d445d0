"""Adapters inside a model and on disk: off is the base bit for bit, merged is the same function, peft reads what is written."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_host.backends.weights import named_weights
from rlhf_host.config.schema import LoraOptions, RoleConfig
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.errors import UserError
from rlhf_host.functional import twin
from rlhf_host.models.adapter_files import load_adapter, refuse_other_base
from rlhf_host.models.adapters import adapter_layers, adapter_weights, attach, merged_weights, using
from rlhf_host.models.loading import load_model, load_tokenizer, save_model, weight_files
from rlhf_host.models.passes import Passes

from .miniatures import miniature

peft = pytest.importorskip("peft")

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9]]
IDS = torch.tensor([[10, 11, 12], [13, 14, 15], [16, 17, 0]])
MASK = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])


def lora(model, rank=4, **settings) -> RoleConfig:
    return RoleConfig(model=str(model), lora=LoraOptions(rank=rank, **settings))


def learn(model, size=0.1):
    """Adapters as if they had been trained."""
    draw = torch.Generator().manual_seed(5)
    for _, layer in adapter_layers(model):
        layer.lora_B["trained"].weight.data.normal_(0, size, generator=draw)
    if hasattr(model, "score"):
        model.score.weight.data.normal_(0, 1, generator=draw)


def logprobs(model):
    with torch.no_grad():
        return Passes(model).forward(PROMPTS, IDS, MASK).logprobs


@pytest.fixture
def trained(tiny_model):
    model = load_model(lora(tiny_model), trainable=True)
    learn(model)
    return model


def test_new_adapters_change_nothing_and_only_they_are_trained(tiny_model):
    model = load_model(lora(tiny_model), trainable=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(logprobs(model), logprobs(load_model(RoleConfig(model=str(tiny_model)))))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of seven maps in two layers
    assert all(".lora_A.trained." in name or ".lora_B.trained." in name for name in trained)
    assert {layer.scaling["trained"] for _, layer in adapter_layers(model)} == {2.0}
    others = adapter_weights(load_model(lora(tiny_model), trainable=True))
    assert all(torch.equal(tensor, others[name]) for name, tensor in adapter_weights(model).items())  # in any process


def test_off_is_the_base_bit_for_bit_and_on_again_is_as_before(trained, tiny_model):
    passes, base = Passes(trained), logprobs(load_model(RoleConfig(model=str(tiny_model))))
    with torch.no_grad():
        on = passes.forward(PROMPTS, IDS, MASK).logprobs
        off = passes.under(None).forward(PROMPTS, IDS, MASK).logprobs
        again = passes.forward(PROMPTS, IDS, MASK).logprobs
    assert torch.equal(off, base)
    assert torch.equal(again, on)
    assert (on - off).abs().max() > 1e-2
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in trained.named_parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_merged_weights_are_the_same_function(trained, tiny_model, dtype, tolerance):
    trained.to(dtype)
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).eval()
    merged = dict(named_weights(trained))
    assert merged.keys() == whole.state_dict().keys()
    assert {tensor.dtype for tensor in merged.values()} == {dtype}
    whole.load_state_dict(merged)
    ids = torch.tensor([[5, 6, 7, 10, 11, 12]])
    with torch.no_grad():
        expected, logits = trained(ids).logits, whole(ids).logits
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())  # nothing merged in place


def test_weights_are_merged_one_by_one_as_they_are_asked_for(trained, monkeypatch):
    from rlhf_host.models import adapters

    done = []
    plain = adapters.merged
    monkeypatch.setattr(adapters, "merged", lambda layer: done.append(layer) or plain(layer))
    weights = merged_weights(trained, [(name, tensor) for name, tensor in trained.state_dict().items()])
    names = [next(weights)[0] for _ in range(3)]
    assert names[0] == "model.embed_tokens.weight"
    assert len(done) == 2


def test_what_is_written_is_read_by_peft_and_by_load_model(trained, tiny_model, tmp_path):
    save_model(trained, tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    ids = torch.tensor([[5, 6, 7, 10, 11, 12]])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    direct = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = trained(ids).logits
        assert torch.equal(theirs(ids).logits, expected)
        assert torch.equal(direct(ids).logits, expected)
        frozen = load_model(RoleConfig(model=str(tmp_path / "adapter"), dtype="float32"))
        assert not hasattr(frozen, "peft_config")
        assert (frozen(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    role = RoleConfig(model=str(tmp_path / "adapter"))
    assert load_tokenizer(role).vocab_size == load_tokenizer(RoleConfig(model=str(tiny_model))).vocab_size
    on = load_model(role, trainable=True)  # continues
    assert all(torch.equal(tensor, adapter_weights(trained)[name]) for name, tensor in adapter_weights(on).items())


def test_a_scalar_head_is_trained_whole_and_saved_with_the_adapter(tiny_model, tmp_path):
    model = load_model(lora(tiny_model), head="scalar", trainable=True)
    assert model.score.weight.requires_grad
    learn(model)
    save_model(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["modules_to_save"] == ["score"]
    ids = torch.tensor([[5, 6, 7, 10, 11, 12]])
    with torch.no_grad():
        expected = model(ids).logits
        base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert torch.equal(theirs(ids).logits, expected)
        frozen = load_model(RoleConfig(model=str(tmp_path / "adapter"), dtype="float32"), head="scalar")
        assert torch.allclose(frozen(ids).logits, expected, rtol=1e-5)


def test_a_base_in_16_bits_stays_so_and_its_adapters_are_in_32(tiny_model, tmp_path):
    role = lora(tiny_model).model_copy(update={"dtype": "bfloat16"})
    model = load_model(role, trainable=True)
    learn(model)
    types = {weight.dtype for weight in adapter_weights(model).values()}
    assert (model.lm_head.weight.dtype, types) == (torch.bfloat16, {torch.float32})
    assert {tensor.dtype for _, tensor in named_weights(model)} == {torch.bfloat16}
    assert torch.isfinite(logprobs(model)).all()
    with pytest.raises(UserError, match="trainable weights are kept in float32"):
        load_model(RoleConfig(model=str(tiny_model), dtype="bfloat16"), trainable=True)


def test_a_frozen_copy_stands_beside_the_trained_adapter(trained, tmp_path):
    save_model(trained, tmp_path / "start")
    before = logprobs(trained)
    load_adapter(trained, tmp_path / "start", "of_reference")
    learn(trained, 0.3)
    passes = Passes(trained)
    with torch.no_grad():
        assert torch.equal(passes.under("of_reference").forward(PROMPTS, IDS, MASK).logprobs, before)
        assert (passes.forward(PROMPTS, IDS, MASK).logprobs - before).abs().max() > 1e-2
    assert not any(weight.requires_grad for name, weight in trained.named_parameters() if "of_reference" in name)
    assert not any("of_reference" in name for name in adapter_weights(trained))
    assert not any("lora" in name for name, _ in named_weights(trained))


def test_what_adapters_cost(tmp_path):
    """Rank 2 over a model of 0.6M parameters; with AdamW's two moments, gradients and fp32 weights all as large."""
    write_tiny_model(tmp_path, hidden=128, layers=4)
    model = load_model(lora(tmp_path, rank=2), trainable=True)
    size = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert trained / (size - trained) < 0.05


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_head"], "lm_head is the head, whose weight is used in pieces"),
        (["q_prj"], "has no linear map 'q_prj'; did you mean 'q_proj'"),
        (["embed_tokens"], "has no linear map 'embed_tokens'; it has"),
        (["all-linear", "q_prj"], "has no linear map 'q_prj'; did you mean 'q_proj'"),
        (["all-linear", "experts"], "LlamaForCausalLM has no linear map 'experts'; it has"),
    ],
)
def test_targets_that_cannot_be(tiny_model, targets, message):
    with pytest.raises(UserError, match=message):
        load_model(lora(tiny_model, targets=targets), trainable=True)


def test_targets_by_name(tiny_model):
    model = load_model(lora(tiny_model, targets=["q_proj", "layers.1.mlp.up_proj"]), trainable=True)
    names = {name for name, _ in adapter_layers(model)}
    assert names == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("gpt2", ()),  # Conv1D
        ("falcon", ()),  # a subclass of Linear that computes the same
        ("llama4_text", ("router",)),  # one that does not
        ("mixtral", ("experts",)),
        ("deepseek_v3", ("mlp.experts.",)),  # beside layers with names that experts had
        ("jamba", ("dt_proj",)),  # whose weight is read
        ("zamba", ("shared_transf",)),  # one module in several places
        ("bart", ("encoder_attn",)),  # never called
        ("gemma3", ("vision_tower",)),
    ],
)
def test_all_linear_of_a_family_is_what_can_be_trained_and_merged(family, without):
    model, whole = (miniature(family).float().eval() for _ in range(2))
    attach(model, LoraOptions(rank=2), "base")
    learn(model)
    layers = adapter_layers(model)
    assert len(layers) >= 4
    assert not [name for name, _ in layers for part in without if part in name]
    ids = torch.tensor([[5, 6, 7, 10, 11, 12, 9, 8]])
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().sum().backward()
    assert all(layer.lora_B["trained"].weight.grad is not None for _, layer in layers)
    whole.load_state_dict(dict(named_weights(model)))
    with torch.no_grad():
        gap = (whole(input_ids=ids, use_cache=False).logits - logits).abs().max()
    assert gap <= 1e-4 * logits.abs().max()


def test_what_peft_cannot_adapt_is_named():
    with pytest.raises(
        UserError, match=r"MambaForCausalLM cannot have adapters at in_proj, out_proj, x_proj.*--actor.lora.targets"
    ):
        attach(miniature("mamba"), LoraOptions(rank=2), "base")


def edit(directory, **changes):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "of the kind IA3, and only LORA"),
        ({"use_dora": True}, "uses use_dora, which is not supported"),
        ({"modules_to_save": ["embed_tokens"]}, "uses modules_to_save embed_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa, which changes the base"),
        ({"r": "x"}, 'adapter_config.json: r must be a rank of 1 or more, not "x"'),
        ({"r": 0}, "r must be a rank of 1 or more, not 0"),
        ({"lora_alpha": None}, "lora_alpha must be a number other than 0, not null"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object, not .1."),
        ({"modules_to_save": 5}, "modules_to_save must be a list, not 5"),
        ({"r": 8}, "is for another model: .*lora_A.weight is .4, 32. in the adapter and .8, 32. here"),
        ({"base_model_name_or_path": None}, "does not name its base model"),
        ({"base_model_name_or_path": "/no/such/model"}, "no model at /no/such/model.*is an adapter for it: give both"),
    ],
)
def test_adapters_that_cannot_be_used(trained, tmp_path, changes, message):
    save_model(trained, tmp_path / "adapter")
    edit(tmp_path / "adapter", **changes)
    with pytest.raises(UserError, match=message):
        load_model(RoleConfig(model=str(tmp_path / "adapter")), trainable=True)


def test_a_reward_model_s_adapter_of_peft_is_read(tiny_model, tmp_path):
    """peft writes that it saved two modules, of which this family has one."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    other = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["q_proj"]))
    for name, weight in other.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(weight, std=0.1)
    other.save_pretrained(tmp_path)
    assert "classifier" in json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"]
    own = load_model(RoleConfig(model=str(tmp_path)), head="scalar")
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 10, 11, 12]])
        torch.testing.assert_close(own(ids).logits, other.eval()(ids).logits, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_a_larger_model(trained, tmp_path):
    save_model(trained, tmp_path / "adapter")
    small = write_tiny_model(tmp_path / "small", layers=1)
    with pytest.raises(UserError, match=r"which has no model\.layers\.1\.mlp\.down_proj"):
        load_model(RoleConfig(model=str(small), adapter=str(tmp_path / "adapter")), trainable=True)


def test_dropout_of_an_adapter_is_left_out(trained, tmp_path):
    save_model(trained, tmp_path / "adapter")
    edit(tmp_path / "adapter", lora_dropout=0.5)
    again = load_model(RoleConfig(model=str(tmp_path / "adapter")), trainable=True)
    assert torch.equal(logprobs(again), logprobs(trained))


def test_another_base_is_noticed_by_its_content(trained, tiny_model, tmp_path):
    save_model(trained, tmp_path / "adapter")
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model, moved)
    refuse_other_base(tmp_path / "adapter", str(moved), weight_files(RoleConfig(model=str(moved))))
    other = write_tiny_model(tmp_path / "other", seed=3)
    with pytest.raises(UserError, match=f"was trained on other weights than those of {other}"):
        refuse_other_base(tmp_path / "adapter", str(other), weight_files(RoleConfig(model=str(other))))


def test_without_peft_the_extra_is_named(tiny_model, monkeypatch):
    from rlhf_host.plugins import libraries

    monkeypatch.setattr(libraries, "_is_there", lambda name: name != "peft")
    with pytest.raises(UserError, match=r"LoRA adapters need peft: pip install 'rlhf-host\[peft\]'"):
        load_model(lora(tiny_model), trainable=True)


def test_rslora_scales_by_the_root_of_the_rank(tiny_model):
    model = load_model(lora(tiny_model, rank=4, alpha=4, rslora=True, init="gaussian"), trainable=True)
    assert {layer.scaling["trained"] for _, layer in adapter_layers(model)} == {2.0}


def test_using_ends_with_the_trained_adapter_after_an_error(trained):
    before = logprobs(trained)
    with pytest.raises(RuntimeError, match="inside"), using(None, trained):
        raise RuntimeError("inside")
    assert torch.equal(logprobs(trained), before)


class Twins(PlainKernels):
    """Kernels that compute by copies of the modules, as all do."""

    def module(self, model, use):
        return twin(model)


def test_the_base_is_that_of_the_twin_too(tiny_model):
    """The twin is checked while the adapter is new, and so changes nothing."""
    model = load_model(lora(tiny_model), trainable=True)
    before, passes = logprobs(model), Passes(model, kernels=Twins())
    base = passes.under(None)
    with torch.no_grad():
        for each in (passes, base):
            assert torch.equal(each.forward(PROMPTS, IDS, MASK).logprobs, before)
        learn(model)
        assert base._verdict.padded is base.compute is not model
        assert torch.equal(base.forward(PROMPTS, IDS, MASK).logprobs, before)
        assert not torch.equal(passes.forward(PROMPTS, IDS, MASK).logprobs, before)


def test_attach_needs_no_file(tiny_model):
    model = load_model(RoleConfig(model=str(tiny_model)))
    attach(model, LoraOptions(rank=2), "somewhere")
    assert model.peft_config["trained"].base_model_name_or_path == "somewhere"
