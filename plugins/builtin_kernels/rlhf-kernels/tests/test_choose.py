"""Choice of the kernels that a run computes with: what a comparison refuses, and what is said of it."""

from __future__ import annotations

import copy
import logging
import re
import time
from dataclasses import replace

import pytest
import torch
import transformers as hf
from rlhf_kernels import choose
from torch import nn

from rlhf_host import RunError
from rlhf_host.comparison import token_logprobs
from rlhf_host.functional import twin
from rlhf_host.internals import PlainKernels
from rlhf_host.protocols import Traits, Use

TRAIN, SAMPLE = (
    Use(purpose=purpose, device=torch.device("cpu"), dtype=torch.float32, autocast=None) for purpose in ("train", "sample")
)


class Kernels:
    """A twin whose last norm is what ``wrong`` says."""

    traits = Traits()

    def __init__(self, wrong: float = 1.0, unsuited: str | None = None):
        self.wrong, self.why_not, self.twins = wrong, unsuited, []

    choose = staticmethod(choose)

    def unsuited(self, model, use):
        return self.why_not

    def twin(self, model, use):
        made = twin(model)
        made.model.norm = Scaled(made.model.norm, self)
        self.twins.append(made)
        return made


class Scaled(nn.Module):
    def __init__(self, norm: nn.Module, kernels: Kernels):
        super().__init__()
        self.norm, self.kernels = norm, kernels

    def forward(self, hidden):
        return self.norm(hidden) * self.kernels.wrong


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=0)).eval()


def chosen(*candidates):
    return choose(candidates, PlainKernels())


def test_the_first_that_suits_and_computes_the_same_computes(model, caplog):
    caplog.set_level(logging.INFO)
    unfit, wrong, right, last = Kernels(unsuited="too small"), Kernels(1.01), Kernels(), Kernels()
    kernels = chosen(("unfit", unfit), ("wrong", wrong), ("right", right), ("last", last))
    assert kernels.module(model, TRAIN) is right.twins[0]
    assert kernels.module(model, TRAIN) is right.twins[0]
    assert (unfit.twins, len(right.twins), last.twins) == ([], 1, [])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3, "whoever runs it sees what computes"
    assert {record.name for record in caplog.records} == {"rlhf_host.kernels"}
    assert kernels.reports[0] == "kernels 'unfit' are not used to train LlamaForCausalLM: too small"
    assert "'wrong' are not used to train LlamaForCausalLM: the gradient of " in kernels.reports[1]
    assert kernels.reports[2] == "kernels 'right' are used to train LlamaForCausalLM"


def test_another_model_in_its_place_is_compared_anew(model):
    right = Kernels()
    kernels = chosen(("right", right))
    assert kernels.module(model, TRAIN) is right.twins[0]
    model.lm_head.weight.requires_grad_(False)
    assert kernels.module(model, TRAIN) is right.twins[1]


def test_a_small_model_is_compared_in_place_of_a_large_one(model):
    large = copy.deepcopy(model).to("meta")
    right = Kernels()
    assert chosen(("right", right)).like(model, large, TRAIN) == tuple(right.twins)
    assert chosen(("wrong", Kernels(1.01))).like(model, large, TRAIN) == (model, large)


class Heads(Kernels):
    """Log-probabilities that are the host's own, but for what ``change`` does to them."""

    def __init__(self, change=None):
        super().__init__()
        self.change = change

    def token_logprobs(self, use):
        return None if self.change is None else self.compute

    def compute(self, *arguments, **settings):
        return self.change(*token_logprobs(*arguments, **settings))


def _held(values, share):
    """Values with another gradient."""
    return values.detach() + share * (values - values.detach())


HEADS = {
    "a log-probability differs": lambda logprobs, entropy: (logprobs * 1.01, entropy),
    "the entropy differs": lambda logprobs, entropy: (logprobs, None if entropy is None else entropy * 1.01),
    "the gradient of hidden differs": lambda logprobs, entropy: (_held(logprobs, 1.01), entropy),
    "the entropy is missing": lambda logprobs, entropy: (logprobs, None),
    "RuntimeError: The differentiated Tensor": lambda logprobs, entropy: (
        logprobs.detach().requires_grad_(),
        entropy,
    ),
}


