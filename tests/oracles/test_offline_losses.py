"""Losses of data sets against TRL and OpenRLHF: value and gradient, in float64, masked places holding NaN on our side."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_dpo import CDPO, CPO, TPO
from rlhf_plugin_kto import KTO
from rlhf_plugin_reward_model_training import RewardModel
from rlhf_rows import losses

from rlhf_host import LossTerm, Metric, Outputs
from rlhf_host.training.reduction import Denominators, reduced, row_weights, token_weights

from .conftest import _borrowed

TRL_LOSSES = sorted(set(losses.preference_losses) - {"ipo_sum", "orpo"})


@dataclass
class Rows:
    """Completions of a data set. The oracles get the tensors here, finite everywhere; ``batch`` holds NaN where it is masked."""

    batch: object
    mask: torch.Tensor
    logprobs: torch.Tensor
    reference: torch.Tensor

    def ours(self, items_of):
        """A function of log-probabilities, or scores, reduced as the host does, in float64."""

        def of(values):
            total = torch.zeros((), dtype=torch.float64)
            dirty = values.masked_fill(~self.mask, float("nan")) if values.dim() == 2 else values
            for term in items_of(dirty):
                if isinstance(term, LossTerm):
                    mask = Denominators.of(self.batch).mask(term.mask, "made_up")
                    if term.values.dim() == 1:
                        weights = row_weights(mask, self.batch.episode_id)
                    else:
                        weights = token_weights(term.aggregation, mask, self.batch.group_id, self.batch.episode_id)
                    total = total + term.coefficient * torch.where(weights != 0, term.values * weights, 0.0).sum()
            return total

        return of

    def preference(self, **options):
        chosen = losses.PreferenceOptions(**options)
        return self.ours(lambda logprobs: losses.preference_loss(Outputs(logprobs=logprobs), self.batch, chosen))


def rows_of(lengths, label, units, *, seed=0, spread=1.5):
    batch = make_batch(lengths, groups=units, seed=seed, observations=True)
    generator = torch.Generator().manual_seed(seed + 1)
    mask = batch.loss_mask

    def noise(scale):
        return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    logprobs = torch.where(mask, (noise(1.0) - 2).clamp(max=-0.05), 0.0)
    reference = torch.where(mask, (logprobs + noise(spread)).clamp(max=-0.01), 0.0)
    batch.unit_id = batch.episode_id = torch.tensor(units)
    batch.columns["label"] = torch.tensor(label)
    batch.logprobs["reference"] = reference.masked_fill(~mask, float("nan"))
    batch.extra["made_up"] = {"chosen": losses.chosen_tokens(batch)}
    return Rows(batch, mask, logprobs, reference)


@pytest.fixture
def data():
    """Four pairs of unequal lengths, chosen rows first, as TRL has them; so our pairing must go by unit and label."""
    return rows_of((5, 7, 3, 6, 4, 7, 8, 2), [1.0] * 4 + [0.0] * 4, [0, 1, 2, 3] * 2)


@pytest.fixture
def same(same):
    """The oracles sum over all places, and count on 0 where a token is ignored."""

    def assert_same(ours, theirs, values):
        counted = values != 0
        same(ours, lambda logprobs: theirs(torch.where(counted, logprobs, 0.0)), values)

    return assert_same


@pytest.fixture(scope="session")
def offline():
    """TRL 1.16.0: the modules of its trainers for data sets."""
    with _borrowed("trl"):
        trainers = {name: importlib.import_module(f"trl.trainer.{name}_trainer") for name in ("dpo", "kto", "reward", "sft")}
        trainers |= {
            name: importlib.import_module(f"trl.experimental.{name}.{name}_trainer") for name in ("cpo", "orpo", "tpo")
        }
    return SimpleNamespace(**trainers)


class Model(torch.nn.Module):
    """Gives log-probabilities as TRL's models with a fused head do."""

    def __init__(self, logprobs):
        super().__init__()
        self.logprobs = logprobs

    def forward(self, **inputs):
        nothing = torch.zeros_like(self.logprobs)
        return SimpleNamespace(log_probs=self.logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def of_batch(mask):
    """Inputs with one prompt token in front, which TRL cuts off."""
    completion = torch.cat([torch.zeros(len(mask), 1), mask.float()], dim=1).long()
    return {"input_ids": completion, "attention_mask": completion, "completion_mask": completion}


def itself(model, **more):
    """In place of a trainer."""
    same = SimpleNamespace(
        device="cpu",
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        unwrap_model=lambda model: model,
        num_processes=1,
    )
    arguments = SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05, center_rewards_coefficient=None)
    return SimpleNamespace(
        model=model,
        accelerator=same,
        args=arguments,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **more,
    )


