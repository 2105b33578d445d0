"""Checks of backends: the gradient is torch's, however a batch is split; steps follow the role's settings; state comes back."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_authoring.contracts.reinforce import NEEDS, Reinforce, actor, batch, manager_of
from rlhf_authoring.contracts.subject import Broken, Subject, Unusable, check, expect, finish
from rlhf_host import Batch, RunError, UserError, distributed
from rlhf_host.backends import OneProcess
from rlhf_host.distributed import reserved
from rlhf_host.internals import Denominators, PluginSpec, Role, Worker, beyond, rows_of
from rlhf_host.models import load_model, quiet_transformers
from rlhf_host.protocols import BackendTraits, Ranks
from rlhf_host.settings import RoleConfig, TrainConfig

CLOSE = 1e-3
"""Largest distance of numbers, relative to the larger, where the backend is exact; elsewhere ``ROUGH``."""
ROUGH = 0.1
RANKS_S = 300.0
OVERHEAD = 2**16
"""Bytes of names in the files of a tiny model's optimizer."""
FROZEN = "model.layers.0.mlp.up_proj.weight"
SHARDS = ([0, 1, 2, 3, 4, 6], [5, 7])
"""The rows of two ranks."""


class Trained:
    """A role that the plugin trains, in the hands of the host's own worker."""

    def __init__(self, plugin: Any, *, updates: int = 10, tokens: int = 16384, ranks: Ranks | None = None, **role: Any):
        settings, ranks, train = actor(**role), ranks or OneProcess(), TrainConfig(max_tokens_per_microbatch=tokens)
        model = _model(settings)
        self.before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            self.role = Role.of("actor", model, train, backend=plugin, settings=settings, total_updates=updates, ranks=ranks)
        except UserError as error:
            raise Unusable("served", f"it trains no tiny model in one process: {error}") from error
        assert self.role.backend is not None
        self.backend = self.role.backend
        self.worker = Worker({"actor": self.role}, manager_of(algo=Reinforce()), train, NEEDS, ranks)

    def update(self, rows: Batch | None = None) -> dict[str, float]:
        """The metrics of one update."""
        update = self.worker.update(batch() if rows is None else rows)
        expect(update.refused is None, f"a step was refused: {update.refused}")
        return update.metrics.result()

    def backward(self, factor: float = 1.0) -> None:
        """Accumulate a gradient: of the log-probabilities' sum, times ``factor``."""
        outputs = self.role.passes.forward(**rows_of(batch()))
        assert outputs.logprobs is not None
        self.backend.backward(factor * outputs.logprobs.sum(), True)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for bucket in self.backend.weights(64 * 1024) for name, value in bucket}

    @property
    def tolerance(self) -> float:
        return CLOSE if self.backend.exact else ROUGH

    def expect_weights(self, others: dict[str, Tensor], message: str) -> None:
        """The weights went where the other ones did, from where they were at the start."""
        own = self.weights
        apart = torch.cat([(own[name] - value).double().flatten() for name, value in others.items()]).norm()
        moved = torch.cat([(own[name] - self.before[name]).double().flatten() for name in others]).norm()
        gap, most = float(apart), self.tolerance * float(moved) + 1e-12
        expect(gap <= most, f"{message} (apart by {beyond(gap, most)}, after a step of {float(moved):.2g})")


def _model(settings: RoleConfig) -> Any:
    with quiet_transformers():
        model = load_model(settings, trainable=True)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def _gradient() -> dict[str, Tensor]:
    """Returns the gradient of the whole batch's loss, by torch alone."""
    model, rows, loss = _model(actor()), batch(), torch.zeros(())
    assert rows.advantages is not None
    for row, prompt in enumerate(rows.prompt_ids):
        mask = rows.completion_mask[row]
        ids = rows.completion_ids[row, mask]
        inputs = torch.tensor([[*prompt, *ids.tolist()]])
        logits = model(input_ids=inputs, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        loss = loss - (rows.advantages[row, mask] * logprobs).sum()
    (loss / rows.loss_mask.sum()).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@check()
def traits_are_constant(subject: Subject) -> None:
    """``traits`` is a ``BackendTraits``, the same at each look and of every instance with the same options."""
    subject.traits(BackendTraits)


@check()
def the_gradient_is_torchs(subject: Subject) -> None:
    """``StepResult.grad_norm`` is the norm of the gradient that torch computes, before clipping, and the step goes down it."""
    trained, gradient = Trained(subject.build(), max_grad_norm=0.01), _gradient()
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradient.values()))
    reported = trained.update()["grad_norm"]
    close = math.isclose(norm, reported, rel_tol=trained.tolerance)
    expect(close, f"grad_norm is {reported:.6g}, and torch's gradient has the norm {norm:.6g}")
    now = trained.weights
    slope = sum(float(((now[name] - trained.before[name]).double() * value).sum()) for name, value in gradient.items())
    expect(slope < 0, "a step does not go down the gradient: the loss would not fall")
    expect(torch.equal(now[FROZEN], trained.before[FROZEN]), f"{FROZEN} is frozen, and a step changes it")