@pytest.mark.parametrize("problem", HEADS)
@pytest.mark.parametrize("use", [TRAIN, replace(TRAIN, autocast=torch.bfloat16)], ids=["32 bits", "autocast"])
def test_a_head_that_computes_something_else_is_left_out(problem, use):
    kernels = chosen(("none", Kernels()), ("not here", Heads()), ("wrong", Heads(HEADS[problem])))
    assert kernels.token_logprobs(use) is token_logprobs
    (report,) = kernels.reports
    assert f"kernels 'wrong' do not compute log-probabilities: {problem}" in report


def test_a_head_that_computes_the_same_is_used_and_compared_once():
    calls = []
    right = Heads(lambda *results: (calls.append(1), results)[1])
    kernels = chosen(("right", right), ("last", Heads(lambda *results: results)))
    function = kernels.token_logprobs(TRAIN)
    compared = len(calls)
    assert function.__self__ is right
    assert kernels.token_logprobs(TRAIN) == function
    assert (len(calls), compared > 0) == (compared, True)
    assert kernels.reports == ["kernels 'right' compute log-probabilities"]


def _broken(error):
    def method(model, use):
        raise error

    return method


@pytest.mark.parametrize("method", ["unsuited", "twin"])
def test_kernels_that_raise_are_left_out(model, method):
    broken, right = Kernels(), Kernels()
    setattr(broken, method, _broken(ImportError("no module named 'tiles'")))
    kernels = chosen(("broken", broken), ("right", right))
    assert kernels.module(model, TRAIN) is right.twins[0]
    assert "'broken' are not used to train LlamaForCausalLM: ImportError: no module named 'tiles'" in kernels.reports[0]


