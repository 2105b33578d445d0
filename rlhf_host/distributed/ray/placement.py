"""Placement: which roles share which devices, from ``actor+reference+rollout=4`` to bundles of devices in a cluster."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_host.config.tree import ROLES, SHORTHANDS
from rlhf_host.errors import UserError, near_matches
from rlhf_host.protocols import RuntimeStart
from rlhf_host.records.needs import Needs

Kind = Literal["cpu", "gpu"]

ROLLOUT = "rollout"
"""Name of the engines among the roles of a placement."""

STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "strict_pack": "STRICT_PACK", "strict_spread": "STRICT_SPREAD"}
KINDS: tuple[Kind, ...] = ("cpu", "gpu")

_BLOCK = re.compile(r"(?P<roles>[^=]+)=(?:(?P<nodes>\d+)x)?(?P<devices>\d+)(?P<words>(?::[a-z_]+)*)")


@dataclass(frozen=True, slots=True)
class Block:
    """One ``--placement``: these roles share ``nodes`` × ``devices`` devices, or ``devices`` on any nodes."""

    roles: tuple[str, ...]
    devices: int
    nodes: int | None = None
    kind: Kind | None = None
    strategy: str | None = None

    @property
    def total(self) -> int:
        return self.devices * (self.nodes or 1)

    @property
    def text(self) -> str:
        return f"{'+'.join(self.roles)}={f'{self.nodes}x' if self.nodes else ''}{self.devices}"


@dataclass(frozen=True, slots=True)
class Place:
    """Devices shared by some roles: a worker on each device, and engines where the rollout is here too."""

    roles: tuple[str, ...]
    """Models of the workers; none if there are only engines."""
    kind: Kind
    bundles: tuple[int, ...]
    """Devices per bundle; a bundle is on one node."""
    strategy: str
    engines: tuple[tuple[int, ...], ...] = ()
    """Devices of every engine, by number within the place."""
    sampled: tuple[str, ...] = ()
    """What has engines on these devices: ``rollout``, and frozen roles that generate. Each has one on every entry of
    ``engines``.
    """

    @property
    def devices(self) -> int:
        return sum(self.bundles)

    @property
    def name(self) -> str:
        return "+".join((*self.roles, *((ROLLOUT,) if ROLLOUT in self.sampled else ())))

    @property
    def size(self) -> str:
        """Its devices as a placement names them: ``4``, or ``2x4`` for 4 on each of 2 nodes."""
        apart = self.strategy == "STRICT_SPREAD" and len(self.bundles) > 1
        return f"{len(self.bundles)}x{self.bundles[0]}" if apart else f"{self.devices}"

    @property
    def shared(self) -> bool:
        """True if workers and engines are on the same devices."""
        return bool(self.sampled and self.roles)

    def bundle_of(self, device: int) -> int:
        """Returns the bundle with the place's device number ``device``."""
        for number, size in enumerate(self.bundles):
            if device < size:
                return number
            device -= size
        raise IndexError(device)


@dataclass(frozen=True, slots=True)
class Node:
    """Devices of one machine, as the cluster counts them."""

    name: str
    cpu: int
    gpu: int = 0

    def has(self, kind: Kind) -> int:
        return self.gpu if kind == "gpu" else self.cpu


def parse_placement(texts: Sequence[str]) -> list[Block]:
    """Parses ``ROLE+ROLE=[NODESx]DEVICES[:cpu|gpu][:pack|spread|strict_pack|strict_spread]``, one block each.

    Raises:
        UserError: the text has another form, or a role is in two blocks.
    """
    blocks: list[Block] = []
    placed: dict[str, str] = {}
    for text in texts:
        block = _parse_block(text)
        for role in block.roles:
            if role in placed:
                raise UserError(f"placement: {role} is placed twice, in {placed[role]!r} and in {text!r}; name it once")
            placed[role] = text
        blocks.append(block)
    return blocks


def _parse_block(text: str) -> Block:
    match = _BLOCK.fullmatch(text.replace(" ", ""))
    if match is None:
        raise UserError(
            f"placement {text!r} is not ROLE+ROLE=DEVICES or ROLE=NODESxDEVICES, as in actor+rollout=4 or critic=2x4"
        )
    roles = tuple(SHORTHANDS.get(role, role) for role in match["roles"].replace("-", "_").split("+"))
    if "" in roles or len(set(roles)) < len(roles):
        raise UserError(f"placement {text!r}: name each role once, joined by +")
    nodes = None if match["nodes"] is None else int(match["nodes"])
    if int(match["devices"]) == 0 or nodes == 0:
        raise UserError(f"placement {text!r} asks for no device at all; give at least 1")
    kind: Kind | None = None
    strategy: str | None = None
    for word in filter(None, match["words"].split(":")):
        if word in KINDS and kind is None:
            kind = word  # type: ignore[assignment]
        elif word in STRATEGIES and strategy is None:
            strategy = STRATEGIES[word]
        else:
            words = (*KINDS, *STRATEGIES)
            hint = near_matches(word, words) or f"; after ':' come {', '.join(words)}, one of each"
            raise UserError(f"placement {text!r}: {word!r} is not understood{hint}")
    return Block(roles, int(match["devices"]), nodes, kind, strategy)