@check()
def passes_add_up(subject: Subject) -> None:
    """One backward for the whole batch, or one for each few rows: gradients sum, and the step is the same."""
    whole, parts = Trained(subject.build()), Trained(subject.build(), tokens=20)
    norms = whole.update()["grad_norm"], parts.update()["grad_norm"]
    close = math.isclose(*norms, rel_tol=whole.tolerance)
    expect(close, f"grad_norm is {norms[0]:.6g} in one pass and {norms[1]:.6g} in several")
    parts.expect_weights(whole.weights, "in several passes a batch makes another step than in one")


@check()
def ranks_step_as_one(subject: Subject) -> None:
    """Two ranks with unequal parts of a batch make the step that one makes with all of it."""
    alone = Trained(subject.build())
    alone.update()
    spec = PluginSpec.of(subject.info, subject.options)
    with reserved("127.0.0.1") as place:
        try:
            weights = _of_ranks(spec, actor().model, place.getsockname()[1])
        except Exception as error:
            raise Broken(f"two ranks do not train: {type(error).__name__}: {str(error)[-300:]}") from error
    together = {name: torch.from_numpy(value) for name, value in weights.items()}
    alone.expect_weights(together, "two ranks make another step than one")


def _of_ranks(*start: Any) -> dict[str, Any]:
    """Returns the weights of two ranks after a step. A rank's failure is raised at once."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in SHARDS]
    processes = [
        context.Process(target=on_rank, args=(rank, answer, *start), daemon=True) for rank, (_, answer) in enumerate(pipes)
    ]
    try:
        for process, (_, answer) in zip(processes, pipes, strict=True):
            process.start()
            answer.close()
        readers: list[Any] = [reader for reader, _ in pipes]
        answers: dict[Any, Any] = {}
        while waiting := [reader for reader in readers if reader not in answers]:
            ready: list[Any] = multiprocessing.connection.wait(waiting, RANKS_S)
            expect(bool(ready), f"no answer within {RANKS_S:.0f} s")
            for reader in ready:
                try:
                    answers[reader] = reader.recv()
                except EOFError:
                    raise RunError("the process of a rank ended") from None
                if isinstance(answers[reader], Exception):
                    raise answers[reader]
        return answers[readers[0]]
    finally:
        for process in processes:
            process.kill()


def on_rank(rank: int, answer: Any, spec: PluginSpec, model: str, port: int) -> None:
    """One of two ranks, in a process of its own: sends its weights as arrays after a step, or the error."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        ranks = distributed.Ranks.join(rank, len(SHARDS), "127.0.0.1", port, timeout_s=RANKS_S / 2)
        trained = Trained(spec.build(), ranks=ranks, model=model)
        whole, rows = batch(), SHARDS[rank]
        update = trained.worker.update(whole.select(rows), whole=Denominators.of(whole), rows=rows)
        expect(update.refused is None, f"a step was refused: {update.refused}")
        answer.send({name: value.float().numpy() for name, value in trained.weights.items()})
    except Exception as error:
        answer.send(RunError(f"rank {rank}: {type(error).__name__}: {error}"))


@check()
def steps_follow_the_schedule(subject: Subject) -> None:
    """The rate warms up, then falls as the role says; ``lr`` moves the peak; a rate of 0 leaves the weights alone."""
    trained = Trained(subject.build(), updates=6, schedule="linear", warmup_steps=2)
    rates = [trained.update()["lr"] for _ in range(4)]
    expected = [5e-4, 1e-3, 1e-3, 7.5e-4]
    fits = all(math.isclose(rate, wanted, rel_tol=1e-6) for rate, wanted in zip(rates, expected, strict=True))
    expect(fits, f"with 2 updates of warm-up and 6 in all the rates are {rates}, expected {expected}")
    before, trained.backend.lr = trained.weights, 0.0
    expect(trained.update()["lr"] == 0.0, "setting lr does not change the next step's rate")
    same = all(torch.equal(value, before[name]) for name, value in trained.weights.items())
    expect(same, "a step with a rate of 0 changes weights")


@check()
def steps_that_are_not_finite_are_refused(subject: Subject) -> None:
    """A gradient with NaN or infinities: ``applied`` is False, weights and schedule stay, and it is gone from the next step."""
    trained, other = (Trained(subject.build(), warmup_steps=5) for _ in range(2))
    for factor in (math.nan, math.inf):
        trained.backward(factor)
        result = trained.backend.step()
        expect(not result.applied, "a step with a gradient that is not finite was applied")
        expect(not math.isfinite(result.grad_norm), f"its grad_norm is {result.grad_norm}")
    same = all(torch.equal(value, trained.before[name]) for name, value in trained.weights.items())
    expect(same, "a step that was refused changes weights")
    expect(trained.update()["lr"] == other.update()["lr"], "a step that was refused counts for the schedule")
    trained.expect_weights(other.weights, "after a step that was refused the next one is another")


