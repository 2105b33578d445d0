"""The published implementations, loaded from ``.oracles/``, and made-up batches in their shapes and in ours."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import logging
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from torch import Tensor

from rlhf_host import LossTerm, Outputs
from rlhf_host import functional as F
from rlhf_host.training.reduction import Denominators, row_weights, token_weights

ORACLES = Path(__file__).resolve().parents[2] / ".oracles"
# Imported at the top of the oracles' modules, not used by their formulas.
STAND_INS = ("deepspeed", "ray")
# verl needs another release than the one that the environment may hold.
UNSHARED = ("antlr4",)


# --- loading ------------------------------------------------------------------------------------------


class _StandIn(ModuleType):
    """An empty package in which every name is there."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _StandInFinder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _take_out(packages: tuple[str, ...]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in packages}


@contextlib.contextmanager
def _borrowed(*folders: str) -> Iterator[None]:
    """Imports come from ``folders`` first; afterwards paths, environment, logging and stand-ins are as before."""
    if not (ORACLES / "fetched.txt").is_file():
        pytest.skip("compares with published implementations: `make oracles` fetches them")
    path, environment, hidden = list(sys.path), dict(os.environ), _take_out((*STAND_INS, *UNSHARED))
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    finder = _StandInFinder()
    sys.path[:0] = [str(ORACLES / folder) for folder in folders]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = path
        _take_out((*STAND_INS, *UNSHARED))
        sys.modules.update(hidden)
        os.environ.clear()
        os.environ.update(environment)
        root.setLevel(level)
        root.handlers[:] = handlers


@pytest.fixture(scope="session")
def verl() -> SimpleNamespace:
    """verl 0.9.1: modules ``core``, ``functional``, ``corrections``; ``actor(**settings)`` makes the losses' configuration."""
    with _borrowed("verl", "beside"):
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        functional = importlib.import_module("verl.utils.torch_functional")
        corrections = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        config = importlib.import_module("verl.workers.config")

    def actor(**settings: Any) -> Any:
        return config.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)

    def loss(name: str, case: Case, aggregation: str = "token-mean", weights: Tensor | None = None, **settings: Any) -> Any:
        """The policy loss as a function of log-probabilities; its arguments come as (old, new)."""
        function, mask = core.get_policy_loss_fn(name), case.mask.double()

        def of(logprobs: Tensor) -> Tensor:
            options = {"loss_agg_mode": aggregation, "config": actor(**settings), "rollout_is_weights": weights}
            return function(case.old, logprobs, case.advantages, mask, **options)[0]

        return of

    policy = config.PolicyLossConfig
    return SimpleNamespace(core=core, functional=functional, corrections=corrections, loss=loss, policy=policy)


