"""Pictures of rows, tasks and messages: from columns and from parts of messages to the one form that the host uses, messages with
parts ``{"type": "image", "image": Picture}``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from rlhf_host.data.bad_rows import Malformed
from rlhf_host.directories import cache_directory, unwritable_cache
from rlhf_host.errors import UserError, a, first_line, near_siblings
from rlhf_host.records.episodes import Message
from rlhf_host.records.pictures import MARK, Picture, is_list, is_picture, pictures_in, pillow, png

_SOURCES = ("bytes", "image", "image_url", "url", "path", "base64")
"""Keys of a part under which it has its picture."""
_LONGEST_PATH = 1000  # letters
FETCH_S, MOST_BYTES = 30, 64 << 20
"""Seconds to wait for a picture of the net, and its most bytes."""
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_NET = ("http", "https", "ftp", "s3", "gs", "hf")


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of pictures, and the place of those without a file."""

    root: Path | None = None
    """The directory of relative paths; None: the current one."""
    kept: bool = False
    """Pictures that have no file of their own get one in the cache; else they are in memory."""
    fetch: bool = False
    """Pictures at addresses of the net are fetched, once."""


MEMORY, ROWS = Origin(), Origin(kept=True)
"""Pictures of programs, and of rows."""


def as_messages(prompt: str | Sequence[Message], images: Sequence[Any] = (), origin: Origin = MEMORY) -> list[Message]:
    """Returns a prompt as messages that have their pictures in their parts.

    The pictures of ``images`` take the places of parts without one, or else of the text ``<image>``. If there is neither, they
    come before the words of the first user message, as in TRL.

    Args:
        images: paths, bytes, data URIs, ``PIL.Image`` or mappings of ``datasets``, in the order of their places.
        origin: of the pictures; default: a program.

    Raises:
        UserError: a picture cannot be read, there are more pictures than places or fewer, or a part is of another kind.
    """
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages: list[Message] = [dict(message) for message in said]
    given = [picture_of(value, origin) for value in images]
    for message in messages:
        if is_list(content := message.get("content")):
            message["content"] = [_with_its_picture(part, origin) for part in content]
    own = list(pictures_in(messages))
    if given and own and not _bare(messages):
        if own != given:
            raise UserError(
                f"the messages have {_count(len(own))} of their own, and beside them there {_are(len(given))} of another content:"
                " leave one of them out"
            )
        given = []
    if given and not _bare(messages):
        _number_pictures(messages, len(given))
    if (places := _bare(messages)) != len(given):
        raise UserError(
            f"{_count(len(given))}, and {_count(places, 'place')} for pictures: write {{'type': 'image'}} in the messages, or"
            f" {MARK} in the text, once for each"
        )
    waiting = iter(given)
    for message in messages if given else ():
        if is_list(content := message.get("content")):
            message["content"] = [{**part, "image": next(waiting)} if _is_bare(part) else part for part in content]
    return messages


def pictured(prompt: str | Sequence[Message], images: Sequence[Any], origin: Origin) -> list[Message]:
    """Returns a row's prompt as messages whose parts have its pictures. Raises ``Malformed`` for pictures that cannot be used."""
    try:
        return as_messages(prompt, images, origin)
    except UserError as error:
        way = " (data.ignore leaves the column unread)" if images else ""
        raise Malformed(f"{error}{way}") from None


def picture_of(value: Any, origin: Origin = MEMORY) -> Picture:
    """Returns a picture from any form in which data have it.

    Raises:
        UserError: it is on the net, there is no such file, or it is no picture.
    """
    picture = _read(value, origin)
    return keep(picture) if origin.kept else picture


def _read(value: Any, origin: Origin) -> Picture:
    if isinstance(value, Picture):
        return value
    if isinstance(value, Mapping):
        if (inner := _source(value)) is None:
            raise UserError(f"a picture has none of bytes, path and url; it has {', '.join(map(str, value)) or 'nothing'}")
        return _read(inner, origin)
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture.of_bytes(bytes(value))
    if isinstance(value, str | os.PathLike):
        return _of_text(os.fspath(value), origin)
    if isinstance(value, pillow().Image):
        return Picture.of_bytes(png(value))
    raise UserError(f"a picture is {a(type(value).__name__)}: give a path, bytes, a data URI or a PIL.Image")


def looks_like_a_picture(value: Any) -> bool:
    """Returns True for a value of a column that is most likely a picture, or a list of them."""
    if isinstance(value, list | tuple):
        return bool(value) and looks_like_a_picture(value[0])
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes)
    return isinstance(value, bytes) or (isinstance(value, str) and value.lower().endswith(_SUFFIXES))


