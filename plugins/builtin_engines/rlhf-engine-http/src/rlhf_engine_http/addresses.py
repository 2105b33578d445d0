"""Addresses of servers: those of the command line, and those that a file names as long as the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_host import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PORTS = {"http": 80, "https": 443}


def address(url: str, source: str) -> str:
    """Returns the address without a slash or ``/v1`` at its end. Raises ``UserError`` for what is none; ``source`` says whose it
    is.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in PORTS and bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        good = False
    if "@" in url or "?" in url:  # which may have secrets, so it is not shown
        raise UserError(
            f"engine http: an address in {source} has a user, a password or a query; write http://HOST:PORT, and give a key by"
            " --engine.key-env"
        )
    if not good or parts.fragment or any(letter.isspace() for letter in url):
        raise UserError(f"engine http: {url!r:.100} in {source} is no address of a server; write http://HOST:PORT")
    place = parts._replace(scheme=parts.scheme.lower(), netloc=parts.netloc.lower()).geturl()
    return place.rstrip("/").removesuffix("/v1").rstrip("/")


def addresses(urls: Sequence[str], source: str, *, elsewhere: bool, others: Sequence[str] = ()) -> list[str]:
    """Returns the addresses, each once.

    Args:
        elsewhere: servers on other machines can get weights.
        others: addresses of another source.

    Raises:
        UserError: one is no address, is given twice, or is on another machine, which gets no weights.
    """
    cleaned: list[str] = []
    known = {_server(other): (other, " and --engine.urls") for other in others}
    for url in urls:
        own = address(url, source)
        again, where = known.setdefault(_server(own), (own, ""))
        if own in cleaned or again != own or where:
            names = own if again == own else f"{own}, which is {again},"
            raise UserError(f"engine http: {names} is given twice in {source}{where}")
        if not elsewhere and urlsplit(own).hostname not in LOOPBACK:
            raise UserError(
                f"engine http: {own} in {source} may be on another machine, so weights need a directory that it sees too, under"
                " the same name: --engine.directory DIR; or --engine.transfer stream, for vLLM servers that take it"
            )
        cleaned.append(own)
    return cleaned


def _server(url: str) -> tuple[str | None, int | None, str]:
    """Returns what two addresses of one server have in common, as far as they themselves say it."""
    parts = urlsplit(url)
    host = LOOPBACK[0] if parts.hostname in LOOPBACK else parts.hostname
    return host, parts.port or PORTS[parts.scheme], parts.path


class ServerFile:
    """A file of addresses, one a line; what follows ``#`` is a remark. It may change while the run goes on.

    Args:
        urls: the addresses of the command line, which the file does not repeat.
        elsewhere: as in ``addresses``.

    Raises:
        UserError: it cannot be read, or has something else than addresses.
    """

    def __init__(self, path: Path, urls: Sequence[str], *, elsewhere: bool):
        self.path = path
        self._others, self._elsewhere = tuple(urls), elsewhere
        try:
            self._taken = self._seen = _text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"engine http cannot read --engine.servers {path}: {_why(error)}") from error
        self.urls = self._addresses(self._taken)

    def look(self) -> bool:
        """Returns True if ``urls`` changed. Called from time to time: a text counts when two looks have seen it, because an
        editor may be in the middle of it.

        Raises:
            UserError: there is a new text that is no list; ``urls`` stays, and the text is not complained of again.
        """
        try:
            text = _text(self.path)
        except (OSError, UnicodeDecodeError) as error:
            text = f"\0{_why(error)}"  # which no file of addresses has
        if text == self._taken or text != self._seen:
            self._seen = text
            return False
        self._taken = text
        if text.startswith("\0"):
            raise UserError(f"engine http cannot read --engine.servers {self.path}: {text[1:]}")
        urls = self._addresses(text)
        changed, self.urls = urls != self.urls, urls
        return changed

    def _addresses(self, text: str) -> list[str]:
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return addresses(list(filter(None, lines)), str(self.path), elsewhere=self._elsewhere, others=self._others)


def _text(path: Path) -> str:
    """Returns the text of a file. Raises ``OSError`` also for a pipe or a device, which gives its text once, or without end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(0, "it is no file, and is read again and again")
    return path.read_text(encoding="utf-8-sig")


def _why(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is no UTF-8 text"
