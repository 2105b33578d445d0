"""Pictures of prompts and observations, known by their content. Nothing here imports torch."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import unquote

from rlhf_host.errors import UserError

MARK = "<image>"
"""Text that stands for a picture in prompts of rows with a column of pictures, as in verl's and LLaVA's data."""
PARTS = ("image", "image_url", "input_image")
"""Types of parts of a message that are pictures, as in transformers' chat templates and in OpenAI's API."""
_KEY = 32  # letters of a sha256
_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)  # of EXIF
_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of Pillow that PNG files have."""
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, IndexError)
"""What Pillow raises for files that are cut or damaged."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The content of a picture file. It is read where it is used, so a row that refers to it holds no pixels."""

    key: str
    """The first letters of the sha256 of its bytes: equal keys are equal pictures."""
    width: int = field(compare=False)
    """Pixels, as people see it: after its orientation is applied."""
    height: int = field(compare=False)
    path: str | None = field(default=None, compare=False)
    """The file that has it; ``None``: ``data`` has it."""
    data: bytes | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_bytes(cls, data: bytes, path: str | None = None) -> Picture:
        """Returns the picture that these bytes are.

        Args:
            path: the file that has them; default: they are kept in memory.

        Raises:
            UserError: Pillow cannot read them as a picture.
        """
        width, height = _size(data)
        return cls(hashlib.sha256(data).hexdigest()[:_KEY], width, height, path, None if path is not None else data)

    @classmethod
    def of_uri(cls, uri: str) -> Picture:
        """Returns the picture of a data URI (RFC 2397). Raises ``UserError`` for one that cannot be read, and for other texts."""
        head, comma, body = uri.partition(",")
        if not comma or not head.lower().startswith("data:"):
            raise UserError(f"it is no data URI of a picture: {uri[:40]!r}")
        try:
            base = head.lower().endswith(";base64")
            data = base64.b64decode("".join(body.split()), validate=True) if base else unquote(body).encode("latin-1")
        except (binascii.Error, ValueError) as error:
            raise UserError(f"a data URI that cannot be read: {error}: {uri[:40]!r}") from error
        return cls.of_bytes(data)

    def uri(self) -> str:
        """Returns the picture as a data URI, as OpenAI's API takes it."""
        data = self.read()
        return f"data:image/{format_of(data)};base64,{base64.b64encode(data).decode()}"

    def read(self) -> bytes:
        """Returns the file's bytes. Raises ``UserError`` if the file is gone, or has another content by now."""
        if self.path is None:
            assert self.data is not None
            return self.data
        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise UserError(f"{self.path}: the picture cannot be read any more: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest()[:_KEY] != self.key:
            raise UserError(f"{self.path} has changed since its row was read: a run needs the pictures that it began with")
        return data

    def load(self) -> Any:
        """Returns the picture as a ``PIL.Image`` in RGB, upright, on white where it is transparent."""
        from PIL import ImageOps

        data = self.read()
        image = _open(data)
        _decode(image, len(data))
        ImageOps.exif_transpose(image, in_place=True)
        return _in_colours(image)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process may not have the file, so the bytes travel; once, however many rows of a message have it."""
        return Picture, (self.key, self.width, self.height, None, self.read())


class Pictured(tuple[int, ...]):
    """Tokens of a prompt, with the pictures that some of them stand for.

    Engines whose traits say ``images`` get such prompts; to all others they would be tokens like any.
    """

    images: tuple[Picture, ...]
    """In the order of their tokens."""
    begins: tuple[int, ...]
    """For each, a place before which its tokens are not: where the part begins that brought it."""

    def __new__(cls, token_ids: Iterable[int], images: Sequence[Picture], begins: Sequence[int] = ()) -> Pictured:
        made = super().__new__(cls, token_ids)
        made.images, made.begins = tuple(images), tuple(begins) or (0,) * len(images)
        return made

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.images == images_of(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.images))

    def __reduce__(self) -> tuple[Any, ...]:
        return Pictured, (tuple(self), self.images, self.begins)


def with_images(token_ids: Sequence[int], shown: Sequence[Shown]) -> Sequence[int]:
    """Returns tokens with pictures; the tokens themselves if there are none."""
    return Pictured(token_ids, [picture for _, picture in shown], [begin for begin, _ in shown]) if shown else token_ids


def images_of(token_ids: object) -> tuple[Picture, ...]:
    """Returns the pictures of a prompt's tokens."""
    return token_ids.images if isinstance(token_ids, Pictured) else ()


def shown_in(token_ids: object) -> list[Shown]:
    """Returns the pictures of a prompt's tokens, each with the place where its part begins."""
    return list(zip(token_ids.begins, token_ids.images, strict=True)) if isinstance(token_ids, Pictured) else []


def place_of(token_ids: Sequence[int], own: Sequence[int], begin: int = 0) -> int | None:
    """Returns where the tokens of a picture begin, at or after a place; None: they are not there."""
    wanted = list(own)
    for at in range(begin, len(token_ids) - len(own) + 1):
        if token_ids[at] == own[0] and list(token_ids[at : at + len(own)]) == wanted:
            return at
    return None


def positions_of(token_ids: Sequence[int], pictures: Iterable[Sequence[int]], begins: Iterable[int]) -> list[int]:
    """Returns where the tokens of pictures begin, one after the other, up to the first that is not there.

    Args:
        pictures: the tokens of each.
        begins: for each, a place before which they are not.
    """
    places: list[int] = []
    end = 0
    for own, begin in zip(pictures, begins, strict=False):
        if (place := place_of(token_ids, own, max(begin, end))) is None:
            break
        places.append(place)
        end = place + len(own)
    return places


Shown: TypeAlias = tuple[int, Picture]
"""A picture, after a place before which its tokens are not. Tokens that the policy sampled may look like a picture's."""


def pictures_in(messages: str | Iterable[Mapping[str, Any]]) -> tuple[Picture, ...]:
    """Returns the pictures of messages whose parts have them, in order."""
    if isinstance(messages, str):
        return ()
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if is_list(content) for part in content)
    return tuple(part["image"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("image"), Picture))


