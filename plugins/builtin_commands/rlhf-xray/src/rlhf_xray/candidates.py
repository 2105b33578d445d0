"""Algorithms and policy losses that can be compared on sampled answers, and the roles that they need beside the actor."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from rlhf_host import Needs, RoleNeed, RunContext, UserError, hookimpl
from rlhf_host.installed import build, discover, find, load, options_model, recommended

Named = str | Mapping[str, Any]
"""``grpo``, ``rloo/gspo`` (its option ``loss``), or a mapping of ``name`` and options."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm with its options."""

    label: str
    plugin: Any
    needs: Needs


@dataclass(slots=True)
class Candidates:
    """The algorithms to compare, and those that cannot be, with the reason."""

    chosen: list[Candidate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    roles: dict[str, RoleNeed] = field(default_factory=dict)
    """Needs of the chosen ones together, the actor first."""

    @classmethod
    def of(cls, names: Sequence[Named] | None, *, only_actor: bool = False, given: Collection[str] = ()) -> Candidates:
        """Returns those that are named; None: all that are installed and train on sampled answers.

        Args:
            given: roles whose models are known.

        Raises ``UserError`` for a named one that cannot be compared.
        """
        result = cls(roles={"actor": RoleNeed("actor", trainable=True, source=None)})
        for name in installed_names() if names is None else names:
            label = label_of(name)
            try:
                candidate = made(name)
                if (why := result._refusal(candidate, only_actor, given)) is not None:
                    raise UserError(why)
            except UserError as error:
                if names is not None:
                    raise UserError(f"{label}: {error}") from error
                result.left_out[label] = str(error)
                continue
            if any(label == other.label for other in result.chosen):
                raise UserError(f"{label} is named twice")
            result.chosen.append(candidate)
            for role in candidate.needs.roles:
                result.roles.setdefault(role.name, dataclasses.replace(role, follows=None, idle_steps=0))
        if not result.chosen:
            raise UserError("no installed algorithm trains on sampled answers (rlhf plugins --kind algo)")
        return result

    def _refusal(self, candidate: Candidate, only_actor: bool, given: Collection[str]) -> str | None:
        """Returns why it cannot be compared, if it cannot."""
        if candidate.needs.data != "prompts":
            return f"it trains on rows of a data set ({candidate.needs.data}), not on sampled answers"
        for role in candidate.needs.roles:
            if role.name == "actor":
                continue
            if only_actor:
                return f"it needs the role {role.name}, and only the actor is loaded"
            if role.generates:
                return f"it needs the role {role.name}, which answers prompts"
            if role.source != "actor" and role.name not in given:
                return f"it needs the role {role.name}, and nothing says which model that is: give --{role.name}.model DIR"
            known = self.roles.get(role.name)
            if known is not None and (known.trainable, known.head, known.source) != (role.trainable, role.head, role.source):
                return f"its role {role.name} differs from that of another algorithm: compare it alone"
        return None


def installed_names() -> list[str]:
    """Returns every installed algorithm, and the losses of the recommended one or of the first that has some."""
    names = list(dict.fromkeys(info.name for info in discover() if info.kind == "algo"))
    first = recommended("algo", "prompts")
    for name in sorted(names, key=lambda name: name != first):
        try:
            losses, default = losses_of(name)
        except UserError:
            continue
        if losses and made(name).needs.data == "prompts":
            return names + [f"{name}/{loss}" for loss in losses if loss != default]
    return names


def losses_of(name: str) -> tuple[tuple[str, ...], Any]:
    """Returns the values of an algorithm's option ``loss``, none if it has no such option, and the default."""
    field = options_model(load(find("algo", name))).model_fields.get("loss")
    if field is None or get_origin(field.annotation) is not Literal:
        return (), None
    return tuple(map(str, get_args(field.annotation))), field.default


def label_of(name: Named) -> str:
    if isinstance(name, str):
        return name
    options = {key: value for key, value in name.items() if key != "name"}
    return " ".join([str(name.get("name")), *(f"{key}={value}" for key, value in options.items())])


def made(name: Named) -> Candidate:
    """Returns an algorithm with its options. Raises ``UserError`` for one that is not installed, or has no such option."""
    if isinstance(name, str):
        algo, slash, loss = name.partition("/")
        options: dict[str, Any] = {"loss": loss} if slash else {}
        if slash and loss not in (known := losses_of(algo)[0]):
            raise UserError(f"it has no loss {loss!r}; it has {', '.join(known) or 'one alone'}")
    else:
        options = dict(name)
        algo = options.pop("name", None)
        if not isinstance(algo, str):
            raise UserError("a mapping has the name of an algorithm: {'name': 'grpo', 'clip_eps': 0.1}")
    plugin = build(find("algo", algo), options)
    needs = getattr(plugin, "needs", Needs)()
    return Candidate(label_of(name), plugin, needs)


class Roles:
    """The plugin of the session: it needs what all algorithms need, and does nothing."""

    context: RunContext
    """Context for algorithms that prepare themselves when a run starts."""

    def __init__(self, roles: Iterable[RoleNeed]):
        self._roles = tuple(roles)

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self.context = context

    @hookimpl
    def needs(self) -> Needs:
        return Needs(roles=self._roles, rewards=False)