def plan_placement(
    blocks: Sequence[Block],
    roles: Sequence[str],
    *,
    per_engine: int | None = 1,
    sampled: Sequence[str] = (ROLLOUT,),
    devices: Mapping[str, str] | None = None,
    default_kind: Kind = "cpu",
) -> list[Place]:
    """Returns where every role of a run is placed. A role in no block is placed with the actor, or on one device of its own.

    Args:
        roles: roles that the run needs, without the rollout.
        per_engine: devices of one engine (tensor × pipeline parallel); ``None``: nothing is sampled.
        sampled: what has engines: the rollout, and frozen roles that generate, beside their workers.
        devices: the option ``device`` of each role. It is the kind of blocks that name none, and the actor's that of engines.
        default_kind: kind of device where nothing says one.

    Raises:
        UserError: unknown or unneeded roles, or devices that cannot be divided evenly among engines.
    """
    wanted = [*roles] if per_engine is None else [*roles, ROLLOUT]
    for block in blocks:
        for role in block.roles:
            if role not in wanted and role not in ROLES:
                known = sorted({*wanted, *ROLES})
                raise UserError(f"placement {block.text}: no chosen plugin knows the role {role!r}{near_matches(role, known)}")
        if not any(role in wanted for role in block.roles):
            raise UserError(
                f"placement {block.text}: no chosen plugin needs {' or '.join(block.roles)}; leave it out"
                f" (this run has {', '.join(wanted)})"
            )
    named = {role for block in blocks for role in block.roles}
    left = tuple(role for role in wanted if role not in named)
    home = next((block for block in blocks if "actor" in block.roles), None)
    whole = list(blocks)
    if left and home is None:
        whole.insert(0, Block(left, per_engine if per_engine and {*sampled} & {*left} else 1))
        left = ()
    said = {role: kind for role, device in (devices or {}).items() if (kind := kind_of(device)) is not None}

    def kind_there(block: Block) -> Kind:
        return next((said[role] for role in (*block.roles, "actor") if role in said), default_kind)

    return [_place(block, left if block is home else (), wanted, sampled, per_engine, kind_there(block)) for block in whole]


def kind_of(device: str) -> Kind | None:
    """Returns the kind of device that a role's option ``device`` says; ``None`` for ``auto``."""
    return None if device == "auto" else "gpu" if device.startswith("cuda") else "cpu"


def unsaid(as_cpu: Sequence[Place], as_gpu: Sequence[Place]) -> list[Place]:
    """Returns the places whose kind of device nothing says: those that differ between two plans with other default kinds."""
    return [gpu for cpu, gpu in zip(as_cpu, as_gpu, strict=True) if cpu.kind != gpu.kind]