def is_list(content: Any) -> TypeGuard[Sequence[Any]]:
    """Returns True for a content of parts."""
    return isinstance(content, Sequence) and not isinstance(content, str | bytes)


def is_picture(part: Any) -> bool:
    """Returns True for a message's part that stands for a picture."""
    return isinstance(part, Mapping) and part.get("type") in PARTS


def png(image: Any) -> bytes:
    """Returns a ``PIL.Image`` as the bytes of a PNG file, upright. Raises ``UserError`` for one that has no such form."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        kept = upright if upright.mode in _PNG else upright.convert("RGBA" if upright.mode in ("PA", "La", "RGBa") else "RGB")
        kept.save(file, "PNG")
    except _UNREADABLE as error:
        size = f"{image.width}×{image.height} pixels"
        raise UserError(f"a picture of the mode {image.mode} and {size} cannot be used: {error}") from error
    return file.getvalue()


def _in_colours(image: Any) -> Any:
    """Returns a picture in RGB."""
    if image.mode.startswith("I"):  # of 16 bits: Pillow would cut what is above 255
        image = image.point(lambda value: value / 256).convert("L")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        above = image.convert("RGBA")
        image = pillow().new("RGBA", above.size, (255, 255, 255, 255))
        image.alpha_composite(above)
    return image.convert("RGB")


def format_of(data: bytes) -> str:
    """Returns the format of a picture's bytes, such as ``png``."""
    return str(_open(data).format).lower()


def pillow() -> Any:
    """Returns the module ``PIL.Image``. Raises ``UserError`` where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("pictures need Pillow: pip install 'rlhf-host[pictures]'") from error
    return Image


def _size(data: bytes) -> tuple[int, int]:
    """Returns width and height of a picture that can be read to its end."""
    image = _open(data)
    width, height = image.size
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise UserError(f"{len(data):,} bytes have {frames} pictures, and one is wanted: it moves, or has pages")
    image.draft("RGB", (1, 1))  # a JPEG file is decoded small, which finds a cut one as well
    _decode(image, len(data))
    turned = image.getexif().get(_ORIENTATION, 1) in _SIDEWAYS
    return (height, width) if turned else (width, height)


def _open(data: bytes) -> Any:
    image = pillow()
    try:
        return image.open(io.BytesIO(data))
    except (*_UNREADABLE, image.DecompressionBombError) as error:
        raise _unreadable(len(data), error) from error


def _decode(image: Any, size: int) -> None:
    try:
        image.load()
    except _UNREADABLE as error:
        raise _unreadable(size, error) from error


def _unreadable(size: int, error: Exception) -> UserError:
    reason = "" if type(error).__name__ == "UnidentifiedImageError" else f": {error}"
    return UserError(f"{size:,} bytes are no picture that Pillow can read{reason}")