@pytest.fixture(scope="session")
def openrlhf() -> SimpleNamespace:
    """OpenRLHF 0.11.2: modules ``loss``, ``utils``, ``kl_controller``, ``length_penalty``, and ``advantages(case, ...)``."""
    with _borrowed("openrlhf", "beside"):
        # The packages' own __init__ import trainers that need flash-attn and a GPU: only the files named here are run.
        for name in ("openrlhf", "openrlhf.models", "openrlhf.utils", "openrlhf.trainer", "openrlhf.trainer.ppo_utils"):
            package = ModuleType(name)
            package.__path__ = [str(ORACLES.joinpath("openrlhf", *name.split(".")))]
            sys.modules[name] = package
        for name in ("openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher"):
            sys.modules[name] = _StandIn(name)
        found = {name: importlib.import_module(f"openrlhf.models.{name}") for name in ("loss", "utils")}
        for name in ("kl_controller", "length_penalty", "experience", "experience_maker"):
            found[name] = importlib.import_module(f"openrlhf.trainer.ppo_utils.{name}")
    maker = found["experience_maker"].RemoteExperienceMaker

    def advantages(
        case: Case,
        estimator: str,
        *,
        kl: Tensor | None = None,
        kl_coef: float = 0.0,
        gamma: float = 1.0,
        lambd: float = 1.0,
        reward_clip: tuple[float, float] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns ``[B, T]`` by ``compute_advantages_and_returns``; groups must be equal and adjacent."""
        batch = case.batch
        settings = SimpleNamespace(
            algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lambd, no_std_norm=False)),
            rollout=SimpleNamespace(n_samples_per_prompt=int((batch.group_id == batch.group_id[0]).sum())),
            reward=SimpleNamespace(clip_range=reward_clip),
        )
        experience = found["experience"].Experience(
            action_mask=case.mask.double(),
            values=case.values,
            rewards=batch.rewards,
            kl=torch.zeros_like(case.old) if kl is None else kl,
            index=list(range(len(batch))),
            info={},
        )
        itself = SimpleNamespace(
            strategy=SimpleNamespace(args=settings),
            args=settings,
            advantage_estimator=estimator,
            kl_ctl=SimpleNamespace(value=kl_coef),
            get_advantages_and_returns=lambda *a: maker.get_advantages_and_returns(None, *a),
            get_cumulative_returns=lambda *a: maker.get_cumulative_returns(None, *a),
        )
        (result,) = maker.compute_advantages_and_returns(itself, [experience])
        return result.advantages, result.returns

    def loss(case: Case, sampler: Tensor | None = None, **settings: Any) -> Callable[[Tensor], Tensor]:
        """The policy loss as a function of log-probabilities; its arguments come as (new, old)."""
        policy_loss = found["loss"].PolicyLoss(**settings)

        def of(logprobs: Tensor) -> Tensor:
            return policy_loss(logprobs, case.old, case.advantages, case.mask.double(), rollout_log_probs=sampler)[0]

        return of

    return SimpleNamespace(**found, advantages=advantages, policy=loss)


@pytest.fixture(scope="session")
def trl() -> SimpleNamespace:
    """TRL 1.16.0: modules ``grpo``, ``rloo``, ``utils``; the trainer's loss and its inline statements as functions."""
    with _borrowed("trl"):
        grpo = importlib.import_module("trl.trainer.grpo_trainer")
        rloo = importlib.import_module("trl.trainer.rloo_trainer")
        utils = importlib.import_module("trl.trainer.utils")

    def loss(
        case: Case,
        weights: Tensor | None = None,
        reference: Tensor | None = None,
        entropies: Tensor | None = None,
        **settings: Any,
    ) -> Callable[[Tensor], Tensor]:
        """``GRPOTrainer._compute_loss`` as a function of log-probabilities, given a stand-in for the trainer."""
        settings = {
            "loss_type": "bnpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "importance_sampling_level": "token",
            "off_policy_mask_threshold": None,
            "max_completion_length": case.mask.shape[1],
            "beta": 0.0,
            "entropy_coef": 0.0,
            **settings,
        }
        arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
        arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
        arguments |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
        arguments |= {name: settings.pop(name) for name in list(settings) if name in arguments}
        shape, mask = case.mask.shape, case.mask.double()
        inputs = {
            "prompt_ids": torch.zeros(shape[0], 1, dtype=torch.int64),
            "prompt_mask": torch.ones(shape[0], 1, dtype=torch.int64),
            "completion_ids": case.batch.completion_ids,
            "completion_mask": case.batch.completion_mask.double(),
            "tool_mask": mask,
            "advantages": case.advantages,
            "old_per_token_logps": case.old,
            "sampling_per_token_logps": case.sampler,
            "ref_per_token_logps": reference,
            "importance_sampling_ratio": weights,
            "num_items_in_batch": mask.sum(),
        }

        def of(logprobs: Tensor) -> Tensor:
            entropy = torch.zeros_like(logprobs) if entropies is None else entropies
            trainer = SimpleNamespace(
                **settings,
                args=SimpleNamespace(**arguments),
                _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropy, None),
                get_off_policy_mask=grpo.GRPOTrainer.get_off_policy_mask,
                get_gamma_weights=grpo.GRPOTrainer.get_gamma_weights,
                aux_loss_enabled=False,
                top_entropy_quantile=1.0,
                _entropy_bonus_enabled=entropies is not None,
                use_adaptive_entropy=False,
                use_vllm=weights is not None,
                vllm_importance_sampling_correction=True,
                model=SimpleNamespace(training=True),
                current_gradient_accumulation_steps=1,
                accelerator=SimpleNamespace(
                    num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, sync_gradients=True
                ),
                _metrics={"train": defaultdict(list)},
            )
            return grpo.GRPOTrainer._compute_loss(trainer, None, inputs)

        return of

    def rloo_loss(case: Case) -> Callable[[Tensor], Tensor]:
        """``RLOOTrainer._compute_loss``; advantages are those of the rows' first tokens."""
        mask = case.mask.double()
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
            "completion_ids": case.batch.completion_ids,
            "completion_mask": mask,
            "old_logps": case.old.sum(-1),
            "advantages": case.advantages[:, 0],
        }

        def of(logprobs: Tensor) -> Tensor:
            trainer = SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
                epsilon_low=0.2,
                epsilon_high=0.28,
                aux_loss_enabled=False,
                model=SimpleNamespace(training=True),
                accelerator=SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x),
                _metrics={"train": defaultdict(list)},
            )
            return rloo.RLOOTrainer._compute_loss(trainer, None, inputs)

        return of

    def statements(trainer: type, first: str, last: str, **names: Any) -> SimpleNamespace:
        """Run the published lines of ``_generate_and_score_completions`` from ``first`` to ``last`` (left out), and give what
        they assigned: TRL writes its advantages and weights inline, so there is no function to call."""
        lines = inspect.getsource(trainer._generate_and_score_completions).splitlines()
        (start,) = [i for i, line in enumerate(lines) if line.strip().startswith(first)]
        stop = next(i for i, line in enumerate(lines) if i > start and line.strip().startswith(last))
        scope = {**vars(sys.modules[trainer.__module__]), **names}
        exec(textwrap.dedent("\n".join(lines[start:stop])), scope)
        return SimpleNamespace(**scope)

    return SimpleNamespace(grpo=grpo, rloo=rloo, utils=utils, loss=loss, rloo_loss=rloo_loss, statements=statements)