@check()
def discarded_gradients_are_forgotten(subject: Subject) -> None:
    """After ``discard`` a step is as if the gradient had never been."""
    trained, other = Trained(subject.build()), Trained(subject.build())
    trained.backward()
    trained.backend.discard()
    trained.update()
    other.update()
    trained.expect_weights(other.weights, "a gradient that was discarded is in the next step")


@check()
def optimizer_state_survives_a_checkpoint(subject: Subject) -> None:
    """A fresh instance that loads what ``save`` and ``save_model`` wrote goes on as the first one does; other state is refused."""
    trained = Trained(subject.build(), warmup_steps=5)
    for seed in range(2):
        trained.update(batch(seed))
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        state, model, empty = (Path(folder, name) for name in ("state", "model", "empty"))
        for path in (state, model, empty):
            path.mkdir(exist_ok=True)
        writers = [trained.backend.save(state), trained.backend.save_model(model)]
        rate = trained.update(batch(2))["lr"]  # what is written later must be of now
        for write in writers:
            finish(write)
        size = sum(file.stat().st_size for file in state.rglob("*") if file.is_file())
        told = subject.build().traits.saved_bytes * sum(weight.numel() for weight in trained.weights.values())
        within = not told or 0.5 * told <= size <= 1.5 * told + OVERHEAD
        expect(within, f"save writes {size} bytes, and traits.saved_bytes says about {told}")
        resumed = Trained(subject.build(), model=str(model), warmup_steps=5)
        with contextlib.suppress(UserError):
            resumed.backend.load(empty)
            raise Broken("it loads its state from an empty directory; raise UserError")
        resumed.backend.load(state)
    expect(rate == resumed.update(batch(2))["lr"], "the schedule does not go on where it was saved")
    resumed.expect_weights(trained.weights, "after save and load the next step is another")


@check()
def weights_have_every_name(subject: Subject) -> None:
    """``weights`` gives every name of the state dict, in one order and in pieces; ``save_model`` writes the same."""
    trained = Trained(subject.build())
    trained.update()
    buckets, again = ([[name for name, _ in bucket] for bucket in trained.backend.weights(64 * 1024)] for _ in range(2))
    expect(buckets == again and len(buckets) > 1, "buckets are others the second time, or all weights are in one")
    missing = trained.before.keys() ^ {name for names in buckets for name in names}
    expect(not missing, f"weights and state dict differ in {', '.join(sorted(missing)[:3])}")
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        finish(trained.backend.save_model(Path(folder)))
        saved = load_model(actor(model=folder)).state_dict()
    wrong = [name for name, value in trained.weights.items() if not torch.allclose(value.float(), saved[name].float())]
    expect(not wrong, f"what save_model wrote is not what weights gives: {', '.join(wrong[:3])}")


@check()
def offloading_is_undone(subject: Subject) -> None:
    """``offload`` and ``reload``, also when there is nothing to move, change neither weights nor the next step."""
    trained, other = Trained(subject.build()), Trained(subject.build())
    for seed in range(2):
        for each in (trained, other):
            each.update(batch(seed))
        trained.backend.offload()
        trained.backend.reload()
    trained.expect_weights(other.weights, "after offload and reload the next step is another")


@check()
def what_is_away_is_saved_as_it_is(subject: Subject) -> None:
    """Between ``offload`` and ``reload``, ``weights``, ``save`` and ``save_model`` give what was there, or raise ``RunError``;
    after ``reload`` they give it, and the run goes on as one in which nothing moved.
    """
    trained, other = (Trained(subject.build(), warmup_steps=5) for _ in range(2))
    for each in (trained, other):
        each.update()
    before = trained.weights
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        trained.backend.offload()
        with contextlib.suppress(RunError):
            _expect_saved(trained, before, Path(folder, "away"))
        trained.backend.reload()
        _expect_saved(trained, before, Path(folder, "back"))
        for each in (trained, other):
            each.update(batch(1))
        trained.expect_weights(other.weights, "after offload, a copy and reload the next step is another")
        for path in Path(folder).glob("*/saved"):
            resumed = Trained(subject.build(), model=str(path.with_name("model")), warmup_steps=5)
            resumed.backend.load(path.with_name("state"))
            resumed.update(batch(1))
            resumed.expect_weights(
                other.weights, f"from what was saved while the role was {path.parent.name} it goes on otherwise"
            )


def _expect_saved(trained: Trained, before: dict[str, Tensor], folder: Path) -> None:
    state, model = folder / "state", folder / "model"
    for path in (state, model):
        path.mkdir(parents=True, exist_ok=True)
    now = trained.weights
    wrong = [name for name, value in before.items() if not torch.equal(now[name], value)]
    expect(not wrong, f"while the role is {folder.name}, weights gives another {', '.join(wrong[:3])}")
    for write in (trained.backend.save(state), trained.backend.save_model(model)):
        finish(write)
    saved = load_model(actor(model=str(model))).state_dict()
    wrong = [name for name, value in before.items() if not torch.allclose(value.float(), saved[name].float())]
    expect(not wrong, f"while the role is {folder.name}, save_model writes another {', '.join(wrong[:3])}")
    (folder / "saved").touch()
