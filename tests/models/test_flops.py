"""The count of operations, against PaLM's formula and against what torch counts while a model trains."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rlhf_authoring import write_tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from rlhf_host.models import flops
from rlhf_host.models.flops import ModelFlops
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import Update
from rlhf_host.training.measures import speed


@pytest.fixture
def model(tmp_path):
    return AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path), attn_implementation="eager")


def test_it_is_palms_formula(model):
    config, length = model.config, 12
    matrices = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() > 1)
    head = model.lm_head.weight
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    count = ModelFlops.of(model, [head]).training((), [(length, length)], length)
    assert count == length * (6 * (matrices + head.numel()) + 12 * width * length)


def test_it_is_what_torch_counts(model):
    head = ModelFlops.of(model, [model.lm_head.weight])
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(3, 40, (2, 12))).logits.sum().backward()
    # Nothing needs the gradient of the looked-up tables' output less than that of the weights behind it.
    assert head.training((), [(12, 12)] * 2, 24) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_frozen_weights_need_no_gradient_of_their_own(model):
    whole = ModelFlops.of(model).body
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    own = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert ModelFlops.of(adapted).body == whole / 6 * 4 + 6 * own


def test_experts_that_a_token_does_not_reach_do_not_count():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    one, two = (
        MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=used))
        for used in (1, 2)
    )
    assert ModelFlops.of(two).body - ModelFlops.of(one).body == 6 * 3 * 8 * 16
    two.config.num_experts_per_tok = 0
    assert ModelFlops.of(two) is None


def test_work_counts_what_tokens_see():
    count = ModelFlops(body=100.0, head=10.0, attention=3)
    pairs = sum(range(1, 8)) + 4 * (sum(range(8, 12)))  # a prompt of 7, then four rows of 4
    each = count.attention * 12  # for every query and key
    assert count.work(7, [4] * 4) == pytest.approx((7 + 16) * 100 + 16 * 10 + each * pairs, rel=0.1)
    assert count.work(7, []) == 7 * 100 + each * 49 / 2


def test_a_prompt_that_is_computed_once_counts_once(model):
    apart, shared = Passes(model, shared_prefix="off"), Passes(model, shared_prefix="on")
    prompts, lengths = [list(range(3, 33))] * 4, [5] * 4
    count = ModelFlops.of(model, [model.lm_head.weight])
    assert apart.flops(prompts, lengths) == count.training((), [(34, 34)] * 4, 20)
    assert shared.flops(prompts, lengths) == count.training([30], [(34, 4)] * 4, 20)
    assert shared.flops(prompts, lengths, [0, 1, 2, 3]) > shared.flops(prompts, lengths, [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0.0), ("Tesla T4", 0.0),
    ],
)  # fmt: skip
def test_peaks_are_found_by_the_devices_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert flops.peak_flops(torch.device("cuda")) == peak
    assert flops.peak_flops(torch.device("cpu")) == 0.0


def test_mfu_is_a_part_of_what_all_devices_can_do():
    updates = [Update(SimpleNamespace(), None, 4e12, 2, 10e12), Update(SimpleNamespace(), "refused", 4e12, 2, 10e12)]
    assert speed(updates, 0.5) == pytest.approx({"tflops": 8.0, "mfu": 0.8})
    assert speed([Update(SimpleNamespace(), None, 4e12, 2)], 1.0) == {"tflops": 2.0}
    assert speed([Update(SimpleNamespace())], 1.0) == {}
