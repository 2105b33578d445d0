"""Checks that roles have the same tokens if their token probabilities are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_tokenizer, sizes
from rlhf_host.records.needs import Needs, Output

_SHOWN = 3


def check_vocabularies(roles: Mapping[str, RoleConfig], needs: Needs, tokenizer: Any) -> None:
    """Raises ``UserError`` for a role that is compared or mixed with the actor token by token, but has other tokens than the
    actor, or too few, as far as the files of their models tell.

    Args:
        roles: the actor's settings, and those of each role that the run needs.
        tokenizer: the actor's.
    """
    actor = roles["actor"]
    compared = {output.role for output in needs.outputs if output.what in ("logprobs", "distribution")} & roles.keys()
    compared -= {need.name for need in needs.roles if need.own_tokens}
    mixed = {need.name for need in needs.roles if need.mixes is not None}
    for name in sorted((compared | mixed) - {"actor"}):
        role = roles[name]
        if (role.model, role.tokenizer) == (actor.model, actor.tokenizer):
            continue
        if name in mixed or Output("distribution", role=name) in needs.outputs:
            likeliest = "compared; give a model with the same tokens, or compare the likeliest tokens alone"
            what = "mixed: give a model with the same tokens" if name in mixed else likeliest
            own, theirs = sizes(actor)[0], sizes(role)[0]
            if None not in (own, theirs) and own != theirs:
                raise UserError(
                    f"the role {name!r} ({role.model}) has a vocabulary of {theirs} tokens, and the actor one of {own}: their whole"
                    f" distributions cannot be {what}"
                )
        _compare(name, role, tokenizer)
    for output in needs.outputs:
        if output.top is not None and output.role in roles:
            size = sizes(roles[output.role])[0]
            if size is not None and size < output.top:
                raise UserError(f"the {output.top} likeliest tokens are wanted of a model that has {size}: ask for fewer")


def _compare(name: str, role: RoleConfig, tokenizer: Any) -> None:
    try:
        theirs = load_tokenizer(role).get_vocab()
    except UserError:  # none beside the model
        return
    other = [(token, number) for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number]
    if other:
        other.sort(key=lambda item: item[1])
        shown = ", ".join(f"{token!r} ({number}, there {theirs.get(token, 'none')})" for token, number in other[:_SHOWN])
        raise UserError(
            f"the role {name!r} ({role.model}) has other tokens than the actor: {len(other)} differ, such as {shown}; give a model"
            " with the same tokenizer"
        )