def keep(picture: Picture) -> Picture:
    """Returns the picture with a file of its own, in the cache, by its content: it is there once, whatever has it."""
    if picture.path is not None:
        return picture
    path = _directory() / picture.key[:2] / picture.key
    data = picture.read()
    if not path.is_file() or path.stat().st_size != len(data):
        _write(path, data)
    return replace(picture, path=str(path), data=None)


def _directory() -> Path:
    return cache_directory() / "pictures"


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)
    except OSError as error:
        raise unwritable_cache(path.parent, error) from error


def _of_text(text: str, origin: Origin) -> Picture:
    if text[:5].lower() == "data:":
        return Picture.of_uri(text)
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise UserError(f"{text[:80]}: {error}") from error
    if parts.scheme in _NET:
        return _fetched(text, parts.scheme, origin)
    try:
        path = Path(unquote(parts.path) if parts.scheme == "file" else text).expanduser()
        path = path if path.is_absolute() or origin.root is None else origin.root / path
        data = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if len(text) > _LONGEST_PATH or not text.strip():
            what = "an empty text" if not text.strip() else f"a text of {len(text):,} letters"
            raise UserError(f"{what} is no path of a picture: base64 begins with data:image/png;base64,") from error
        near = near_siblings(path) if isinstance(error, FileNotFoundError) and path.parent.is_dir() else ""
        raise UserError(f"{text}: {reason}{near}") from error
    return _in_file(path, data, str(path))


def _in_file(path: Path, data: bytes, name: str) -> Picture:
    """Returns the picture of a file with these bytes; errors begin with the name."""
    try:
        return Picture.of_bytes(data, str(path.absolute()))
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _fetched(address: str, scheme: str, origin: Origin) -> Picture:
    """Returns a picture of the net: what was there when it was first fetched."""
    if not origin.fetch or not scheme.startswith("http"):
        way = "--data.fetch-images allows http and https" if origin.kept and not origin.fetch else "give its path"
        raise UserError(f"{address[:80]}: pictures are not fetched from there: {way}")
    path = _directory() / "net" / hashlib.sha256(address.encode()).hexdigest()[:32]
    if path.is_file():
        return _in_file(path, path.read_bytes(), address[:80])
    try:
        with urlopen(address, timeout=FETCH_S) as answer:
            data: bytes = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise UserError(f"{address[:80]} cannot be fetched: {first_line(error)}") from error
    if len(data) > MOST_BYTES:
        raise UserError(f"{address[:80]} has more than {MOST_BYTES:,} bytes: download it, and give its path")
    found = _in_file(path, data, address[:80])
    _write(path, data)
    return found


def _count(number: int, noun: str = "picture") -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _are(number: int) -> str:
    return f"{'is' if number == 1 else 'are'} {_count(number)}"


def _source(part: Mapping[str, Any]) -> Any:
    """Returns what a part says its picture is, base64 as a data URI; None: it only marks the place."""
    source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    if isinstance(source, str) and part.get("base64") is source and not str(source).startswith("data:"):
        return f"data:;base64,{source}"
    return source


def _with_its_picture(part: Any, origin: Origin) -> Any:
    """Returns a picture's part in the host's form; one that only marks the place has no picture yet."""
    if not is_picture(part):
        return part
    source = _source(part)
    return {"type": "image"} if source is None else {"type": "image", "image": picture_of(source, origin)}


def _is_bare(part: Any) -> bool:
    return is_picture(part) and "image" not in part


def _bare(messages: Sequence[Message]) -> int:
    """Returns the number of places without a picture."""
    contents = (message.get("content") for message in messages)
    return sum(_is_bare(part) for content in contents if is_list(content) for part in content)


def _number_pictures(messages: list[Message], count: int) -> None:
    """Turns the text ``<image>`` into parts; without any, puts ``count`` parts before the first user message's words."""
    marked = False
    for message in messages:
        if message.get("role") == "assistant":  # what it wrote is text
            continue
        parts = _content_items(message)
        if any(MARK in _words(part) for part in parts):
            message["content"], marked = [piece for part in parts for piece in _split(part)], True
    if not marked:
        first = next((message for message in messages if message.get("role") == "user"), None)
        if first is None:
            raise UserError(f"{count} pictures, and no user message that could have them")
        first["content"] = [*({"type": "image"} for _ in range(count)), *_content_items(first)]


def _content_items(message: Message) -> list[Any]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


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
