"""Saved states of sessions: written, found again, and refused where they are of another session or model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_host import Needs, RunError, Scratch, UserError
from rlhf_host.internals import (
    CheckpointKeeper,
    load_checkpoint,
    point_to,
    refuse_foreign,
    refuse_lost,
    remove_directory,
    take_back_replaced,
)

if TYPE_CHECKING:
    from rlhf_host.settings import RunConfig

SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
"""Fields of a model's ``config.json`` in which two models that can take each other's place are equal."""


def write_state(loop: Any, directory: Path) -> Path:
    """Writes the state of a session's loop; returns the checkpoint's directory. Arguments and errors as of ``save``."""
    parts, step = loop.parts, loop.parts.progress.step
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: save takes a directory")
    if (directory / "config.yaml").exists() and directory.resolve() != parts.run_dir.resolve():
        raise UserError(f"{directory} is the directory of a run: save into another one")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory} cannot be made: {error}") from error
    ledger = parts.ledger.path
    state = directory / "checkpoints" / f"step-{step:06d}"
    with Scratch(".saving-", str(directory)) as aside:  # a run removes other states where it writes its own
        keeper = CheckpointKeeper(replace(parts, run_dir=aside), loop.keeper.scoring)
        keeper.note()
        try:
            keeper.save(needed=True)
            keeper.settle(needed=True)
        except RunError as error:
            error.args = (str(error).replace(str(aside), str(directory)),)
            raise
        state.parent.mkdir(exist_ok=True)
        take_back_replaced(directory)
        if state.exists():
            old = state.with_name(f".{state.name}.old")
            remove_directory(old)
            state.rename(old)
        (aside / "checkpoints" / state.name).rename(state)
        remove_directory(state.with_name(f".{state.name}.old"))
    point_to(directory, "checkpoints/last", step)
    if ledger.exists() and ledger.parent != directory:
        shutil.copy2(ledger, directory)
    return state


def find_state(given: Path) -> Path:
    """Returns the directory of a saved state: what ``save`` returned, or of a directory of ``save`` the state saved last. Raises
    ``UserError`` where there is none.
    """
    folder = given / "checkpoints"
    take_back_replaced(given)
    state = given if (given / "state.json").exists() else folder / "last"
    if not state.is_dir():
        states = sorted(each for each in folder.glob("step-*") if each.is_dir())
        if not states:
            raise UserError(f"{given} has no saved state of a session")
        state = states[-1]
    return state.resolve()


def refuse_other(config: RunConfig, needs: Needs, stream: Mapping[str, Any], directory: Path, state: Path) -> None:
    """Raises ``UserError`` for a state that a session cannot go on from.

    Args:
        stream: the session's position in its data.
        directory: holds ``state`` alone.
    """
    try:
        checkpoint = load_checkpoint(directory)
    except UserError as error:
        text = str(error).partition("\n")[0]
        raise UserError(text.replace(str(directory), str(state.parent.parent))) from error
    assert checkpoint is not None
    refuse_foreign(checkpoint)
    refuse_lost(config, needs, checkpoint)
    foreign = f"{state} is a state of another session"
    if (was := _data_of(checkpoint.state["stream"])) != (own := _data_of(stream)):
        raise UserError(f"{foreign}: it has {was}, and this one {own}; a session can start with {state / 'model'}")
    saved, here = (each.get("optimizer") for each in (checkpoint.state["config"]["backend"], config.backend.model_dump()))
    if saved != here:
        raise UserError(f"{foreign}: backend.optimizer is {saved} in it, and {here} here")
    for need in needs.roles:
        then, now = checkpoint.state["config"]["roles"].get(need.name, {}), config.roles.get(need.name)
        if not need.trainable or now is None:
            continue
        lora = now.model_dump(mode="json")["lora"]
        theirs = then.get("lora") or {}
        if odd := next((name for name, value in lora.items() if theirs.get(name) != value), None):
            what = f"{need.name}.lora.{odd} is {theirs.get(odd)} in it, and {lora[odd]} here"
            raise UserError(f"{foreign}: {what}")
        ours, theirs = _shape(Path(str(now.model))), _shape(checkpoint.role(need.name))
        if odd := next((name for name in SHAPE if ours and theirs and ours.get(name) != theirs.get(name)), None):
            what = f"{odd} of {need.name} is {theirs.get(odd)} in it, and {ours.get(odd)} here"
            raise UserError(f"{state} is a state of another model: {what}")


def _data_of(stream: Mapping[str, Any]) -> str:
    """Returns which data a position is in."""
    return ", ".join(f"{size} rows of {name}" for name, size in stream.get("sizes", {}).items() if name) or "no data"


def _shape(model: Path) -> dict[str, Any]:
    """Returns what a model's ``config.json`` says; nothing where there is none."""
    file = model / "config.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}
