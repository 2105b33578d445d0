"""``xray``: one load of the model, and each algorithm's gradient on the same answers."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rlhf_session import trainable_session
from torch import Tensor

from rlhf_host import RunError, Trajectory, UserError
from rlhf_host.internals import available_memory, blocks_of, meta_model
from rlhf_host.sampling import decoder, speaking
from rlhf_host.settings import RoleConfig, plain, read_yaml
from rlhf_xray.candidates import Candidate, Candidates, Named, Roles
from rlhf_xray.measures import Algorithm, XRay, cosines
from rlhf_xray.saved_batch import SavedBatch
from rlhf_xray.watching import Watched

if TYPE_CHECKING:
    from rlhf_session import TrainableSession

USUAL = {"backend": {"name": "torch", "optimizer": "SGD"}, "kernels": "none"}
"""Settings where nobody gives others: no step is taken, and SGD keeps nothing beside the weights."""
FAR = 0.05
"""Mean difference of log-probabilities of file and model from which it is another model: rounding is less, even in 16 bits."""
RANK = 8
"""Rank of the adapter of ``weights="lora"``."""


@speaking()
def xray(
    saved: str | Path | Sequence[Trajectory],
    *,
    algos: Sequence[Named] | None = None,
    model: str | Path | None = None,
    step: int | None = None,
    weights: str = "all",
    old_logprobs: str | None = None,
    only_actor: bool = False,
    config: str | Path | Sequence[str | Path] | None = None,
    on_progress: Callable[[str], None] = lambda name: None,
    **settings: Any,
) -> XRay:
    """Compares what algorithms would do with one batch of saved answers, as ``rlhf xray`` does.

    Args:
        saved: ``RUN@STEP``, a run directory, a file of trajectories, or what ``rlhf_samples.rollout`` returned.
        algos: names, ``NAME/LOSS``, or mappings of ``name`` and options; default: all that train on sampled answers.
        model: default: of a run the model that sampled the step, or the one after it.
        step: the step of a file or a run that has several.
        weights: ``all``, ``lora``, ``last-layer``, or a pattern of names: gradients are by these weights.
        old_logprobs: ``model``: ratios are 1, as in the first update of a batch. ``file``: they are to the saved log-probabilities,
            as in a later one. Default: ``file`` if the model has learnt from the batch.
        only_actor: load no critic and no reference; algorithms that need one are left out.
        config: what ``--config`` takes, or a list of that, for models and devices.
        on_progress: gets the name of each algorithm before its turn.
        **settings: settings of models and devices.

    Raises:
        UserError: the batch, an algorithm or a setting cannot be used.
    """
    return compare(
        saved,
        algos=algos,
        model=model,
        step=step,
        weights=weights,
        old_logprobs=old_logprobs,
        only_actor=only_actor,
        config=config,
        on_progress=on_progress,
        settings=settings,
    )


def compare(
    saved: str | Path | Sequence[Trajectory],
    *,
    algos: Sequence[Named] | None,
    model: str | Path | None,
    step: int | None,
    weights: str,
    old_logprobs: str | None,
    only_actor: bool,
    config: str | Path | Sequence[str | Path] | None,
    on_progress: Callable[[str], None],
    settings: Mapping[str, Any],
) -> XRay:
    """Is ``xray``, with errors that speak of flags."""
    batch = SavedBatch.of(saved, model, step, old_logprobs)
    given = _roles_given(settings, config)
    with_model = {role for role, said in given.items() if said.get("model") is not None}
    candidates = Candidates.of(algos, only_actor=only_actor, given=with_model)
    loaded = {f"actor.{name}": value for name, value in batch.loaded.items() if name not in given.get("actor", {})}
    if "actor.adapter" in loaded and weights != "all":
        raise UserError(
            f"--weights {weights}: the run began with the adapter {loaded['actor.adapter']}, and an adapter's weights are all that"
            " have gradients: leave --weights out, or merge the adapter (rlhf merge-lora) and give --model DIR"
        )
    settings = {**loaded, **settings, **_trained(weights, batch.model)}
    if config is None:
        settings = {**USUAL, **settings}
    old = "sampler" if batch.old_logprobs == "file" else "fused"
    roles = Roles(candidates.roles.values())
    with trainable_session(
        config,
        algo=roles,
        model=batch.model,
        rollout=batch.sampling,
        **cast(dict[str, Any], {"train.old_logprobs": old, **settings}),
    ) as session:
        return _Xray(session, roles, batch, candidates, named=algos is not None, weights=weights).run(on_progress)


def _roles_given(settings: Mapping[str, Any], config: str | Path | Sequence[str | Path] | None) -> dict[str, dict[str, Any]]:
    """Returns what settings and files say of each role: ``{"actor": {"dtype": "float32"}}``."""
    files = [] if config is None else [config] if isinstance(config, str | Path) else config
    found: dict[str, dict[str, Any]] = {}
    for each in (settings, *(plain(read_yaml(Path(file))) for file in files)):
        sections = {**each, **(each["roles"] if isinstance(each.get("roles"), Mapping) else {})}
        for name, value in sections.items():
            role, dot, setting = name.removeprefix("roles.").partition(".")
            said = {setting: value} if dot else value if isinstance(value, Mapping) else {}
            found.setdefault(role, {}).update({str(key).replace("-", "_"): own for key, own in said.items()})
    return found


def _trained(weights: str, model: str) -> dict[str, Any]:
    """Returns the settings by which only these weights have gradients."""
    if weights == "all":
        return {}
    if weights == "lora":
        return {"actor.lora.rank": RANK}
    if weights != "last-layer":
        return {"actor.train_only": [weights]}
    outline = meta_model(RoleConfig(model=model), head="lm", trainable=False, weights=False)
    blocks = [] if outline is None else list(blocks_of(outline))
    if not blocks:
        raise UserError(f"{model}: nothing says which its last layer is: give a pattern of names in place of last-layer")
    return {"actor.train_only": [f"{blocks[-1]}.*"]}


def _tokens(row: Trajectory) -> tuple[int, ...]:
    return tuple(token for segment in row.completion for token in segment.token_ids)


class _Xray:
    """The work of one X-ray."""

    def __init__(
        self,
        session: TrainableSession,
        roles: Roles,
        batch: SavedBatch,
        candidates: Candidates,
        *,
        named: bool,
        weights: str,
    ):
        self.session, self.batch, self.candidates, self.named, self.weights = session, batch, candidates, named, weights
        self.context = roles.context
        self.rows = batch.rows
        for row in self.rows:
            row.decode = decoder(session.tokenizer)
        self.lengths = [len(_tokens(row)) for row in self.rows]
        self.places = {id(row.segments): number for number, row in enumerate(self.rows)}
        self.samples = {(row.group_id, row.sample, _tokens(row)): number for number, row in enumerate(self.rows)}
        self.logprobs: list[list[float]] = [[] for _ in self.rows]

    def run(self, on_progress: Callable[[str], None]) -> XRay:
        left_out = dict(self.candidates.left_out)
        algorithms: list[Algorithm] = []
        gradients: list[Tensor] = []
        by_name: list[dict[str, Tensor]] = []
        numbers = 0
        for candidate in self.candidates.chosen:
            on_progress(candidate.label)
            try:
                gradient, push = self._one(candidate)
            except (UserError, RunError) as error:
                if self.named:
                    raise type(error)(f"{candidate.label}: {error}") from error
                left_out[candidate.label] = str(error)
                continue
            self._check_room(numbers := sum(part.numel() for part in gradient.values()))
            flat = torch.cat([part.flatten() for part in gradient.values()])
            parts = flat.split([part.numel() for part in gradient.values()])
            by_name.append({name: part.view(gradient[name].shape) for name, part in zip(gradient, parts, strict=True)})
            algorithms.append(Algorithm.of(candidate.label, flat, push))
            gradients.append(flat)
        if not algorithms:
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise UserError(f"no algorithm can be compared: {reasons}")
        pieces = [self._pieces(row) for row in self.rows]
        found = XRay(algorithms, cosines(gradients), left_out, self.rows, pieces, self.logprobs, {}, by_name)
        found.about = self._about(numbers)
        return found

    def _one(self, candidate: Candidate) -> tuple[Mapping[str, Tensor], list[list[float]]]:
        """Returns the gradient of an algorithm, and how it pushes each token of the answers."""
        self._prepare(candidate.plugin)
        watched = Watched(candidate.label, candidate.plugin)
        fresh = [dataclasses.replace(row) for row in self.rows]
        experience = self.session.batch(fresh, loss=watched, reward_weights=self.batch.weights)
        if not bool(experience.loss_mask.any()):
            least = candidate.needs.min_group_size
            compares = f": it compares {least} or more answers of a prompt" if least > 1 else ""
            raise UserError(f"no answer is in its loss{compares}")
        watched.begin(experience)
        gradient = self.session.gradient(experience, loss=watched)
        push = [[0.0] * length for length in self.lengths]
        for number, row in enumerate(experience.trajectories):
            place = self.places.get(id(row.segments), self.samples.get((row.group_id, row.sample, _tokens(row))))
            if place is None:
                raise UserError("it makes rows of its own in place of the answers, whose tokens are not theirs")
            length = self.lengths[place]
            own = watched.push[number, :length].tolist()
            push[place] = [before + value for before, value in zip(push[place], own, strict=True)]
            self.logprobs[place] = watched.logprobs[number, :length].tolist()
        return gradient, push

    def _prepare(self, plugin: Any) -> None:
        """Lets an algorithm check the run, as far as that is not the caller's choice, and begin it."""
        if hasattr(plugin, "check_run"):
            asked = inspect.signature(plugin.check_run).parameters
            given = {
                "config": self.session.config.model_dump(mode="json", by_alias=True) | self.batch.sampled_by,
                "tokenizers": {name: role.tokenizer for name, role in self.session.roles.items()},
            }
            if not self.named or "tokenizers" in asked:
                plugin.check_run(**{name: given[name] for name in asked})
        if not hasattr(plugin, "run_started"):
            return
        if inspect.iscoroutinefunction(plugin.run_started):
            raise UserError("it waits for something when a run starts, and an X-ray starts none")
        plugin.run_started(self.context)
        render = self.context.render
        again = (render is not None and render(dataclasses.replace(row.task, prompt_ids=None)) for row in self.rows)
        if any(list(ids or ()) != list(row.prompt_ids) for ids, row in zip(again, self.rows, strict=True)):
            raise UserError("it writes into prompts, and those of the file were made with other settings of data or agent")

    def _check_room(self, numbers: int) -> None:
        needed = numbers * 4 * len(self.candidates.chosen)
        there = available_memory(torch.device("cpu"))
        if there is not None and needed > there / 2:
            raise UserError(
                f"gradients of {len(self.candidates.chosen)} algorithms by {numbers} weights take {needed / 2**30:.1f} GiB, and"
                f" there are {there / 2**30:.1f} GiB: give --weights last-layer or lora, or fewer algorithms"
            )

    def _pieces(self, row: Trajectory) -> list[str]:
        """Returns the texts of the completion's tokens; of a character in several tokens the last one has it."""
        ids = list(_tokens(row))
        pieces, begin, before = [], 0, ""
        for end in range(1, len(ids) + 1):
            text = self.session.tokenizer.decode(ids[begin:end], skip_special_tokens=False)
            if text.endswith("�") and end < len(ids):
                pieces.append("")
                continue
            pieces.append(text[len(before) :])
            begin, before = (end - 1, self.session.tokenizer.decode(ids[end - 1 : end], skip_special_tokens=False))
        return pieces

    def _about(self, numbers: int) -> dict[str, Any]:
        gaps = []
        for row, own in zip(self.rows, self.logprobs, strict=True):
            place = 0
            for segment in row.completion:
                known = segment.logprobs if segment.kind == "action" else None
                here = own[place : place + len(segment.token_ids)]
                gaps += [abs(now - then) for now, then in zip(here, known or (), strict=False)]
                place += len(segment.token_ids)
        gaps = [gap for gap in gaps if math.isfinite(gap)]
        mean = math.fsum(gaps) / len(gaps) if gaps else 0.0
        notices = list(self.batch.notices)
        if mean > FAR:
            notices.append(
                f"log-probabilities of file and model differ by {mean:.2g} on average, more than {FAR}: this model, with these"
                " settings, is not the one that sampled the answers, and gradients are not those of the run: give that with"
                " --actor.model, or the run's settings of its model"
            )
        return {
            "step": self.batch.step,
            "from": self.batch.where,
            "model": self.batch.model,
            "answers": len(self.rows),
            "prompts": len({row.group_id for row in self.rows}),
            "tokens": sum(row.action_length for row in self.rows),
            "reward_mean": math.fsum(row.reward or 0.0 for row in self.rows) / len(self.rows),
            "weights": self.weights,
            "numbers": numbers,
            "old_logprobs": self.batch.old_logprobs,
            "logprob_gap": {"mean": mean, "max": max(gaps)} if gaps else None,
            "notices": notices,
        }
