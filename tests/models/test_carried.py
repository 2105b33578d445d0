"""Every weight in a base's files is a weight of the model or carried, whatever its name; configurations say what is tied."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_authoring.models import write_tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.config.schema import LoraOptions, RoleConfig
from rlhf_host.distributed.split.shards import share_writer
from rlhf_host.distributed.split.weight_reader import load_sharded
from rlhf_host.errors import UserError
from rlhf_host.models.carried import CARRIED, carried_by
from rlhf_host.models.loading import host_copy, load_model, save_model
from rlhf_host.runtimes.building import _report_weights
from tests.carriers import ODD, account, add_weights, same, weights_in, write_glm

from . import miniatures, pictured

PARTS = st.sampled_from(
    (
        *(
            "model",
            "mtp",
            "layers",
            "1",
            "2",
            "61",
            "self_attn",
            "q_proj",
            "mlp",
            "experts",
            "norm",
            "v_head",
            "summary",
            "score",
        ),
        *("vision_tower", "lm_head", "embed_tokens", "weight", "bias", "inv_freq", "rotary_emb", "language_model"),
    )
)
NAMES = st.sets(st.lists(PARTS, min_size=1, max_size=6).map(".".join), max_size=12)
ADDED = {"mtp.fc.weight": torch.ones(2, 3), "v_head.summary.bias": torch.zeros(1)}


@pytest.fixture
def base(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "base")
    add_weights(tmp_path / "base", ADDED)
    return tmp_path / "base"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(extra=NAMES, split=st.booleans(), in_pieces=st.booleans())
def test_every_name_of_the_base_is_the_model_s_or_carried(tiny_model, tmp_path_factory, extra, split, in_pieces):
    place = tmp_path_factory.mktemp("names")
    base, own = place / "base", load_file(tiny_model / "model.safetensors")
    shutil.copytree(tiny_model, base)
    added = {name: torch.full((2,), float(number)) for number, name in enumerate(sorted(extra - own.keys()))}
    # A name behind the prefix of the model, or without it, is the model's own: two of one weight cannot both be read.
    double = {name for name in added if name in own or f"model.{name}" in own or name.removeprefix("model.") in own}
    for name in double:
        del added[name]
    where = dict.fromkeys(own, "model-00001-of-00002.safetensors") | dict.fromkeys(added, "mtp.safetensors")
    if split and added:
        (base / "model.safetensors").rename(base / "model-00001-of-00002.safetensors")
        save_file(added, base / "mtp.safetensors", metadata={"format": "pt"})
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    else:
        add_weights(base, added)
    write(RoleConfig(model=str(base)), place / "saved", in_pieces)
    write(RoleConfig(model=str(place / "saved")), place / "again", in_pieces)
    expected = dict.fromkeys(own, "the model's") | dict.fromkeys(added, "carried")
    for written in (place / "saved", place / "again"):
        assert account(base, written, set(added)) == expected
        if added:
            index = json.loads((written / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == expected.keys()
            assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights_in(written).values())
        read = AutoModelForCausalLM.from_pretrained(written).state_dict()
        assert all(torch.equal(read[name], own[name]) for name in own)


def write(role, directory, in_pieces):
    if not in_pieces:
        save_model(load_model(role), directory)
        return
    pieces = load_sharded(role)
    share = {name: weight.clone() for bucket in pieces.weights() for name, weight in bucket}
    share_writer(pieces.model, directory, share, OneProcess())()


MADE = {"text": miniatures.miniature, "pictures": lambda family: pictured.pictured(family).model}


@pytest.mark.parametrize("kind", MADE)
def test_no_family_of_transformers_carries_a_weight_of_its_own(kind, tmp_path):
    families, make = (miniatures if kind == "text" else pictured).families, MADE[kind]
    outcomes = Counter()
    for family in sorted(families()):
        base, saved = tmp_path / family / "base", tmp_path / family / "saved"
        try:
            make(family).save_pretrained(base)
            own = weights_in(base)
            add_weights(base, ADDED)
            model = load_model(RoleConfig(model=str(base)))
        except Exception as error:  # what cannot be made so small, or loads in no way
            outcomes[type(error).__name__] += 1
            continue
        assert set(carried_by(model)) == set(ADDED), family
        save_model(model, saved)
        assert weights_in(saved).keys() == {*own, *ADDED}, family
        with contextlib.suppress(UserError):
            assert set(carried_by(load_model(RoleConfig(model=str(base)), head="scalar", trainable=True))) == set(ADDED), family
        outcomes["whole"] += 1
        shutil.rmtree(tmp_path / family)
    assert outcomes["whole"] > 60, outcomes


def test_two_names_of_one_weight_are_refused(base):
    add_weights(base, {"norm.weight": torch.ones(64)})
    with pytest.raises(UserError, match=r"model\.norm\.weight and norm\.weight in its files are both model\.norm\.weight"):
        load_model(RoleConfig(model=str(base)))


def test_one_name_with_two_values_is_refused(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "base")
    file, name = tmp_path / "base" / "model.safetensors", "model.norm.weight"
    own = load_file(file)
    other = file.with_name("other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(own, file.name) | {"extra": other.name}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    extra = {"extra": torch.ones(3).to(torch.float8_e4m3fn)}
    save_file(extra | {name: own[name]}, other, metadata={"format": "pt"})
    assert {*carried_by(load_model(RoleConfig(model=str(tmp_path / "base"))))} == {"extra"}
    save_file(extra | {name: own[name] + 1}, other, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"two of its files have a weight model\.norm\.weight, with different values"):
        load_model(RoleConfig(model=str(tmp_path / "base")))


def test_a_scalar_head_replaces_a_head_and_nothing_else(base, tmp_path):
    critic = load_model(RoleConfig(model=str(base)), head="scalar", trainable=True)
    assert set(carried_by(critic)) == set(ADDED)
    assert set(carried_by(load_sharded(RoleConfig(model=str(base)), head="scalar").model)) == set(ADDED)
    save_model(critic, tmp_path / "critic")
    again = load_model(RoleConfig(model=str(tmp_path / "critic")), head="scalar")
    assert set(carried_by(again)) == set(ADDED)
    assert set(carried_by(load_model(RoleConfig(model=str(base))))) == set(ADDED)
    add_weights(base, {"score.weight": torch.ones(1, critic.score.in_features)})
    assert set(carried_by(load_model(RoleConfig(model=str(base))))) == {*ADDED, "score.weight"}
    assert not carried_by(load_model(RoleConfig(model=str(base)), head="scalar")).keys() & {"score.weight", "lm_head.weight"}


def test_what_a_removed_checkpoint_carried_is_still_there(base, tmp_path):
    model = copy.deepcopy(load_model(RoleConfig(model=str(base))))
    shutil.rmtree(base)
    save_model(model, tmp_path / "saved")
    assert all(same(weights_in(tmp_path / "saved")[name], tensor) for name, tensor in ADDED.items())


def test_a_quantized_base_that_is_written_in_ordinary_types_carries_nothing_and_says_so(tmp_path, caplog):
    base = write_tiny_model(tmp_path / "base", hidden=128)
    whole = load_file(base / "model.safetensors")
    narrow = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in whole.items() if "proj" in name}
    narrow |= {
        f"{name}_scale_inv": torch.full([-(-size // 128) for size in tensor.shape], 2.0) for name, tensor in narrow.items()
    }
    add_weights(base, narrow | ADDED)
    config = json.loads((base / "config.json").read_text())
    kind = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": kind}))
    role = RoleConfig(model=str(base))
    assert load_sharded(role) is None  # it would read weights without their scales
    model = load_model(role, trainable=True)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name), 2 * narrow[name].float())
    save_model(model, tmp_path / "saved")
    saved = weights_in(tmp_path / "saved")
    assert {name: tensor.dtype for name, tensor in saved.items()} == dict.fromkeys(whole, torch.float32)
    assert torch.equal(saved[name], model.get_parameter(name))
    assert "2 quantized tensors (mtp.fc.weight ...) are not carried, because LlamaForCausalLM is written in" in caplog.text


def test_an_adapter_is_written_alone(base, tmp_path):
    pytest.importorskip("peft")
    model = load_model(RoleConfig(model=str(base), lora=LoraOptions(rank=4)), trainable=True)
    save_model(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / CARRIED).exists()
    save_model(load_model(RoleConfig(model=str(base), adapter=str(tmp_path / "adapter"))), tmp_path / "merged")
    assert account(base, tmp_path / "merged", set(ADDED)).keys() == weights_in(base).keys()


def test_experts_that_stay_frozen_and_carried_weights_are_told(tiny_model, tmp_path, caplog):
    pytest.importorskip("peft")
    base = write_glm(tmp_path / "glm")
    with caplog.at_level("WARNING"):
        _report_weights("actor", load_model(RoleConfig(model=str(base), lora=LoraOptions(rank=4)), trainable=True))
        _report_weights("critic", load_model(RoleConfig(model=str(base)), head="scalar", trainable=True))
        _report_weights("whole", load_model(RoleConfig(model=str(tiny_model)), trainable=True))
    told = [record.getMessage() for record in caplog.records if record.name == "rlhf_host.runtimes.building"]
    adapted, frozen, *carried = told
    assert adapted.startswith("actor: ")
    assert (
        frozen == "actor: its experts (98,304 weights) stay frozen: to adapt them too, set lora.targets to all-linear,experts"
    )
    names = sorted(carried_by(load_model(RoleConfig(model=str(base)))))
    assert set(ODD) < set(names)
    first = f"{len(names)} tensors ({', '.join(names[:3])}, ...)"
    rule = "has no place for: not trained, and copied unchanged into checkpoints and exports"
    assert carried == [
        f"{role}: its files have {first} that {kind} {rule}"
        for role, kind in (("actor", "Glm4MoeForCausalLM"), ("critic", "Glm4MoeForSequenceClassification"))
    ]


# --- what is tied ---------------------------------------------------------------------------------------


def ties(directory):
    return json.loads((directory / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("own_head", [True, False])
def test_a_configuration_ties_what_is_tied(tmp_path, own_head):
    base = write_tiny_model(tmp_path / "base", tied=True)
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    add_weights(base, {"lm_head.weight": embedding * 2 if own_head else embedding})
    assert ties(base)
    model = load_model(RoleConfig(model=str(base)), trainable=True)
    save_model(model, tmp_path / "saved", host_copy(model.state_dict()))
    assert ties(tmp_path / "saved") is not own_head
    assert ("lm_head.weight" in weights_in(tmp_path / "saved")) is own_head
    again = load_model(RoleConfig(model=str(tmp_path / "saved")))
    assert (again.lm_head.weight is not again.model.embed_tokens.weight) is own_head
