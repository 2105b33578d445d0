"""Signatures of files by SSH keys, made and checked by ``ssh-keygen`` of OpenSSH 8.2 or later (``PROTOCOL.sshsig``)."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rlhf_host import UserError
from rlhf_host.commands import first_line, visible

NAMESPACE = "rlhf-certificate"
"""What is signed: a signature of anything else, such as a commit, is none of a certificate."""
LONGEST_S = 60.0


class NoProgram(UserError):
    """``ssh-keygen`` is not here, so no signature can be made or checked."""


class Forged(Exception):
    """The signature is none of this text."""


def program() -> str:
    """The path of ``ssh-keygen``. Raises ``NoProgram`` where there is none."""
    found = shutil.which("ssh-keygen")
    if found is None:
        raise NoProgram("signatures need ssh-keygen, which is not on PATH: install OpenSSH's client")
    return found


def fingerprint(key: Path) -> str:
    """``SHA256:...`` of a key's public half. Raises ``UserError`` where the file is no key."""
    done = _run("-l", "-f", str(key))
    match = re.match(r"\d+ (SHA256:\S+)", done.stdout.decode(errors="replace"))
    if match is None:
        raise UserError(f"--key {key}: {_said(done) or 'no SSH key'}")
    return match[1]


def sign(text: bytes, key: Path) -> bytes:
    """The signature of ``text``. ``ssh-keygen`` asks for the key's passphrase, or has it from the agent. Raises ``UserError``."""
    done = _run("-Y", "sign", "-f", str(key), "-n", NAMESPACE, text=text, waits=True)
    if done.returncode or not done.stdout.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        raise UserError(f"--key {key}: {_said(done) or 'it does not sign'}")
    return done.stdout


def signer(text: bytes, signature: bytes) -> str:
    """The fingerprint of the key that signed ``text``, whosever it is. Raises ``Forged``."""
    with tempfile.TemporaryDirectory(prefix="rlhf-signature-") as folder:
        place = Path(folder, "signature")
        place.write_bytes(signature)
        done = _run("-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(place), text=text)
    match = re.search(r"with \S+ key (SHA256:\S+)", done.stdout.decode(errors="replace"))
    if done.returncode or match is None:
        raise Forged(_said(done) or "no signature of it")
    return match[1]


def principal(text: bytes, signature: bytes, signers: Path) -> str | None:
    """The name under which a file of allowed signers has the key that signed ``text``; ``None`` where it has not.

    Raises:
        Forged: the signature is none of this text.
        UserError: the file cannot be read.
    """
    signer(text, signature)
    try:
        content = signers.read_bytes()
    except OSError as error:
        raise UserError(f"--signers {signers}: {error.strerror}") from error
    for line in content.decode(errors="replace").splitlines():
        if re.match(r"(ssh-|ecdsa-|sk-)\S+ AAAA", line):
            raise UserError(f"--signers {signers}: a line is NAME KEYTYPE KEY; put a name before {visible(line[:30])}...")
    with tempfile.TemporaryDirectory(prefix="rlhf-signature-") as folder:
        place = Path(folder, "signature")
        place.write_bytes(signature)
        where = ("-f", str(signers), "-s", str(place))
        found = _run("-Y", "find-principals", *where)
        for name in found.stdout.decode(errors="replace").splitlines() if not found.returncode else ():
            if not _run("-Y", "verify", "-n", NAMESPACE, "-I", name, *where, text=text).returncode:
                return visible(name)
    return None


def _run(*arguments: str, text: bytes = b"", waits: bool = False) -> subprocess.CompletedProcess[bytes]:
    """``waits``: for a passphrase that somebody types, or a key that somebody touches."""
    return subprocess.run(
        [program(), *arguments], input=text, capture_output=True, check=False, timeout=None if waits else LONGEST_S
    )


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    text = done.stderr.decode(errors="replace").strip()
    return visible(first_line(text)) if text else ""
