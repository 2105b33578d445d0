"""The routers' auxiliary loss is the one that transformers computes, whatever the layout, and trains."""

import pytest
import torch
import transformers
from rlhf_authoring.models import tiny_tokenizer

import rlhf_host
from rlhf_host.errors import UserError
from rlhf_host.models.balance import balance_of
from rlhf_host.models.passes import Passes

from .miniatures import miniature

SHARING = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe"]
FAMILIES = [*SHARING, "gpt_oss", "jamba"]
PROMPTS, LENGTHS = [[5, 6, 7], [8, 9, 10, 11], [12]], [4, 1, 6]


def rows():
    torch.manual_seed(1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(1, 40, mask.shape), mask


def of_transformers(model):
    """Of the same tokens, right-padded: all but the last of each row, which predicts nothing."""
    ids, mask = rows()
    each = [[*prompt, *row[real].tolist()][:-1] for prompt, row, real in zip(PROMPTS, ids, mask, strict=True)]
    width = max(map(len, each))
    padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in each])
    real = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in each])
    model.zero_grad()
    loss = model(input_ids=padded, attention_mask=real.long(), use_cache=False, output_router_logits=True).aux_loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("name", "layout"), [*((name, "on") for name in SHARING), *((name, "off") for name in FAMILIES)])
def test_it_is_the_loss_of_the_whole_model(name, layout):
    model = miniature(name)
    passes = Passes(model, shared_prefix=layout, balance=balance_of(model, 0.5))
    loss, expected = of_transformers(model)
    model.zero_grad()
    outputs = passes.forward(PROMPTS, *rows())
    outputs.router_loss.backward()
    torch.testing.assert_close(outputs.router_loss.detach(), loss.float(), rtol=1e-5, atol=1e-6)
    own = gradients(model)
    for key in (key for key in expected if expected[key].abs().max() > 0):
        torch.testing.assert_close(own[key], expected[key], rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        assert passes.forward(PROMPTS, *rows()).router_loss is None


def test_the_configuration_says_whether_it_is_wanted():
    model = miniature("mixtral")
    assert balance_of(model, None) is None
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.02
    assert balance_of(model, None).coef == 0.02
    assert balance_of(model, 0.0) is None
    with pytest.raises(
        UserError, match=r"router_aux_loss_coef is 0.1, and LlamaForCausalLM has no auxiliary loss of its routers"
    ):
        balance_of(miniature("llama"), 0.1)


def test_experts_are_used_more_evenly(tmp_path):
    tokenizer = tiny_tokenizer()
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, vocab_size=len(tokenizer), max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    for layer in model.model.layers:  # one expert takes everything
        torch.nn.init.constant_(layer.mlp.gate.weight, 0.0)
        layer.mlp.gate.weight.data[0] = 2.0 * layer.post_attention_layernorm.weight.data
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(16)]

    def router_losses(coef, name):
        run = rlhf_host.train(
            algo="sft", model=tmp_path / "model", data=data, run_dir=tmp_path / name, train={"steps": 12, "batch_size": 8},
            actor={"lr": 1e-2, "router_aux_loss_coef": coef}, checkpoint={"every": 0, "final": False},
        )  # fmt: skip
        return [row["loss/router"] / coef for row in run.metrics if row["step"]]

    weak, strong = router_losses(1e-6, "weak"), router_losses(1.0, "strong")
    assert strong[0] == pytest.approx(weak[0], rel=1e-3)
    assert strong[-1] < weak[-1] - 0.05
