"""Pictures of rows, tasks and messages: from columns and from parts of messages to the one form that the host uses, messages with
parts ``{"type": "image", "image": Picture}``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rlhf_host.data.bad_rows import Malformed
from rlhf_host.directories import cache_directory
from rlhf_host.errors import UserError, a, near_siblings
from rlhf_host.records.episodes import Message
from rlhf_host.records.pictures import Picture, is_list, is_picture, pillow, png

MARK = "<image>"
"""Text that stands for a picture in prompts of rows with a column of pictures, as in verl's and LLaVA's data."""
COLUMNS = ("image", "images")
_SOURCES = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys of a part under which it has its picture."""
_NET = ("http", "https", "ftp", "s3", "gs", "hf")


def as_messages(
    prompt: str | Sequence[Message], images: Sequence[Any] = (), *, root: Path | None = None, kept: bool = False
) -> list[Message]:
    """Returns a prompt as messages that have their pictures in their parts.

    The pictures of ``images`` take the places of parts without one, or else of the text ``<image>``. If there is neither, they
    come before the words of the first user message, as in TRL.

    Args:
        images: paths, bytes, data URIs, ``PIL.Image`` or mappings of ``datasets``, in the order of their places.
        root: the directory of relative paths; default: the current one.
        kept: pictures that have no file of their own get one in the cache; else they are in memory.

    Raises:
        UserError: a picture cannot be read, there are more pictures than places or fewer, or a part is of another kind.
    """
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages: list[Message] = [dict(message) for message in said]
    given = [picture_of(value, root) for value in images]
    given = [keep(picture) for picture in given] if kept else given
    places = sum(is_picture(part) and _source(part) is None for message in messages for part in _parts(message))
    if given and not places:
        _set_places(messages, len(given))
        places = sum(is_picture(part) and _source(part) is None for message in messages for part in _parts(message))
    if places != len(given):
        raise UserError(
            f"{len(given)} pictures, and {places} places for them: write {{'type': 'image'}} in the messages, or {MARK} in the"
            " text, once for each"
        )
    waiting = iter(given)
    for message in messages:
        if is_list(message.get("content")):
            message["content"] = [_filled(part, waiting, root, kept) for part in message["content"]]
    return messages


def pictured(
    prompt: str | Sequence[Message], images: Sequence[Any], root: Path | None = None, *, kept: bool = True
) -> list[Message]:
    """Returns a row's prompt as messages whose parts have its pictures. Raises ``Malformed`` for pictures that cannot be used."""
    try:
        return as_messages(prompt, images, root=root, kept=kept)
    except UserError as error:
        raise Malformed(str(error)) from None


def picture_of(value: Any, root: Path | None = None) -> Picture:
    """Returns a picture from any form in which data have it.

    Raises:
        UserError: it is on the net, there is no such file, or it is no picture.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, Mapping):
        inner = next(
            (value[name] for name in ("bytes", "path", "url", "image", "image_url") if value.get(name) is not None), None
        )
        if inner is None:
            raise UserError(f"a picture has none of bytes, path and url; it has {', '.join(map(str, value)) or 'nothing'}")
        return picture_of(inner, root)
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture.of_bytes(bytes(value))
    if isinstance(value, str | os.PathLike):
        return _of_text(os.fspath(value), root)
    if isinstance(value, pillow().Image):
        return Picture.of_bytes(png(value))
    raise UserError(f"a picture is {a(type(value).__name__)}: give a path, bytes, a data URI or a PIL.Image")


def keep(picture: Picture) -> Picture:
    """Returns the picture with a file of its own, in the cache, by its content: it is there once, whatever has it."""
    if picture.path is not None:
        return picture
    path = cache_directory() / "pictures" / picture.key[:2] / picture.key
    data = picture.read()
    try:
        if not path.is_file() or path.stat().st_size != len(data):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
                file.write(data)
            Path(file.name).replace(path)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be written: {error.strerror}; set RLHF_CACHE to a directory that can be written and has space"
            " for it"
        ) from error
    return replace(picture, path=str(path), data=None)


def _of_text(text: str, root: Path | None) -> Picture:
    if text.startswith("data:"):
        return Picture.of_uri(text)
    parts = urlsplit(text)
    if parts.scheme in _NET:
        raise UserError(f"{text[:80]}: pictures are not fetched from the net: download it, and give its path")
    path = Path(unquote(parts.path) if parts.scheme == "file" else text).expanduser()
    path = path if path.is_absolute() or root is None else root / path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}{near_siblings(path) if path.parent.is_dir() else ''}") from error
    try:
        return Picture.of_bytes(data, str(path.absolute()))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if is_list(content) else ()


def _source(part: Mapping[str, Any]) -> Any:
    """Returns what a part says its picture is; None: it only marks the place."""
    return next(
        (part[name] for name in ("image", "image_url", "url", "path", "base64", "bytes") if part.get(name) is not None), None
    )


def _filled(part: Any, waiting: Iterator[Picture], root: Path | None, kept: bool) -> Any:
    if not is_picture(part):
        return part
    source = _source(part)
    if part.get("base64") is source and isinstance(source, str) and not source.startswith("data:"):
        source = f"data:;base64,{source}"
    picture = next(waiting) if source is None else picture_of(source, root)
    return {"type": "image", "image": keep(picture) if kept else picture}


def _set_places(messages: list[Message], count: int) -> None:
    """Turns the text ``<image>`` into parts; without any, puts ``count`` parts before the first user message's words."""
    marked = False
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        if any(MARK in _words(part) for part in parts):
            message["content"], marked = [piece for part in parts for piece in _split(part)], True
    if not marked:
        first = next((message for message in messages if message.get("role") == "user"), None)
        if first is None:
            raise UserError(f"{count} pictures, and no user message that could have them")
        content = first.get("content")
        words = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        first["content"] = [*({"type": "image"} for _ in range(count)), *words]


def _words(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else ""


def _split(part: Any) -> Iterator[Any]:
    """Yields a part's texts between the marks, and a part for each mark."""
    if MARK not in (text := _words(part)):
        yield part
        return
    for number, piece in enumerate(text.split(MARK)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}
