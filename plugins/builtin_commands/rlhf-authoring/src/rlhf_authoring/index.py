"""Lists of plugins that can be installed: those that come with the host, and others of the same form, from a file or a URL."""

from __future__ import annotations

import codecs
import re
import shlex
import time
import urllib.error
import urllib.request
from functools import cache
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rlhf_authoring.certificates import Listed
from rlhf_authoring.lines import Line, explain, kind_of_plugin, short
from rlhf_host import RunError, UserError, __version__
from rlhf_host.installed import OTHERS, OURS, Offer, normalised

TIMEOUT_S = 10.0
LIMIT_BYTES = 4_000_000
SCHEMES = ("http", "https")


def _version(version: str) -> str:
    try:
        Version(version)
    except ValueError as error:  # too many digits for int, too
        raise ValueError("must be a version, such as 1.0.2") from error
    return version


def _range(api: str) -> str:
    try:
        for part in SpecifierSet(api):
            part.contains(__version__)  # which reads its digits
    except ValueError as error:
        raise ValueError("must be a range of host versions, such as >=0.10,<0.11") from error
    return api


def _words(options: str) -> str:
    """For a shell, which finds nothing to run in them."""
    try:
        return shlex.join(shlex.split(options))
    except ValueError as error:
        raise ValueError("must be words as in a shell, with every quote closed") from error


class ListedPlugin(BaseModel):
    """One plugin of a distribution."""

    model_config = ConfigDict(extra="forbid")

    kind: Annotated[str, AfterValidator(kind_of_plugin)]
    name: str = Field(pattern=r"^[\w.-]+$")
    about: Line
    spellings: dict[str, str] | None = None
    """Texts that choose it instead of its name, as its entry points say (``plugins.spellings``)."""
    recommended: list[str] | None = None
    """On what messages recommend it (``plugins.recommended``)."""
    certificate: Listed | None = None
    """Certificate of what was shown about it."""


class ListedDistribution(BaseModel):
    """One distribution and its plugins."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?$")
    version: Annotated[str, AfterValidator(_version)]
    summary: Line
    api: Annotated[Line, AfterValidator(_range)]
    """Versions of the host that it requires: ``>=0.10,<0.11``."""
    homepage: Annotated[Line, Field(pattern="^https?://")] | None = None
    requirement: Line | None = None
    """The words that pip is to install, if not the name: ``NAME @ git+https://...``."""
    pip_options: Annotated[Line, AfterValidator(_words)] | None = None
    """Options that pip needs for it."""
    plugins: list[ListedPlugin]
    """None: other packages require it."""

    @property
    def install(self) -> str:
        """The line that installs it."""
        return Offer.of(self.model_dump()).line

    @property
    def fits(self) -> bool:
        """Returns True if it is made for this version of the host."""
        return SpecifierSet(self.api).contains(__version__, prereleases=True)


class Index(BaseModel):
    """A list of distributions."""

    model_config = ConfigDict(extra="forbid")

    note: Line | None = None
    """Facts for somebody who wants to install from it."""
    distributions: list[ListedDistribution]


KEYS = [*Index.model_fields, *ListedDistribution.model_fields, *ListedPlugin.model_fields, *Listed.model_fields]
"""Keys of a list."""


def read_index(place: str) -> Index:
    """The list in a file or at an address.

    Raises:
        UserError: it is no such list; the message names the place, and the key that is wrong.
        RunError: the address does not answer.
    """
    scheme = re.match(r"([\w+.-]+)://", place)
    if not place or (scheme and scheme[1].lower() not in SCHEMES):
        raise UserError(f"--index {short(place) or repr(place)}: a list is read from a path, or from an http or https address")
    content, name = (_fetch if scheme else _read)(place), short(place)
    if b"\0" in content[:4]:
        raise UserError(f"{name} is UTF-16 or not text: save it as UTF-8")
    try:
        index = Index.model_validate_json(content.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise UserError(f"{name}: {'; '.join(explain(problem, 'list', KEYS) for problem in error.errors()[:3])}") from error
    names: set[str] = set()
    for entry in index.distributions:
        if normalised(entry.name) in names:
            raise UserError(f"{name}: {short(entry.name)} is listed twice")
        names.add(normalised(entry.name))
    return index


@cache
def shipped() -> tuple[Index, ...]:
    """The lists that come with the host: the project's own, and that of others."""
    return tuple(read_index(str(path)) for path in (OURS, OTHERS))


def _read(place: str) -> bytes:
    try:
        with Path(place).expanduser().open("rb") as file:
            content = file.read(LIMIT_BYTES + 1)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of nobody
        raise UserError(f"{short(place)} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    _refuse_large(place, len(content))
    return content


class _Redirects(urllib.request.HTTPRedirectHandler):
    """urllib's own would go on to ftp."""

    def redirect_request(self, request: Any, response: Any, code: int, message: str, headers: Any, url: str) -> Any:
        if urlsplit(url).scheme not in SCHEMES:
            raise UserError(
                f"{short(request.full_url)} leads to {short(url)}: lists are read from http and https addresses only"
            )
        return super().redirect_request(request, response, code, message, headers, url)


def _fetch(url: str) -> bytes:
    shown, credentials = re.subn(r"(?<=://)[^/?#]*@", "", url)
    if credentials:
        raise UserError(f"{short(shown)}: an address must be without user and password; download the list and give its path")
    failed, deadline, body = f"{short(url)} cannot be read", time.monotonic() + TIMEOUT_S, b""
    try:
        with urllib.request.build_opener(_Redirects).open(url, timeout=TIMEOUT_S) as response:
            while chunk := response.read1(1 << 16):
                body += chunk
                _refuse_large(url, len(body))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {TIMEOUT_S:g} s")
    except urllib.error.HTTPError as error:
        kind = UserError if error.code < 500 else RunError
        raise kind(f"{failed}: {error.code} {short(error.reason)}") from error
    except (InvalidURL, ValueError) as error:
        raise UserError(f"{failed}: {short(error)}") from error
    except (OSError, HTTPException) as error:  # unreachable, too slow, no HTTP
        raise RunError(f"{failed}: {short(getattr(error, 'reason', None) or error)}") from error
    return body


def _refuse_large(place: str, size: int) -> None:
    if size > LIMIT_BYTES:
        raise UserError(f"{short(place)} is larger than {LIMIT_BYTES // 1_000_000} MB, which no list of plugins is")