def dpo(offline, data, loss, *, weights=None, beta=0.1, label_smoothing=0.0, ld_alpha=None):
    """``DPOTrainer._compute_loss`` as a function of log-probabilities, given a stand-in for the trainer."""

    def of(logprobs):
        model, more = Model(logprobs), {"use_weighting": False, "f_divergence_type": "reverse_kl"}
        trainer = itself(model, ref_model=Model(data.reference), beta=beta, label_smoothing=label_smoothing, **more)
        trainer.gradient_checkpointing = None
        trainer.ld_alpha, trainer.loss_types = ld_alpha, [loss] if isinstance(loss, str) else loss
        trainer.loss_weights = weights or [1.0] * len(trainer.loss_types)
        inputs = of_batch(data.mask)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offline.dpo, "disable_gradient_checkpointing", lambda *a: torch.no_grad())
            return offline.dpo.DPOTrainer._compute_loss(trainer, model, inputs, False)

    return of


# --- pairs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("loss", TRL_LOSSES)
def test_preference_losses_are_those_of_trl(data, same, offline, loss, beta):
    noise = {"label_smoothing": 0.2} if loss in ("robust", "exo_pair") else {}
    same(data.preference(loss=loss, beta=beta, **noise), dpo(offline, data, loss, beta=beta, **noise), data.logprobs)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_conservative_dpo_is_that_of_openrlhf(data, same, openrlhf, noise):
    theirs = openrlhf.loss.DPOLoss(0.3, noise)

    def of(logprobs):
        return theirs(*logprobs.sum(-1).chunk(2), *data.reference.sum(-1).chunk(2))[0]

    same(data.preference(beta=0.3, label_smoothing=noise), of, data.logprobs)
    assert CDPO.Options().label_smoothing == 0.1


def test_openrlhfs_ipo_compares_sums(data, same, gradient, offline, openrlhf):
    theirs = openrlhf.loss.DPOLoss(0.3, ipo=True)

    def of(logprobs):
        return theirs(*logprobs.sum(-1).chunk(2), *data.reference.sum(-1).chunk(2))[0]

    same(data.preference(loss="ipo_sum", beta=0.3), of, data.logprobs)
    means = data.preference(loss="ipo", beta=0.3)
    assert not torch.allclose(gradient(means, data.logprobs)[data.mask], gradient(of, data.logprobs)[data.mask])


def test_trls_sigmoid_has_no_label_smoothing(data, same, gradient, offline):
    same(data.preference(), dpo(offline, data, "sigmoid", label_smoothing=0.3), data.logprobs)
    ours = gradient(data.preference(label_smoothing=0.3), data.logprobs)
    assert not torch.allclose(ours, gradient(data.preference(), data.logprobs))


def test_the_negative_log_likelihood_of_the_chosen_is_trls_over_tokens(data, same, offline):
    theirs = dpo(offline, data, ["sigmoid", "sft"], weights=[1.0, 0.7])
    same(data.preference(nll_coef=0.7), theirs, data.logprobs)


