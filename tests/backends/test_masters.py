"""Weights in 16 bits to compute with: what is rounded, what has a master, and what others get of both."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring.contracts.reinforce import NEEDS, Reinforce, actor, batch, manager_of
from rlhf_authoring.models import write_tiny_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, OpenAIGPTConfig, Qwen2Config

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch import Torch
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.engines.embedded import EmbeddedEngine
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.transformers import Transformers
from rlhf_host.models.adapters import adapter_layers, has_adapters
from rlhf_host.models.dtypes import master_of
from rlhf_host.models.loading import load_model, load_tokenizer, save_model
from rlhf_host.models.masters import narrow
from rlhf_host.protocols import NO_WEIGHTS, EngineStart
from rlhf_host.runtimes.compute import Inline
from rlhf_host.training.role import Role, rows_of
from rlhf_host.training.soft_updates import follow
from rlhf_host.training.worker import Worker

NARROW, WIDE = torch.bfloat16, torch.float32
IN_16_BITS = TrainConfig(autocast="bfloat16")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose weights have more digits than bfloat16."""
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def rounded_path(path, tmp_path_factory):
    """The same model with weights that bfloat16 holds exactly, in files of float32."""
    directory = tmp_path_factory.mktemp("rounded")
    model = load_model(RoleConfig(model=path))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(NARROW))
    save_model(model, directory)
    load_tokenizer(RoleConfig(model=path)).save_pretrained(directory)
    return str(directory)


class Trained:
    """A role that the backend ``torch`` trains, in the hands of the worker."""

    def __init__(self, train=IN_16_BITS, head="lm", optimizer="AdamW", **settings):
        self.settings = actor(device="cpu", **settings)
        self.model = load_model(self.settings, head=head, trainable=True)
        plugin = Torch(Torch.Options(optimizer=optimizer))
        more = {"settings": self.settings, "total_updates": 20, "ranks": OneProcess()}
        self.role = Role.of("actor", self.model, train, backend=plugin, **more)
        self.backend = self.role.backend
        self.worker = Worker({"actor": self.role}, manager_of(algo=Reinforce()), train, NEEDS, OneProcess())

    def update(self, times=1):
        for _ in range(times):
            result = self.worker.update(batch()).metrics.result()
        return result["loss"]

    @property
    def sent(self):
        return {name: weight.clone() for bucket in self.backend.weights(2**20) for name, weight in bucket}


def frozen(path, train=IN_16_BITS, **more):
    return Role.of("reference", load_model(RoleConfig(model=path, device="cpu")), train, **more)


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_passes_compute_with_weights_in_16_bits_that_are_the_masters_rounded(path):
    trained = Trained(model=path)
    assert trained.role.passes.autocast is None
    assert trained.backend.exact is False
    for _ in range(2):
        for weight in trained.model.parameters():
            assert (weight.dtype, weight.master.dtype) == (NARROW, WIDE)
            assert torch.equal(weight, weight.master.to(NARROW))
        trained.update()
    assert {weight.dtype for weight in trained.sent.values()} == {WIDE}


def test_a_run_in_32_bits_has_no_master(path):
    trained = Trained(TrainConfig(autocast="off"), model=path)
    trained.update()
    assert all(weight.dtype == WIDE and master_of(weight) is weight for weight in trained.model.parameters())
    assert trained.backend.exact is True


def test_it_learns_as_in_32_bits(path):
    losses = {"off": [], "bfloat16": []}
    for autocast, own in losses.items():
        trained = Trained(TrainConfig(autocast=autocast, max_tokens_per_microbatch=64), model=path, lr=1e-3)
        own += [trained.update() for _ in range(8)]
    gaps = [abs(one - two) for one, two in zip(*losses.values(), strict=True)]
    assert sum(gaps) / len(gaps) < 5e-3
    assert losses["off"][0] - losses["off"][-1] > 0.3