def test_a_model_that_is_not_trained_is_not_said_to_be(model):
    kernels = chosen(("right", Kernels()))
    kernels.module(model.requires_grad_(False), TRAIN)
    assert kernels.reports == ["kernels 'right' are used for log-probabilities of LlamaForCausalLM"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_where_the_head_alone_is_trained_there_are_no_gradients_to_compare(model, checkpointed):
    """With recomputed layers the states have one, which reaches no weight."""
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    right = Kernels()
    assert chosen(("right", right)).module(model, TRAIN) is right.twins[0]


@pytest.mark.parametrize("beyond", [0, 20])
def test_kernels_with_another_gradient_are_not_used(model, beyond):
    """Compares gradients of the embedding, which is in no layer, and of rows that are not very short."""

    class Doubling(Kernels):
        def twin(self, model, use):
            made = super().twin(model, use)
            made.model.embed_tokens.register_forward_hook(
                lambda module, args, out: 2 * out - out.detach() if out.shape[1] > beyond else out
            )
            return made

    kernels = chosen(("doubling", Doubling()))
    assert kernels.module(model, TRAIN) is model
    assert "the gradient of model.embed_tokens.weight differs by 1, more than 0.0001" in kernels.reports[0]
    assert all(weight.grad is None for weight in model.parameters())


def plain_decoder(model):
    return PlainKernels().decoder(model, SAMPLE, 32)


class Around:
    """A decoder that does what another does."""

    ragged = True

    def __init__(self, decoder):
        self.decoder = decoder

    def __getattr__(self, name):
        return getattr(self.decoder, name)


class MixingUp(Around):
    def keep(self, rows):
        self.decoder.keep(torch.arange(len(rows)))


class Short(Around):
    """Its logits are wrong after long prompts."""

    def prefill(self, prompts):
        logits = self.decoder.prefill(prompts)
        return 2 * logits if max(map(len, prompts)) > 32 else logits


class Sampling(Kernels):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def twin(self, model, use):
        self.twins.append(self.make(model))
        return self.twins[-1]


@pytest.mark.parametrize(
    ("make", "report"),
    [
        (
            lambda model: plain_decoder(copy.deepcopy(model)),
            "not used to sample LlamaForCausalLM: after the weights have changed its logits differ by",
        ),
        (lambda model: MixingUp(plain_decoder(model)), "not used to sample LlamaForCausalLM: its logits differ by"),
        (twin, "not used to sample LlamaForCausalLM: they only train"),
        (plain_decoder, "used to sample LlamaForCausalLM"),
    ],
    ids=["stale", "mixing rows up", "training", "right"],
)
def test_a_decoder_is_compared_with_rows_that_leave_and_with_other_weights(model, make, report):
    sampling, weights = Sampling(make), copy.deepcopy(model.state_dict())
    kernels = chosen(("sampling", sampling))
    decoder = kernels.decoder(model, SAMPLE, 20)
    assert f"kernels 'sampling' are {report}" in kernels.reports[0]
    assert (decoder is sampling.twins[0]) == report.startswith("used")
    assert type(decoder).__name__ == "PlainDecoder"
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_decoder_is_kept_for_the_lengths_at_which_it_is_right(model):
    right, short = Sampling(plain_decoder), Sampling(lambda model: Short(plain_decoder(model)))
    kernels = chosen(("short", short), ("right", right))
    assert kernels.decoder(model, SAMPLE, 20) is kernels.decoder(model, SAMPLE, 32) is short.twins[0]
    assert kernels.decoder(model, SAMPLE, 100) is kernels.decoder(model, SAMPLE, 65) is right.twins[0]
    assert kernels.decoder(model, SAMPLE, 32) is short.twins[0]
    assert kernels.decoder(model, SAMPLE, 200) is right.twins[0]
    assert [line.split(":")[0] for line in kernels.reports] == [
        "kernels 'short' are used to sample LlamaForCausalLM",
        "kernels 'short' are not used to sample LlamaForCausalLM",
        "kernels 'right' are used to sample LlamaForCausalLM",
    ]


def test_where_no_kernels_decode_the_plain_path_does_at_every_length_and_they_are_asked_once(model):
    unfit = Kernels(unsuited="too small")
    kernels = chosen(("unfit", unfit))
    assert kernels.decoder(model, SAMPLE, 20) is kernels.decoder(model, SAMPLE, 100)
    assert kernels.reports == ["kernels 'unfit' are not used to sample LlamaForCausalLM: too small"]
    unfit.why_not = None
    kernels.decoder(model, SAMPLE, 200)
    assert unfit.twins == []


@torch.no_grad()
def _scale_head(model):
    model.lm_head.weight.mul_(3)


@pytest.mark.parametrize(
    "change",
    [
        _scale_head,
        lambda model: setattr(model.model.norm, "forward", lambda hidden: hidden),
        lambda model: setattr(model.config, "_attn_implementation", "eager"),
        lambda model: model.model.register_forward_hook(lambda *_: None),
        lambda model: setattr(model.model, "norm", nn.Identity()),
    ],
    ids=["weights", "forward", "attention", "hook", "module"],
)
def test_kernels_that_change_the_model_end_the_run(model, change):
    class Changing(Kernels):
        def twin(self, model, use):
            change(model)
            return super().twin(model, use)

    with pytest.raises(RunError, match="kernels 'rude' changed the model itself while they were tried to train Llama"):
        chosen(("rude", Changing())).module(model, TRAIN)


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (1.034, "kernels 'right' are used to train LlamaForCausalLM; measured: 1.03 times as fast as the plain path"),
        (1.004, "kernels 'right' are not used to train LlamaForCausalLM: measured: 1.00 times as fast as the plain path"),
    ],
)
def test_kernels_that_want_to_be_faster_are_used_only_where_they_are(model, times, line, monkeypatch):
    monkeypatch.setattr("rlhf_kernels.compared.times_as_fast", lambda *_: times)
    right = Kernels()
    kernels = choose([("right", right)], PlainKernels(), faster=True)
    assert (kernels.module(model, TRAIN) is model) == ("not used" in line)
    assert kernels.reports == [line]


def test_only_kernels_that_compute_the_same_are_measured(model, monkeypatch):
    monkeypatch.setattr("rlhf_kernels.compared.times_as_fast", lambda *_: pytest.fail("measured"))
    kernels = choose([("wrong", Kernels(1.01))], PlainKernels(), faster=True)
    assert kernels.module(model, TRAIN) is model
    assert "the gradient of " in kernels.reports[0]
    assert kernels.like(model, large := copy.deepcopy(model).to("meta"), TRAIN) == (model, large)
    assert kernels.reports[1] == "no kernels are used to train LlamaForCausalLM: its weights are not here to be measured with"


class Slow(Kernels):
    """A twin that waits in each pass."""

    def twin(self, model, use):
        made = super().twin(model, use)
        made.model.norm.register_forward_hook(lambda *_: time.sleep(0.02))
        return made


def test_a_twin_is_timed_beside_its_model_and_leaves_no_gradients(model, monkeypatch):
    monkeypatch.setattr("rlhf_kernels.measured.LONGEST", 64)
    kernels = choose([("slow", Slow())], PlainKernels(), faster=True)
    assert kernels.module(model, TRAIN) is model
    assert re.search(r"'slow' are not used to train LlamaForCausalLM: measured: 0\.\d\d times as fast", kernels.reports[0])
    assert all(weight.grad is None for weight in model.parameters())
