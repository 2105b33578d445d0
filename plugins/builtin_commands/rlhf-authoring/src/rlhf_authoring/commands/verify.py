"""``rlhf plugins verify``: whether a certificate is whose it says it is, and of what is installed here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from rlhf_authoring import signatures
from rlhf_authoring.certificates import ENVIRONMENT, Certificate, Listed, Signed, differences, installed, read, signature_of
from rlhf_authoring.commands.certify import versions
from rlhf_host import UserError

path = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("file", type=path)
@click.option(
    "--signers", type=path, metavar="FILE", help="Keys that you trust: lines NAME KEYTYPE KEY, as ssh-keygen reads them."
)
@click.option("--source", metavar="FILE.py", help="Where the class is, if the certificate is of a class in a file.")
@click.option("--listing", is_flag=True, help="Print the value of the key certificate in a list of plugins instead.")
@click.pass_context
def verify(ctx: click.Context, file: Path, signers: Path | None, source: str | None, listing: bool) -> None:
    """Compare the certificate FILE with its signature, FILE.sig, and with what is installed here.

    The exit code is 0 if one of the signers signed it, all files are the same here and all that it shows has passed; 1 if
    anything is not so; 2 if FILE is no certificate. Other versions of Python, torch and the host are named and do not count.
    """
    signed = read(file)
    certificate, problems = signed.certificate, []
    lines = []
    found = list(_signature(signed, file, signers))
    if [word for _, word, _ in found] != ["FORGED"]:  # what it says is nobody's word then
        found += [*_here(certificate, source), *_shown(certificate)]
    for good, word, text in found:
        lines.append(f"  {word.ljust(9)}  {text}")
        if not good:
            problems.append(word)
    if not listing:
        click.echo("\n".join([certificate.who, *lines, *([] if "FORGED" in problems else _environment(certificate))]))
    elif not {"FORGED", "failed"} & set(problems):
        click.echo(Listed.of(signed).model_dump_json(exclude_none=True))
        return
    else:
        click.echo("\n".join([certificate.who, *lines]), err=True)
    if problems:
        ctx.exit(1)


def _signature(signed: Signed, file: Path, signers: Path | None) -> Iterator[tuple[bool, str, str]]:
    if signed.signature is None:
        yield False, "unsigned", f"there is no {signature_of(file)}"
        return
    try:
        key = signatures.signer(signed.text, signed.signature)
        name = None if signers is None else signatures.principal(signed.text, signed.signature, signers)
    except signatures.Forged as error:
        yield False, "FORGED", f"the signature is not one of this text: {error}"
        return
    if signers is None:
        yield False, "unknown", f"signed with {key}; --signers FILE says whose keys you trust"
    elif name is None:
        yield False, "unknown", f"signed with {key}, which {signers} does not allow"
    else:
        yield True, "signed", f"by {name} with {key}"


def _here(certificate: Certificate, source: str | None) -> Iterator[tuple[bool, str, str]]:
    in_file = certificate.plugin.distribution.endswith(".py")
    if source is not None and not in_file:
        raise UserError(f"--source {source}: the certificate is of the distribution {certificate.plugin.distribution}")
    if in_file and source is None:
        yield False, "unknown", f"which {certificate.plugin.distribution} is meant: --source FILE.py"
        return
    info = installed(certificate, source)
    if info is None:
        yield False, "missing", f"{certificate.plugin.kind} {certificate.plugin.name} is not installed here"
        return
    found = list(differences(certificate, info))
    yield from ((False, "differs", text) for text in found)
    if not found:
        yield True, "same", f"{len(certificate.files)} files, sha256 {certificate.files_sha256}"


def _shown(certificate: Certificate) -> Iterator[tuple[bool, str, str]]:
    failures = certificate.failures
    yield not failures, "failed" if failures else "shown", certificate.summary()
    for name, part in (("gradients", certificate.gradients), ("learning", certificate.learning)):
        if part.result != "passed" and part.message:
            yield True, "", f"{name}: {part.message}"


def _environment(certificate: Certificate) -> Iterator[str]:
    here = versions()
    for name in ENVIRONMENT:
        if certificate.versions[name] != here[name]:
            yield f"  other      {name} {certificate.versions[name]}, here {here[name]}"
    yield f"  made       {certificate.date} in {certificate.seconds:g} s by {certificate.command}"