class Casts(TorchDispatchMode):
    """Counts casts of matrices and of what is larger from 32 to 16 bits, as autocast makes them of weights and inputs."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].dtype == WIDE and result.dtype == NARROW:
            self.count += 1
        return result


def test_no_weight_is_cast_in_a_pass(path):
    def casts(passes):
        with Casts() as seen, torch.no_grad():
            passes.forward(**rows_of(batch()))
        return seen.count

    layers, before = 2, Role.of("actor", load_model(actor(model=path), trainable=True), IN_16_BITS, rounds="no").passes
    before.prepare(64)
    after = Trained(model=path).role.passes
    after.prepare(64)
    # Of each layer two norms; the last norm; the two tables of positions.
    assert casts(after) <= 2 * layers + 3 < casts(before) / 3


def test_what_is_written_has_the_values_and_types_of_the_masters(path, tmp_path):
    trained, other = Trained(model=path), load_model(RoleConfig(model=path))
    trained.backend.save_model(tmp_path / "first")()
    save_model(other, tmp_path / "before")
    files = sorted(file.name for file in (tmp_path / "before").iterdir())
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == files
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "before" / name).read_bytes(), name
    trained.update(3)
    trained.backend.save_model(tmp_path / "trained")()
    assert json.loads((tmp_path / "trained/config.json").read_text())["dtype"] == "float32"
    saved = load_file(tmp_path / "trained/model.safetensors")
    assert all(torch.equal(saved[name], weight.master) for name, weight in trained.model.named_parameters() if name in saved)


def test_a_resumed_role_goes_on_bit_for_bit(path, tmp_path):
    whole = Trained(model=path)
    whole.update(2)
    whole.backend.save(tmp_path)()
    whole.backend.save_model(tmp_path / "model")()
    state = torch.load(tmp_path / "optimizer.pt")["optimizer"]["state"]
    assert {value.dtype for one in state.values() for value in one.values()} == {WIDE}
    resumed = Trained(model=str(tmp_path / "model"))
    resumed.backend.load(tmp_path)
    resumed.worker._made = whole.worker._made
    assert same(resumed.sent, whole.sent)
    assert resumed.update(2) == whole.update(2)
    assert same(resumed.sent, whole.sent)


@pytest.mark.parametrize("exact", [False, True])
def test_frozen_weights_are_written_as_they_were_read(path, rounded_path, tmp_path, exact):
    """One that bfloat16 holds has no master, and one that it rounds has."""
    start = rounded_path if exact else path
    trained = Trained(model=start, train_only=["*mlp*"])
    read = load_file(f"{start}/model.safetensors")
    trained.update(2)
    trained.backend.save_model(tmp_path / "model")()
    saved = load_file(tmp_path / "model/model.safetensors")
    for name, weight in trained.model.named_parameters():
        assert weight.dtype == NARROW
        assert saved[name].dtype == WIDE
        assert torch.equal(saved[name], read[name]) is ("mlp" not in name)
        norm = "norm" in name  # of ones
        assert (master_of(weight) is weight) is ((exact or norm) and "mlp" not in name), name


def test_tied_weights_have_one_master(tmp_path):
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    trained = Trained(model=str(tmp_path / "tied"))
    trained.update(2)
    model = trained.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len({id(each) for each in trained.backend.parameters}) == len(list(model.parameters()))
    sent = trained.sent
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])
    trained.backend.save_model(tmp_path / "again")()
    assert "lm_head.weight" not in load_file(tmp_path / "again/model.safetensors")


def test_a_scalar_head_stays_in_32_bits(path):
    critic = Trained(model=path, head="scalar")
    head = critic.model.score.weight
    assert (head.dtype, master_of(head) is head) == (WIDE, True)
    assert {weight.dtype for name, weight in critic.model.named_parameters() if name != "score.weight"} == {NARROW}
    values = critic.role.passes.forward(**rows_of(batch()), outputs=frozenset({"values"})).values
    critic.backend.backward(values.sum())
    assert head.grad.dtype == WIDE
    assert critic.backend.step().applied


def test_an_adapter_has_masters_and_its_base_has_none(path, tmp_path):
    pytest.importorskip("peft")
    trained = Trained(model=path, lora={"rank": 4}, lr=1e-3)
    trained.update(3)
    parts = [part.weight for _, layer in adapter_layers(trained.model) for part in (layer.lora_A.trained, layer.lora_B.trained)]
    assert all((weight.dtype, weight.master.dtype) == (NARROW, WIDE) for weight in parts)
    others = [weight for weight in trained.model.parameters() if not any(weight is part for part in parts)]
    assert all(weight.dtype == NARROW and master_of(weight) is weight for weight in others)
    trained.backend.save_model(tmp_path)()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    masters = {part.master.data_ptr(): part.master for part in parts}
    assert all(value.dtype == WIDE for value in saved.values())
    assert sorted(value.sum().item() for value in saved.values()) == sorted(value.sum().item() for value in masters.values())
    again = load_model(RoleConfig(model=path, adapter=str(tmp_path)), trainable=True)
    assert again.get_parameter("model.embed_tokens.weight").dtype == WIDE, "the base was rounded to compute with alone"
    name, layer = adapter_layers(trained.model)[0]
    a, b = layer.lora_A.trained.weight.master, layer.lora_B.trained.weight.master
    expected = layer.base_layer.weight.float() + layer.scaling["trained"] * (b @ a)
    assert torch.equal(trained.sent[f"{name}.weight"], expected)
    assert not torch.equal(expected, expected.to(NARROW).float())


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor", "SGD"])
def test_other_optimizers_step_masters(path, optimizer):
    trained = Trained(model=path, optimizer=optimizer, lr=1e-4, adam_eps=RoleConfig().adam_eps)
    before = trained.sent
    trained.update()
    moved = {name for name, weight in trained.sent.items() if not torch.equal(weight, before[name])}
    assert moved >= {name for name, _ in trained.model.named_parameters() if "norm" not in name}
    assert all(torch.equal(weight, weight.master.to(NARROW)) for weight in trained.model.parameters())


def test_a_reference_of_the_same_weights_is_the_actor_bit_for_bit(path):
    """So the divergence of the first batch is 0, as in 32 bits."""
    reference, trained = frozen(path), Trained(model=path)
    assert {weight.dtype for weight in reference.passes.model.parameters()} == {NARROW}
    assert not any(hasattr(weight, "master") for weight in reference.passes.model.parameters())
    one, two = (role.passes.forward(**rows_of(batch())).logprobs for role in (reference, trained.role))
    assert torch.equal(one, two)


def test_a_role_that_moves_has_masters(path):
    """In steps far below what 16 bits tell apart."""
    average, trained = frozen(path, rounds="with masters").passes.model, Trained(model=path, lr=1e-3)
    trained.update()
    goal = trained.sent
    before = {name: weight.master.clone() for name, weight in average.named_parameters()}
    for _ in range(3):
        follow(average, trained.backend.weights(2**20), 1e-3)
    for name, weight in average.named_parameters():
        expected = goal[name] + (before[name] - goal[name]) * 0.999**3
        torch.testing.assert_close(weight.master.data, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(weight, weight.master.to(NARROW))


def test_what_a_class_keeps_in_32_bits_is_left_there():
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    lora = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    more = {"n_group": 1, "topk_group": 1, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**shape, **lora, **experts, **more))
    model._keep_in_fp32_modules_strict = {"mlp.gate.*"}
    narrow(model, NARROW)
    model(input_ids=torch.tensor([[1, 2]]))
    kept = {name for name, weight in model.named_parameters() if weight.dtype == WIDE}
    assert kept == {"model.layers.1.mlp.gate.weight"}


def engine_of(model, version, autocast="bfloat16"):
    tokenizer = SimpleNamespace(eos_token_id=None, all_special_ids=[])
    start = EngineStart(model=model, tokenizer=tokenizer, version=version, compute=Inline(), kernels=PlainKernels())
    return EmbeddedEngine(Transformers.Options(autocast=autocast), start)


def test_an_engine_in_place_samples_with_the_rounded_weights(path):
    trained = Trained(model=path)
    for autocast in ("bfloat16", "off"):
        use = engine_of(trained.model, 0, autocast)._use
        assert (use.dtype, use.autocast) == (NARROW, None)
    assert all(hasattr(weight, "master") for weight in trained.model.parameters())


def test_an_engine_with_weights_of_its_own_rounds_them_and_gets_the_same_bits(path):
    trained, own = Trained(model=path), load_model(RoleConfig(model=path))
    trained.update()
    engine = engine_of(own, NO_WEIGHTS)
    assert {weight.dtype for weight in own.parameters()} == {NARROW}
    engine._replace_weights(trained.backend.weights(2**20), 1)
    assert same(dict(own.named_parameters()), dict(trained.model.named_parameters()))
    assert engine.version == 1


def test_an_engine_leaves_the_trainer_s_weights_alone(path):
    model = load_model(RoleConfig(model=path), trainable=True)
    use = engine_of(model, 0)._use
    assert (use.dtype, use.autocast) == (WIDE, NARROW)


def test_another_backend_keeps_32_bits_under_autocast(path):
    class Other(Torch):
        @property
        def traits(self):
            return super().traits.__class__(everywhere=True)

    settings = actor(model=path)
    more = {"settings": settings, "total_updates": 1, "ranks": OneProcess()}
    role = Role.of("actor", load_model(settings, trainable=True), IN_16_BITS, backend=Other(Other.Options()), **more)
    assert role.passes.autocast == NARROW
    assert {weight.dtype for weight in role.passes.model.parameters()} == {WIDE}


def test_files_in_16_bits_need_no_autocast(path, tmp_path):
    tensors = load_file(f"{path}/model.safetensors")
    model = load_model(RoleConfig(model=path, dtype="bfloat16"))
    save_model(model, tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {NARROW}
    save_file(tensors, tmp_path / "other.safetensors")
    assert frozen(str(tmp_path)).passes.autocast is None
    assert not has_adapters(model)


def test_a_model_that_does_not_run_in_16_bits_stays_under_autocast(tmp_path, caplog):
    """Its code makes a mask in 32 bits, which products of 16 bits do not take."""
    shape = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OpenAIGPTConfig(**shape)).save_pretrained(tmp_path)
    trained = Trained(model=str(tmp_path))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rlhf_host.models.masters"]
    assert line.startswith("OpenAIGPTLMHeadModel does not run with weights in 16 bits, so they stay, under autocast: ")
    assert trained.role.passes.autocast == NARROW
    assert all(weight.dtype == WIDE and master_of(weight) is weight for weight in trained.model.parameters())
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weight, read[name]) for name, weight in trained.model.named_parameters() if name in read)
    trained.update()