def test_openrlhf_means_the_chosens_over_rows(data, same, openrlhf):
    """Its trainer adds ``nll_loss_coef · −mean(chosen_logps_mean)``: the float64 formula beside its ``DPOLoss``."""
    theirs = openrlhf.loss.DPOLoss(0.1)

    def of(logprobs):
        pairs = theirs(*logprobs.sum(-1).chunk(2), *data.reference.sum(-1).chunk(2))[0]
        means = [float(length) for length in data.mask.sum(-1)[:4]]
        return pairs - 0.7 * sum(row.sum() / length for row, length in zip(logprobs[:4], means, strict=True)) / 4

    same(data.preference(nll_coef=0.7, nll_mean="rows"), of, data.logprobs)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_tokens_beyond_the_shorter_completion_weigh_as_in_trl(data, same, offline, alpha):
    same(data.preference(ld_alpha=alpha), dpo(offline, data, "sigmoid", ld_alpha=alpha), data.logprobs)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_simpo_is_trls_with_means_and_no_reference(data, same, offline, noise):
    trainer = SimpleNamespace(
        alpha=0.0,
        beta=2.0,
        simpo_gamma=0.5,
        label_smoothing=noise,
        loss_type="simpo",
        accelerator=SimpleNamespace(device="cpu"),
    )

    def of(logprobs):
        means = logprobs.sum(-1) / data.mask.sum(-1)
        return offline.cpo.CPOTrainer.cpo_loss(trainer, *means.chunk(2))[0].mean()

    options = {"beta": 2.0, "gamma": 0.5, "label_smoothing": noise}
    same(data.preference(loss="sigmoid_norm", reference_free=True, **options), of, data.logprobs)


@pytest.mark.parametrize(
    ("here", "there"), [("sigmoid", "sigmoid"), ("sigmoid_norm", "simpo"), ("hinge", "hinge"), ("ipo", "ipo")]
)
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_cpo_is_trls(data, same, offline, here, there, alpha):
    """Its loss of pairs, and its likelihood of the chosen: a mean over their tokens."""
    options = {
        "beta": 0.3,
        "gamma": 0.5 if there == "simpo" else 0.0,
        "label_smoothing": 0.0 if here in ("hinge", "ipo") else 0.1,
    }
    noise = options["label_smoothing"]
    trainer = SimpleNamespace(
        alpha=0.0, beta=0.3, simpo_gamma=0.5, label_smoothing=noise, loss_type=there, accelerator=SimpleNamespace(device="cpu")
    )

    def of(logprobs):
        sums = logprobs.sum(-1) / (data.mask.sum(-1) if there in ("simpo", "ipo") else 1)
        losses = offline.cpo.CPOTrainer.cpo_loss(trainer, *sums.chunk(2))[0]
        return losses.mean() - alpha * logprobs[:4].sum() / data.mask[:4].sum()

    plugin = CPO(CPO.Options(loss=here, nll_coef=alpha, **options))
    same(data.ours(lambda logprobs: plugin.compute_loss(Outputs(logprobs=logprobs), data.batch)), of, data.logprobs)
    assert CPO.Options().nll_coef == 1.0  # TRL's cpo_alpha


class Logits(torch.nn.Module):
    """A model of two tokens: the second has the log-probabilities. Where they are 0, it has another, of what TRL masks."""

    def __init__(self, logprobs):
        super().__init__()
        of_one = torch.where(logprobs == 0, -1.0, logprobs)
        logits = torch.stack([torch.log(-torch.expm1(of_one)), of_one], -1)
        self.logits = torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)

    def forward(self, **inputs):
        return SimpleNamespace(logits=self.logits)


