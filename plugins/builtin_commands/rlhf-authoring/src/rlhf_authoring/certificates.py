"""Certificates: what was shown about a plugin, as a file of JSON; its signature is the file beside it, ``FILE.sig``."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlhf_authoring import signatures
from rlhf_authoring.files import digest, hashes
from rlhf_authoring.lines import Line, explain, kind_of_plugin
from rlhf_host import PluginError, UserError
from rlhf_host.commands import visible
from rlhf_host.installed import PluginInfo, discover, find, normalised

LIMIT_BYTES = 1_000_000
SIGNATURE_BYTES = 20_000
ENVIRONMENT = ("rlhf-host", "rlhf-authoring", "python", "torch", "platform")
"""Versions that a certificate states beside the plugin's own."""

Result = Literal["passed", "failed", "skipped"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CertifiedPlugin(_Part):
    """The plugin, with the options that it was tried with."""

    kind: Annotated[str, AfterValidator(kind_of_plugin)]
    name: Line
    distribution: Line
    """Name of the distribution; the file's, of a class in a file."""
    version: Line
    """Version of the distribution; the beginning of the file's hash, of a class in a file."""
    editable: bool
    """True if it was tried in a folder that somebody works in."""
    options: list[Line]
    """``KEY=VALUE`` each."""


class CertifiedCheck(_Part):
    """One check of the contract."""

    name: Line
    result: Result
    message: Line | None = None


class CertifiedLoss(_Part):
    """One loss: the largest error of its gradient, relative to the gradient's length."""

    case: Line
    error: Finite = Field(ge=0)
    stopped: bool
    """True if it stops gradients on purpose, as whoever ran this says; the error is with these held fixed."""


class CertifiedRun(_Part):
    """One short run: mean rewards of answers before and after."""

    task: Line
    steps: int = Field(ge=1)
    before: Finite
    after: Finite
    standard_error: Finite = Field(ge=0)


class CertifiedGradients(_Part):
    """Gradients of the losses, in float64."""

    result: Result
    message: Line | None = None
    losses: list[CertifiedLoss]


class CertifiedLearning(_Part):
    """Runs in which the mean reward was to rise."""

    result: Result
    message: Line | None = None
    runs: list[CertifiedRun]


class Certificate(_Part):
    """Record of what was shown about one plugin."""

    certificate: Literal[1]
    """The version of this form."""
    plugin: CertifiedPlugin
    checks: list[CertifiedCheck] = Field(min_length=1)
    gradients: CertifiedGradients
    learning: CertifiedLearning
    versions: dict[Line, Line]
    files: dict[Line, Sha256] = Field(min_length=1)
    files_sha256: Sha256
    """The hash over all."""
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
    seconds: Finite = Field(ge=0)
    command: Line

    @model_validator(mode="after")
    def _whole(self) -> Certificate:
        if digest(self.files) != self.files_sha256:
            raise ValueError("files_sha256 is not the hash of files")
        if missing := [name for name in ENVIRONMENT if name not in self.versions]:
            raise ValueError(f"versions lacks {', '.join(missing)}")
        return self

    @property
    def failures(self) -> list[str]:
        """Names of what failed."""
        parts = {"gradients": self.gradients.result, "learning": self.learning.result}
        return [check.name for check in self.checks if check.result == "failed"] + [
            name for name, result in parts.items() if result == "failed"
        ]

    @property
    def who(self) -> str:
        return f"{self.plugin.kind} {self.plugin.name} from {self.plugin.distribution} {self.plugin.version}"

    def summary(self) -> str:
        """``contract 39/39, gradients 3e-9, learns .31 → .88``."""
        passed = sum(check.result == "passed" for check in self.checks)
        skipped = sum(check.result == "skipped" for check in self.checks)
        parts = [f"contract {passed}/{len(self.checks)}" + (f" ({skipped} skipped)" if skipped else "")]
        if self.gradients.losses and self.gradients.result == "passed":
            stopped = sum(loss.stopped for loss in self.gradients.losses)
            error = max(loss.error for loss in self.gradients.losses)
            parts.append(
                f"gradients {error:.0e}" + (f" ({stopped} of {len(self.gradients.losses)} stopped)" if stopped else "")
            )
        if self.learning.runs and self.learning.result == "passed":
            least = min(self.learning.runs, key=lambda run: run.after - run.before)
            parts.append(f"learns {least.before:.2f} → {least.after:.2f}")
        parts += [f"{failure} FAILED" for failure in self.failures]
        return ", ".join(parts)


class Signed(NamedTuple):
    """A certificate as it lies in files or in a list: its text, and the signature of exactly this text if there is one."""

    text: bytes
    signature: bytes | None
    certificate: Certificate


def read_text(text: bytes, where: str) -> Certificate:
    """The certificate. Raises ``UserError`` for everything else, which names ``where``."""
    if len(text) > LIMIT_BYTES:
        raise UserError(f"{where} is larger than {LIMIT_BYTES // 1_000_000} MB, which no certificate is")
    if text.startswith(codecs.BOM_UTF8) or b"\0" in text:
        raise UserError(f"{where} is no certificate: JSON in UTF-8 without a mark at its beginning")
    try:
        return Certificate.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(explain(problem, "certificate", list(Certificate.model_fields)) for problem in error.errors()[:3])
        raise UserError(f"{where}: {problems}") from error


def read(file: Path) -> Signed:
    """The certificate in a file, and the signature in ``FILE.sig`` if that is there. Raises ``UserError``."""
    text = _bytes(file, LIMIT_BYTES)
    beside = signature_of(file)
    signature = _bytes(beside, SIGNATURE_BYTES) if beside.exists() else None
    return Signed(text, signature, read_text(text, str(file)))


def signature_of(file: Path) -> Path:
    """The file with its signature, as ``ssh-keygen -Y sign`` calls it."""
    return file.with_name(f"{file.name}.sig")


def _bytes(file: Path, limit: int) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(limit + 1)
    except OSError as error:
        raise UserError(f"{visible(str(file))} cannot be read: {error.strerror}") from error
    if len(content) > limit:
        raise UserError(f"{visible(str(file))} is larger than {limit:,} bytes, which no certificate or signature is")
    return content


def installed(certificate: Certificate, file: str | None = None) -> PluginInfo | None:
    """The plugin here; of a class in a file, that in ``file``. Raises ``UserError`` where ``file`` is not there."""
    plugin = certificate.plugin
    if file is not None:
        return find(plugin.kind, f"{file}:{plugin.name}")
    return next(
        (
            info
            for info in discover(disabled=True)
            if (info.kind, info.name) == (plugin.kind, plugin.name)
            and normalised(info.distribution) == normalised(plugin.distribution)
        ),
        None,
    )


def differences(certificate: Certificate, info: PluginInfo) -> Iterator[str]:
    """Yields what is not the same here: ``for another version (here 1.1)``, ``files differ: ...``."""
    if info.version != certificate.plugin.version:
        yield f"for another version (here {info.version})"
    try:
        here = hashes(info)
    except (UserError, PluginError, ImportError) as error:
        yield f"files cannot be read: {error}"
        return
    theirs = certificate.files
    changed = [f"{name} changed" for name in here if name in theirs and here[name] != theirs[name]]
    changed += [f"{name} is not here" for name in theirs if name not in here]
    changed += [f"{name} is new" for name in here if name not in theirs]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"files differ: {', '.join(changed[:3])}{more}"


def by(signed: Signed) -> str:
    """``by SHA256:...``, once the signature is checked; ``unsigned`` without one. Raises ``Forged``."""
    return "unsigned" if signed.signature is None else f"by {signatures.signer(signed.text, signed.signature)}"


class Listed(_Part):
    """A certificate in a list of plugins: the contents of its two files."""

    text: str
    signature: str | None = None

    def signed(self, where: str) -> Signed:
        """Raises ``UserError`` for what is no certificate."""
        text = self.text.encode()
        return Signed(text, None if self.signature is None else self.signature.encode(), read_text(text, where))

    @classmethod
    def of(cls, signed: Signed) -> Listed:
        return cls(text=signed.text.decode(), signature=None if signed.signature is None else signed.signature.decode())


def told(listed: Listed, plugin: Any, distribution: str, info: PluginInfo | None) -> str:
    """One line about a listed certificate: what it shows and by whom, and what is different here; or why it is refused.

    Args:
        plugin: with ``kind`` and ``name``, whose entry has it.
        distribution: the entry's.
        info: the plugin as it is installed here, if it is.
    """
    try:
        signed = listed.signed("certificate")
        about = signed.certificate.plugin
        if (about.kind, about.name, normalised(about.distribution)) != (plugin.kind, plugin.name, normalised(distribution)):
            return f"certificate REFUSED: it is one of {signed.certificate.who}"
        whose = by(signed)
    except signatures.Forged as error:
        return f"certificate REFUSED: its signature is not valid: {error}"
    except signatures.NoProgram as error:
        return f"certificate not checked: {error}"
    except UserError as error:
        return f"certificate REFUSED: {error}"
    line = f"certificate of version {about.version} {whose}, {signed.certificate.summary()}"
    here = ["not installed, so not compared"] if info is None else list(differences(signed.certificate, info))
    return "; ".join([line, *(here or ["files as installed here"])])
