"""Contents of a picture: a question about some shapes or a digit, its answer, and the drawing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 230),
    "yellow": (240, 220, 40),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
_GROUND = (105, 150)
"""Greys of the ground, between the colours of all shapes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing in a picture: a shape, or a digit as text."""

    what: str
    colour: str
    x: int
    y: int
    """Its centre in pixels."""
    radius: int


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture that can be drawn, and what is asked about it."""

    question: str
    answer: str
    marks: tuple[Mark, ...]


def count_scene(rng: random.Random, size: int, most: int) -> Scene:
    """Asks how many shapes there are, or how many of one colour."""
    total, wanted = rng.randint(1, most), rng.choice([None, *COLOURS])
    if wanted is None:
        question, right = "How many shapes are there?", total
        colours = rng.choices(list(COLOURS), k=total)
    else:
        question, right = f"How many shapes are {wanted}?", rng.randint(0, total)
        colours = [wanted] * right + rng.choices([colour for colour in COLOURS if colour != wanted], k=total - right)
    return Scene(question, str(right), _placed(rng, size, [(rng.choice(SHAPES), colour) for colour in colours]))


def shape_scene(rng: random.Random, size: int, most: int) -> Scene:
    """Asks which shape it is."""
    mark = _alone(rng, size, rng.choice(SHAPES))
    return Scene("Which shape is this?", mark.what, (mark,))


def colour_scene(rng: random.Random, size: int, most: int) -> Scene:
    """Asks which colour a shape has."""
    mark = _alone(rng, size, rng.choice(SHAPES))
    return Scene("Which colour is this?", mark.colour, (mark,))


def digit_scene(rng: random.Random, size: int, most: int) -> Scene:
    """Asks which digit is written."""
    mark = _alone(rng, size, str(rng.randrange(10)))
    return Scene("Which digit is this?", mark.what, (mark,))


SCENES: dict[str, Callable[[random.Random, int, int], Scene]] = {
    "count": count_scene,
    "shape": shape_scene,
    "colour": colour_scene,
    "digit": digit_scene,
}
"""By the kind of task. Their arguments: the source of all choices, the size of the picture in pixels, the most shapes."""

QUESTIONS = (
    "How many shapes are there?",
    *(f"How many shapes are {colour}?" for colour in COLOURS),
    "Which shape is this?",
    "Which colour is this?",
    "Which digit is this?",
)


def draw(scene: Scene, size: int, noise: float, rng: random.Random) -> Image.Image:
    """Returns the picture: RGB, square.

    Args:
        noise: share of random pixels in the mixture, from 0 to 1.
        rng: of the ground and the noise.
    """
    grey = rng.randint(*_GROUND)
    picture = Image.new("RGB", (size, size), (grey, grey, grey))
    pen = ImageDraw.Draw(picture)
    for mark in scene.marks:
        _draw_mark(pen, mark)
    if not noise:
        return picture
    return Image.blend(picture, Image.frombytes("RGB", picture.size, rng.randbytes(3 * size * size)), noise)


def _draw_mark(pen: ImageDraw.ImageDraw, mark: Mark) -> None:
    x, y, radius, colour = mark.x, mark.y, mark.radius, COLOURS[mark.colour]
    if mark.what == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif mark.what == "square":
        half = round(0.8 * radius)  # the areas of all shapes of a radius are similar
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif mark.what == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    else:
        pen.text((x, y), mark.what, fill=colour, font=ImageFont.load_default(2 * radius), anchor="mm")


def _alone(rng: random.Random, size: int, what: str) -> Mark:
    radius = rng.randint(round(0.2 * size), round(0.35 * size))
    x, y = (rng.randint(radius, size - 1 - radius) for _ in range(2))
    return Mark(what, rng.choice(list(COLOURS)), x, y, radius)


def _placed(rng: random.Random, size: int, things: list[tuple[str, str]]) -> tuple[Mark, ...]:
    """Returns the things, each a shape and a colour, at random places where none touches another."""
    while True:
        marks: list[Mark] = []
        for what, colour in things:
            for _ in range(50):
                radius = rng.randint(round(0.08 * size), round(0.13 * size))
                x, y = (rng.randint(radius, size - 1 - radius) for _ in range(2))
                if all(max(abs(x - other.x), abs(y - other.y)) > radius + other.radius + 1 for other in marks):
                    marks.append(Mark(what, colour, x, y, radius))
                    break
        if len(marks) == len(things):
            return tuple(marks)
