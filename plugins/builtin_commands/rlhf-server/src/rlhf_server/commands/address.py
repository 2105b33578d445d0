"""The address and the key of a server, as flags give them."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from rlhf_host import UserError
from rlhf_host.settings import CommandLine

HOST = "the address to listen on; one that others reach needs --key-file (default 127.0.0.1)"


def address_of(line: CommandLine, port: str) -> tuple[str, int, str | None]:
    """Returns host, port and key. Raises ``UserError`` for an address that others reach without a key."""
    host, port, key = line.value("host") or "127.0.0.1", line.value("port") or port, _key(line.value("key-file"))
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--port {port}: should be a whole number from 0 to 65535")
    if key is None and not _is_loopback(host):
        raise UserError(f"--host {host}: others can reach it: give --key-file FILE with a key of your own")
    return host, int(port), key


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file {file}: {getattr(error, 'strerror', None) or 'no text in UTF-8'}") from error
    if len(key) < 16:
        raise UserError(f"--key-file {file}: a key has at least 16 characters; this one has {len(key)}")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
