"""``rlhf plugins check --output``: what is shown beside the contract, and the certificate of all of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhf_authoring import signatures
from rlhf_authoring.child import ChildFailed, answers
from rlhf_host import UserError, __version__
from rlhf_host.commands import write_file
from rlhf_host.installed import PluginInfo

if TYPE_CHECKING:
    from rlhf_authoring.commands.check import Checked

SHOWINGS = ("gradients", "learning")
"""Names of the parts that are shown beside the contract."""


def refuse_early(file: Path, key: Path | None) -> None:
    """Raises ``UserError`` for what could not be written or signed in the end."""
    from rlhf_authoring.certificates import signature_of

    for path in (file, signature_of(file)):
        if path.exists():
            raise UserError(f"--output {path}: it exists already; give the name of a new file")
    if not file.parent.is_dir():
        raise UserError(f"--output {file}: there is no directory {file.parent}")
    if key is not None:
        signatures.fingerprint(key)


def show(info: PluginInfo, options: Mapping[str, Any], stopped: Sequence[str], deadline_s: float) -> Iterator[dict[str, Any]]:
    """Yields the results of ``SHOWINGS``, each as it comes: ``name``, ``result``, ``message``, and ``losses`` or ``runs``.

    Raises:
        UserError: the plugin has no such options or losses.
    """
    for name in SHOWINGS:
        job = {"kind": info.kind, "name": f"{info.distribution}:{info.name}", "options": dict(options)}
        job |= {"showing": name, "stopped": list(stopped)}
        try:
            (shown,) = answers(f"{__name__}:_work", job, deadline_s)
        except ChildFailed as failure:
            message = "\n".join(filter(None, [f"it {failure}", failure.tail]))
            shown = {"result": "failed", "message": message, "losses" if name == "gradients" else "runs": []}
        if "refused" in shown:
            raise UserError(shown["refused"])
        yield {"name": name, **shown}


def _work(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the child."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rlhf_authoring.commands.check import read_texts
    from rlhf_authoring.contracts.subject import Subject, Unusable

    part = "losses" if job["showing"] == "gradients" else "runs"
    try:
        subject = Subject(job["kind"], job["name"])
        if job["options"]:
            subject.options = read_texts(subject.info, subject.cls, job["options"])
        yield _gradients(subject, job["stopped"]) if part == "losses" else _learning(subject)
    except UserError as error:
        yield {"refused": str(error)}
    except Unusable as error:
        yield {"result": "skipped", "message": f"a more basic check fails: {error}", part: []}


def _gradients(subject: Any, stopped: Sequence[str]) -> dict[str, Any]:
    from rlhf_authoring.contracts.subject import Broken
    from rlhf_authoring.gradients import LARGEST, compare
    from rlhf_host import RunError

    if "compute_loss" not in subject.hooks:
        if stopped:
            raise UserError(f"--stopped {stopped[0]}: {subject.info} has no loss")
        what = f"the kind {subject.kind}" if subject.kind != "algo" else "an algorithm without compute_loss"
        return {"result": "skipped", "message": f"does not apply to {what}: it has no loss", "losses": []}
    try:
        losses = list(compare(subject))
    except (Broken, RunError) as error:
        return {"result": "failed", "message": str(error), "losses": []}
    for case in stopped:
        if case not in [loss.case for loss in losses]:
            raise UserError(f"--stopped {case}: the losses are {', '.join(loss.case for loss in losses)}")
    problems = [
        f"{loss.case}: the gradient is not the slope of the loss, which stops gradients; with these held fixed the error is "
        f"{loss.error:.0e}. Take detach away, or say that it is meant: --stopped {loss.case}"
        for loss in losses
        if loss.held and loss.case not in stopped
    ]
    problems += [
        f"{loss.case}: the gradient is not the slope of the loss: the relative error is {loss.error:.1e}, {LARGEST:.0e} is allowed"
        for loss in losses
        if loss.error > LARGEST
    ]
    shown = [{"case": loss.case, "error": min(loss.error, 1e300), "stopped": loss.held} for loss in losses]
    return {"result": "failed" if problems else "passed", "message": "\n".join(problems), "losses": shown}


def _learning(subject: Any) -> dict[str, Any]:
    from rlhf_authoring.learning import ERRORS, NotShown, learn
    from rlhf_host import RunError

    runs: list[Any] = []
    try:
        runs.extend(learn(subject))
    except NotShown as reason:
        return {"result": "skipped", "message": str(reason), "runs": []}
    except RunError as error:
        return {"result": "failed", "message": f"a run failed: {error}", "runs": [asdict(run) for run in runs]}
    problems = [
        f"{run.task}: the mean reward goes from {run.before:.3f} to {run.after:.3f} in {run.steps} steps; a rise is at least "
        f"{ERRORS:g} standard errors, {ERRORS * run.standard_error:.3f}"
        for run in runs
        if not run.rises
    ]
    return {"result": "failed" if problems else "passed", "message": "\n".join(problems), "runs": [asdict(run) for run in runs]}


def described(shown: Mapping[str, Any]) -> list[str]:
    """Lines with the figures."""
    lines = [f"{loss['case']}: {loss['error']:.1e}{', stopped' if loss['stopped'] else ''}" for loss in shown.get("losses", ())]
    return lines + [
        f"{run['task']}: {run['before']:.3f} → {run['after']:.3f} in {run['steps']} steps" for run in shown.get("runs", ())
    ]


def write(
    file: Path,
    key: Path | None,
    info: PluginInfo,
    option: Sequence[str],
    checks: Sequence[Checked],
    shown: Sequence[Mapping[str, Any]],
    seconds: float,
    command: str,
) -> str:
    """Writes the certificate, and its signature with a key; returns what to say about it.

    Raises:
        UserError: the key does not sign. The certificate is written then, unsigned.
    """
    from rlhf_authoring.certificates import Certificate, read_text, signature_of
    from rlhf_authoring.files import digest, editable, hashes

    in_file = info.distribution.endswith(".py")
    files = hashes(info)
    parts = {part["name"]: _without_empty(part) for part in shown}
    certificate = {
        "certificate": 1,
        "plugin": {
            "kind": info.kind,
            "name": info.name,
            "distribution": Path(info.distribution).name if in_file else info.distribution,
            "version": info.version,
            "editable": editable(info),
            "options": list(option),
        },
        "checks": [_without_empty({key: getattr(one, key) for key in ("name", "result", "message")}) for one in checks],
        **parts,
        "versions": versions(),
        "files": files,
        "files_sha256": digest(files),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(seconds, 1),
        "command": command,
    }
    for part in parts.values():
        del part["name"]
    text = (json.dumps(certificate, indent=1, ensure_ascii=False) + "\n").encode()
    read: Certificate = read_text(text, str(file))
    write_file(file, text)
    signing = ["ssh-keygen", "-Y", "sign", "-n", signatures.NAMESPACE, "-f", "KEY" if key is None else str(key), str(file)]
    how = shlex.join(signing)
    if key is None:
        return f"certificate, unsigned: {file} ({read.summary()}); {how} signs it"
    try:
        signature = signatures.sign(text, key)
    except UserError as error:
        raise UserError(f"{error}; the certificate is in {file}, unsigned; {how} signs it") from error
    write_file(signature_of(file), signature)
    return f"certificate: {file} and {signature_of(file).name}, by {signatures.signer(text, signature)} ({read.summary()})"


def versions() -> dict[str, str]:
    """Versions here of all that a certificate names beside the plugin's."""
    found = {"rlhf-host": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("rlhf-authoring", "torch"):
        found[name] = importlib.metadata.version(name)
    return found


def _without_empty(part: Mapping[str, Any]) -> dict[str, Any]:
    """Messages on one line, and none where there is nothing to say."""
    from rlhf_authoring.lines import short

    return {key: short(value) if key == "message" else value for key, value in part.items() if key != "message" or value}


certificate_option = click.option(
    "--output",
    "-o",
    "certificate",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also compare gradients and train a tiny model, and write a certificate: all that was shown, to a new FILE.",
)
key_option = click.option(
    "--key",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="With --output: sign it with this SSH key, such as ~/.ssh/id_ed25519.",
)
stopped_option = click.option(
    "--stopped",
    multiple=True,
    metavar="LOSS",
    help="With --output: this loss stops gradients (detach) on purpose, as loss=cispo; repeatable.",
)