@pytest.mark.parametrize(
    ("here", "there"), [("sigmoid", "sigmoid"), ("sigmoid_norm", "tpo-l"), ("hinge", "hinge"), ("ipo", "ipo")]
)
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_tpo_is_trls(same, offline, here, there, alpha):
    """Its loss of pairs, and its likelihood of the gold answers: a mean over their tokens. TRL drops these for an alpha of 0."""
    triples = rows_of((5, 7, 3, 6, 4, 7, 8, 2, 6, 3, 4, 5), [1.0] * 4 + [0.0] * 4 + [float("nan")] * 4, [0, 1, 2, 3] * 3)
    triples.batch.columns["gold"] = torch.tensor([float("nan")] * 8 + [1.0] * 4)
    noise = 0.0 if here in ("hinge", "ipo") else 0.1
    options = {"beta": 0.3, "gamma": 0.5 if here == "sigmoid_norm" else 0.0, "label_smoothing": noise}
    plugin = TPO(TPO.Options(loss=here, nll_coef=alpha, **options))
    triples.batch.extra["made_up"] = plugin.prepare_batch(triples.batch)

    def of(logprobs):
        count = 12 if alpha else 8
        settings = {"beta": 0.3, "tpo_alpha": alpha, "tpo_l_gamma": 0.5, "label_smoothing": noise, "loss_type": there}
        model = Logits(logprobs[:count])
        return offline.tpo.TPOTrainer._compute_loss(itself(model, **settings), model, of_batch(triples.mask[:count]), False)

    same(triples.ours(lambda logprobs: plugin.compute_loss(Outputs(logprobs=logprobs), triples.batch)), of, triples.logprobs)
    assert (TPO.Options().beta, TPO.Options().nll_coef) == (0.01, 1.0)  # TRL's


def test_orpo_is_trls_but_for_the_prompt_in_the_likelihood(data, same, offline):
    """TRL's likelihood counts the prompt's tokens too; the paper's, and ours, is the completion's. Its odds are float32."""
    data.logprobs = data.logprobs.float().double()
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))

    def odds(logprobs):
        means = logprobs.sum(-1) / data.mask.sum(-1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", lambda self: self)
            return -offline.orpo.ORPOTrainer.odds_ratio_loss(trainer, *means.chunk(2))[0].mean()

    def whole(logprobs):
        return odds(logprobs) - logprobs[:4].sum() / data.mask[:4].sum()

    same(data.preference(loss="orpo", beta=0.3, nll_coef=0.0), odds, data.logprobs)
    same(data.preference(loss="orpo", beta=0.3), whole, data.logprobs)


@pytest.mark.parametrize("loss", sorted(losses.preference_losses))
def test_a_long_completion_far_from_the_reference_stays_finite(data, gradient, loss):
    far = torch.where(data.mask, data.reference + torch.where(torch.arange(8).unsqueeze(-1) % 2 == 0, 300.0, -300.0), 0.0)
    noise = {"label_smoothing": 0.2} if loss in ("robust", "exo_pair") else {}
    ours = data.preference(loss=loss, **noise)
    assert ours(far).isfinite()
    assert gradient(ours, far).isfinite().all()


# --- supervised ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_supervised_losses_are_those_of_trl(data, same, offline, loss):
    def of(logprobs):
        outputs = SimpleNamespace(
            log_probs=logprobs, label_mask=data.mask, entropy=torch.zeros(()), is_top1=torch.zeros_like(data.mask)
        )
        trainer = itself(SimpleNamespace(training=True))
        trainer.args.loss_type, trainer.args.average_tokens_across_devices = loss, False
        trainer.accelerator.parallelism_config = None
        trainer.compute_loss_func = trainer.label_smoother = None
        inputs = {"labels": torch.zeros(()), "attention_mask": data.mask.long()}
        return offline.sft.SFTTrainer.compute_loss(trainer, lambda **inputs: outputs, inputs)

    options = losses.SupervisedOptions(loss=loss)
    same(data.ours(lambda logprobs: losses.supervised_loss(Outputs(logprobs=logprobs), data.batch, options)), of, data.logprobs)


def test_the_supervised_loss_is_openrlhfs(data, same, openrlhf):
    theirs = openrlhf.loss.SFTLoss()
    ours = data.ours(
        lambda logprobs: losses.supervised_loss(Outputs(logprobs=logprobs), data.batch, losses.SupervisedOptions())
    )
    same(ours, lambda logprobs: theirs(logprobs, data.mask.double()), data.logprobs)


# --- reward models ------------------------------------------------------------------------------------

SCORES = torch.tensor([0.3, -1.2, 2.0, 0.4, 0.1, 0.5, -0.7, 3.0], dtype=torch.float64)
MARGIN = torch.tensor([0.5, 0.0, 1.0, 2.0], dtype=torch.float64)


def reward_model(data, **options):
    plugin = RewardModel(RewardModel.Options(**options))
    return data.ours(lambda scores: plugin.compute_loss(Outputs(scores=scores), data.batch))


@pytest.mark.parametrize("coefficient", [None, 0.01])
@pytest.mark.parametrize("margin", [False, True])
def test_reward_models_are_trained_as_in_trl(data, same, offline, margin, coefficient):
    if margin:
        data.batch.columns["margin"] = MARGIN.repeat(2)

    def of(scores):
        trainer = itself(SimpleNamespace(training=True))
        trainer.args.center_rewards_coefficient = coefficient
        inputs = {"attention_mask": data.mask.long(), **({"margin": MARGIN} if margin else {})}
        model = lambda **inputs: SimpleNamespace(logits=scores.unsqueeze(-1))  # noqa: E731
        return offline.reward.RewardTrainer.compute_loss(trainer, model, inputs)

    same(reward_model(data, center_rewards_coefficient=coefficient), of, SCORES)


def test_reward_models_are_trained_as_in_openrlhf_whose_log_exp_has_no_margin(data, same, openrlhf):
    pairwise, log_exp = openrlhf.loss.PairWiseLoss(), openrlhf.loss.LogExpLoss()
    same(reward_model(data), lambda scores: log_exp(*scores.chunk(2), MARGIN), SCORES)
    data.batch.columns["margin"] = MARGIN.repeat(2)
    same(reward_model(data), lambda scores: pairwise(*scores.chunk(2), MARGIN), SCORES)
    same(reward_model(data, margin="off"), lambda scores: log_exp(*scores.chunk(2)), SCORES)


# --- kto ----------------------------------------------------------------------------------------------


def kto(offline, data, mismatched, **settings):
    """``KTOTrainer._compute_loss``: its own passes over mismatched rows give the last rows of the batch."""
    rows = (~mismatched).nonzero().squeeze(-1)
    settings = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **settings}

    def of(logprobs):
        model, reference = Model(logprobs[rows]), Model(data.reference[rows])
        model.mismatched, reference.mismatched = logprobs[mismatched].sum(-1), data.reference[mismatched].sum(-1)
        trainer = itself(model, ref_model=reference, calculate_KL=settings["loss_type"] == "kto", **settings)
        trainer._compute_kl_logps = lambda model, batch: model.mismatched
        inputs = {**of_batch(data.batch.action_mask[rows]), "label": data.batch.columns["label"][rows] == 1}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offline.kto, "disable_gradient_checkpointing", lambda *a: torch.no_grad())
            return offline.kto.KTOTrainer._compute_loss(trainer, model, inputs, False)

    return of


