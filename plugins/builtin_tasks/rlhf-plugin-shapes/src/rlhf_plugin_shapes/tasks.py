"""Tasks that are drawn when they are read."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Task, hookimpl
from rlhf_plugin_shapes.scenes import SCENES, Scene, draw

Kind: TypeAlias = Literal["count", "shape", "colour", "digit", "mixed"]


class Shapes:
    """Questions about pictures of shapes, which are drawn: how many there are, of which shape or colour, or which digit is
    written.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        kind: Kind = Field("colour", description="what is asked; mixed: all")
        tasks: int = Field(10_000, ge=1, description="training tasks")
        eval_tasks: int = Field(200, ge=1, description="held-out tasks")
        size: int = Field(56, ge=28, le=2048, description="width and height of a picture in pixels")
        most: int = Field(5, ge=1, le=9, description="most shapes in a picture that asks how many")
        noise: float = Field(0.1, ge=0, le=0.9, description="share of random pixels in each picture's mixture")
        instruction: str = Field("", description="text behind every question, such as 'Answer with one word or number.'")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Sequence[Task]:
        return DrawnTasks(self.options, split, seed)


class DrawnTasks(Sequence[Task]):
    """The tasks of a split. Each depends on the options, the seed, the split and its index alone."""

    def __init__(self, options: Shapes.Options, split: str, seed: int):
        self.options, self.split, self.seed = options, split, seed

    def __len__(self) -> int:
        return self.options.eval_tasks if self.split == "eval" else self.options.tasks

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} tasks; no. {index} is none of them")
        return self._task(index % len(self))

    def _task(self, index: int) -> Task:
        options, rng = self.options, random.Random(f"{self.seed}/{self.split}/{index}")
        kind = rng.choice(list(SCENES)) if options.kind == "mixed" else options.kind
        scene = SCENES[kind](rng, options.size, options.most)
        while held_out(scene) != (self.split == "eval"):
            scene = SCENES[kind](rng, options.size, options.most)
        picture = draw(scene, options.size, options.noise, rng)
        question = scene.question + (f"\n{options.instruction}" if options.instruction else "")
        content: list[dict[str, Any]] = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        return Task([{"role": "user", "content": content}], scene.answer, {"kind": kind})


def held_out(scene: Scene) -> bool:
    """Returns True for one drawing in four, whatever the seed: no run trains on a picture that another run is judged by."""
    return zlib.crc32(repr(scene.marks).encode()) % 4 == 0