# --- batches ------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One batch. The oracles get the tensors here, finite everywhere; ``batch`` holds NaN wherever it is masked."""

    batch: Any
    mask: Tensor
    logprobs: Tensor
    old: Tensor
    sampler: Tensor
    reference: Tensor
    advantages: Tensor
    values: Tensor
    token_rewards: Tensor

    def ours(self, weights: Tensor | None = None, **options: Any) -> Callable[[Tensor], Tensor]:
        """The policy loss as a function of log-probabilities, reduced as the host does, in float64."""
        return self.reduced(
            lambda logprobs: F.policy_loss(Outputs(logprobs=logprobs), self.batch, F.PolicyLossOptions(**options)), weights
        )

    def reduced(self, items_of: Callable[[Tensor], Sequence[Any]], weights: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        def of(logprobs: Tensor) -> Tensor:
            batch, total = self.batch, torch.zeros((), dtype=torch.float64)
            for term in items_of(logprobs.masked_fill(~self.mask, float("nan"))):
                if isinstance(term, LossTerm):
                    mask = Denominators.of(batch).mask(term.mask)
                    if term.values.dim() == 1:
                        counted = row_weights(mask, batch.episode_id)
                    else:
                        counted = token_weights(term.aggregation, mask, batch.group_id, batch.episode_id)
                    values = term.values if weights is None or not term.corrected else term.values * weights
                    total = total + term.coefficient * (counted * values).sum()
            return total

        return of


@pytest.fixture
def make_case() -> Callable[..., Case]:
    def make(
        lengths: Sequence[int] = (5, 7, 3, 6, 4, 7),
        groups: Sequence[int] = (0, 0, 0, 1, 1, 1),
        *,
        per_token: bool = True,
        observations: bool = False,
        rewards: Sequence[float] | None = None,
        spread: float = 0.6,
        seed: int = 0,
    ) -> Case:
        """A batch with log-probabilities about ``spread`` apart; advantages per token, or one per row."""
        batch = make_batch(lengths, groups=groups, rewards=rewards, observations=observations, seed=seed)
        generator = torch.Generator().manual_seed(seed + 1)
        mask = batch.action_mask

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

        def kept(x: Tensor) -> Tensor:
            return torch.where(mask, x, 0.0)

        logprobs = kept((noise(1.0) - 2).clamp(max=-0.05))
        old, sampler, reference = (kept((logprobs + noise(spread)).clamp(max=-0.01)) for _ in range(3))
        advantages = kept(noise(1.0) if per_token else noise(1.0)[:, :1].expand(mask.shape))
        case = Case(batch, mask, logprobs, old, sampler, reference, advantages, kept(noise(1.0)), batch.token_rewards.double())

        def garbage(x: Tensor) -> Tensor:
            return x.masked_fill(~mask, float("nan"))

        batch.old_logprobs, batch.sampler_logprobs = garbage(old), garbage(sampler)
        batch.advantages, batch.values = garbage(advantages), {"critic": garbage(case.values)}
        batch.token_rewards = garbage(case.token_rewards)
        return case

    return make


@pytest.fixture
def same() -> Callable[..., None]:
    """Asserts that two functions of log-probabilities agree there in value and gradient."""

    def assert_same(ours: Any, theirs: Any, logprobs: Tensor, *, value: bool = True, gradient: bool = True) -> None:
        (mine, my_gradient), (other, other_gradient) = (_value_and_gradient(loss, logprobs) for loss in (ours, theirs))
        assert my_gradient.abs().max() > 1e-4, "nothing was compared"
        if value:
            torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-10)
        if gradient:
            torch.testing.assert_close(my_gradient, other_gradient, rtol=1e-6, atol=1e-9)

    return assert_same


def _value_and_gradient(loss: Callable[[Tensor], Tensor], logprobs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.fixture
def gradient() -> Callable[..., Tensor]:
    return lambda loss, logprobs: _value_and_gradient(loss, logprobs)[1]