def _place(
    block: Block, more: tuple[str, ...], wanted: Sequence[str], sampled: Sequence[str], per_engine: int | None, default: Kind
) -> Place:
    here = {*block.roles, *more}
    sampled = tuple(name for name in sampled if name in here and per_engine)
    unit = per_engine if per_engine and sampled else 1
    if block.total % unit or (block.nodes and block.devices % unit):
        where = f"{block.devices} on each node" if block.nodes else f"{block.total}"
        raise UserError(
            f"placement {block.text}: an engine takes {unit} devices (tensor × pipeline parallel), {sampled[0]} has engines here,"
            f" and {where} do not divide by {unit}; ask for a multiple of {unit}"
        )
    # An engine's devices must be on one node.
    bundles = (block.devices,) * block.nodes if block.nodes else (unit,) * (block.total // unit)
    strategy = block.strategy or ("STRICT_SPREAD" if block.nodes and block.nodes > 1 else "PACK")
    engines = tuple(tuple(range(begin, begin + unit)) for begin in range(0, block.total, unit)) if sampled else ()
    held = tuple(role for role in wanted if role in here and role != ROLLOUT)
    return Place(held, block.kind or default, bundles, strategy, engines, sampled)


def shards_of(place: Place, start: RuntimeStart) -> int:
    """Returns how many neighbouring devices share the rows of a rank there: those that the backend splits a trained model over,
    or those that compute parts of each row.

    Raises:
        UserError: two roles ask for different numbers, or the devices are not a multiple.
    """
    trained = any(need.trainable for need in start.needs.roles if need.name in place.roles)
    split = start.backend.build().traits.parts if trained else 1
    asked = {name: start.roles[name].sequence_parallel for name in place.roles if start.roles[name].sequence_parallel > 1}
    if len(set(asked.values())) > 1:
        raise UserError(
            f"placement {place.name}: its roles share devices, and ask for different numbers of them for a row"
            f" ({', '.join(f'{name}.sequence_parallel {count}' for name, count in asked.items())}): set one number"
        )
    name, parts = next(iter(asked.items()), ("", 1))
    if parts > 1 and split > 1:
        raise UserError(
            f"backend {start.backend.name} splits every model over {split} devices, and {name}.sequence_parallel {parts} splits"
            " its rows: leave one of them out"
        )
    does = f"{name}.sequence_parallel splits rows" if asked else f"backend {start.backend.name!r} splits every model"
    if place.devices % (count := max(parts, split)):
        raise UserError(
            f"placement {place.name}={place.devices}: {does} over {count} devices, and {place.devices} do not divide by {count};"
            f" ask for a multiple of {count}"
        )
    return count


def refuse_apart(places: Sequence[Place], needs: Needs) -> None:
    """Raises ``UserError`` if a role's whole vocabulary, which is never sent, is compared with the actor's in another place."""
    home = next((place.roles for place in places if "actor" in place.roles), ())
    for role in (output.role for output in needs.outputs if output.what == "distribution" and output.top is None):
        if role not in home:
            raise UserError(
                f"placement: the role {role!r} is compared with the actor over the whole vocabulary, so they have to be in one"
                f" place: name them together, as in --placement actor+{role}=DEVICES"
            )


def shortage(places: Sequence[Place], nodes: Sequence[Node], *, remedy: str) -> str | None:
    """Returns why the cluster can never hold the placement, with the sum shown; None if it can, as far as counting tells.

    Args:
        remedy: advice besides asking for less.
    """
    units: tuple[tuple[Kind, str], ...] = (("gpu", "GPU"), ("cpu", "CPU"))
    for kind, unit in units:
        # A device that computes on a GPU takes one CPU too, for its process.
        asking = [place for place in places if kind == "cpu" or place.kind == "gpu"]
        need, have = sum(place.devices for place in asking), sum(node.has(kind) for node in nodes)
        if need > have:
            parts = " + ".join(f"{place.name} {place.devices}" for place in asking)
            held = ", ".join(f"{node.name} {node.has(kind)}" for node in nodes)  # type: ignore[arg-type]
            return (
                f"the placement needs {need} {unit}s ({parts}), and the cluster has {have} ({held}): ask for less, or {remedy}"
            )
    for place in places:
        size, count = max(place.bundles), len(place.bundles)
        apart, together = place.strategy == "STRICT_SPREAD", place.strategy == "STRICT_PACK"
        there = [min(node.has(place.kind), node.cpu) // size for node in nodes]
        room = sum(map(bool, there)) if apart else max(there, default=0) if together else sum(there)
        if room < count:
            unit = f"{place.kind.upper()}s" if size > 1 else place.kind.upper()
            held = ", ".join(f"{node.name} {node.has(place.kind)}" for node in nodes)
            bundles = "different nodes with" if apart else "bundles on one node of" if together else "bundles of"
            return (
                f"the placement of {place.name} needs {count} {bundles} {size} {unit}, and the cluster has room for {room}"
                f" ({held}): ask for less, or {remedy}"
            )
    return None


def asked(places: Sequence[Place]) -> str:
    """Returns what a cluster is asked for: ``2 × 1 GPU with 1 CPU (actor+rollout, PACK)``."""
    parts = []
    for place in places:
        size = max(place.bundles)
        units = f"{size} {'CPU' if place.kind == 'cpu' else 'GPU'}{'s' * (size > 1)}"
        units += f" with {size} CPU{'s' * (size > 1)}" if place.kind == "gpu" else ""
        parts.append(f"{len(place.bundles)} × {units} ({place.name}, {place.strategy})")
    return " and ".join(parts)


def rank_order(nodes: Sequence[str], gpus: Sequence[Sequence[str]]) -> list[int]:
    """Returns the numbers of a place's processes in the order of their ranks: those of one machine are neighbours, in the order
    of its GPUs, so that what neighbours exchange stays on the machine. Machines keep the order of their first processes.

    Args:
        nodes: machine of each process.
        gpus: GPUs of each process, as Ray names them: numbers or other texts.
    """

    def key(process: int) -> tuple[int, list[tuple[float, str]], int]:
        numbers = [(int(name) if name.isdecimal() else math.inf, name) for name in gpus[process]]
        return nodes.index(nodes[process]), numbers, process

    return sorted(range(len(nodes)), key=key)


def cpu_shares(nodes: Sequence[str], cpus: Mapping[str, int]) -> list[int]:
    """Returns the CPUs of each worker: those of its machine, divided by the workers there; at least one.

    Args:
        nodes: machine of each worker of the run.
        cpus: CPUs of each machine.
    """
    there = Counter(nodes)
    return [max(1, cpus.get(node, 1) // there[node]) for node in nodes]


def describe(places: Sequence[Place]) -> str:
    """Returns one line: ``actor+rollout on 2 CPUs (2 engines), critic on 1 CPU``."""
    lines = []
    for place in places:
        unit = place.kind.upper() + ("s" if place.devices > 1 else "")
        count = len(place.engines)
        engines = [f"{count} engine{'s' * (count > 1)}{f' of {name}' * (name != ROLLOUT)}" for name in place.sampled]
        lines.append(f"{place.name} on {place.devices} {unit}" + f" ({', '.join(engines)})" * bool(engines))
    return ", ".join(lines)