@pytest.fixture(params=[0, 1], ids=["KL 0", "KL above 0"])
def unpaired(request):
    """Three desirable and two undesirable rows, then mismatched ones, out of the loss."""
    data = rows_of((5, 7, 3, 6, 4, 5, 7, 3, 6, 4), [1.0, 0.0, 1.0, 1.0, 0.0] * 2, list(range(10)), seed=request.param)
    data.batch.columns["mismatched"] = torch.tensor([0.0] * 5 + [1.0] * 5)
    data.mask = data.batch.action_mask
    data.batch.loss_mask = data.mask & (torch.arange(10) < 5).unsqueeze(-1)
    lower = -0.4 if request.param else 0.4
    data.reference[5:] = torch.where(data.mask[5:], data.logprobs[5:] + lower, 0.0)
    data.batch.logprobs["reference"] = data.reference.masked_fill(~data.mask, float("nan"))
    return data


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto_is_that_of_trl_with_the_whole_batch_in_one_part(unpaired, same, offline, loss):
    options = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    plugin, data = KTO(KTO.Options(loss=loss, **options)), unpaired

    def items(logprobs):
        outputs = Outputs(logprobs=logprobs)
        statistics = plugin.batch_statistics(outputs, data.batch)
        data.batch.stats = reduced(item for item in statistics if isinstance(item, Metric))
        return plugin.compute_loss(outputs, data.batch)

    theirs = kto(offline, data, data.batch.columns["mismatched"] == 1, loss_type=loss, **options)
    same(data.ours(items), theirs, data.logprobs)
