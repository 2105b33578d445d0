"""Certificates: made by the real command, signed by real keys, and refused where anything about them is not true."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from rlhf_authoring.certificates import LIMIT_BYTES, Listed, read, told
from rlhf_authoring.commands.certify import write
from rlhf_authoring.commands.check import Checked
from rlhf_authoring.index import ListedPlugin

from rlhf_host import UserError
from rlhf_host.installed import discover

from .climbing import algorithm_source

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")

MASKED = "torch.where(batch.loss_mask, logprobs, 0.0)"
ALGO = algorithm_source(f"-advantages * {MASKED}")
POINTS = {"rlhf.algos": "climb = cert_climb:Climb"}
PLUGIN = ListedPlugin(kind="algo", name="climb", about="Climbs.")


def new_key(folder, name):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name], check=True)
    return folder / name


def signed_by(key, text):
    words = ["ssh-keygen", "-Y", "sign", "-f", key, "-n", "rlhf-certificate"]
    return subprocess.run(words, input=text, capture_output=True, check=True).stdout


def public(key):
    return " ".join(key.with_suffix(".pub").read_text().split()[:2])


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Alice's key, which ``signers`` allows, and Mallory's, which it does not."""
    folder = tmp_path_factory.mktemp("keys")
    alice = new_key(folder, "alice")
    new_key(folder, "mallory")
    (folder / "signers").write_text(f"alice@example.org {public(alice)}\n")
    return folder


SHOWN = (
    {"name": "gradients", "result": "passed", "message": "", "losses": [{"case": "loss", "error": 9e-11, "stopped": False}]},
    {
        "name": "learning",
        "result": "passed",
        "message": "",
        "runs": [{"task": "digits", "steps": 16, "before": 0.15, "after": 0.9, "standard_error": 0.01}],
    },
)


@pytest.fixture
def made(site, tmp_path, keys):
    """A certificate with figures that were not measured, as the command writes and signs one."""
    with pytest.MonkeyPatch.context() as patch:
        other = type(site)(tmp_path / "made")
        other.install("cert-climb", POINTS, {"cert_climb.py": ALGO})
        patch.syspath_prepend(str(other.folder))
        (info,) = (info for info in discover() if info.distribution == "cert-climb")
        checks = [Checked(f"check_{number}", "passed") for number in range(3)]
        file = other.folder / "climb.json"
        write(file, keys / "alice", info, ("beta=1",), checks, SHOWN, 12.3, "rlhf plugins check climb")
    sys.path_importer_cache.clear()
    return file


@pytest.fixture
def copy(made, tmp_path):
    """The two files of the certificate, to spoil."""
    for file in (made, made.with_name("climb.json.sig")):
        shutil.copy(file, tmp_path)
    return tmp_path / "climb.json"


@pytest.fixture
def installed(here):
    here.install("cert-climb", POINTS, {"cert_climb.py": ALGO})
    return here


@pytest.fixture
def verify(rlhf_here, keys):
    return lambda file, *words: rlhf_here("plugins", "verify", file, "--signers", keys / "signers", *words)


def test_what_was_shown_is_stated(site, keys):
    site.install("cert-climb", POINTS, {"cert_climb.py": ALGO})
    done = site.rlhf("plugins", "check", "climb", "--output", "climb.json", "--key", str(keys / "alice"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by SHA256:" in done.stdout
    certificate = read(site.folder / "climb.json").certificate
    assert {check.result for check in certificate.checks} == {"passed"}
    assert [loss.case for loss in certificate.gradients.losses] == ["loss"]
    assert certificate.gradients.losses[0].error < 1e-8
    assert all(run.after > run.before + 0.3 for run in certificate.learning.runs)
    assert set(certificate.files) == {"cert_climb.py", ".dist-info/METADATA", ".dist-info/entry_points.txt"}
    assert certificate.command.startswith("rlhf plugins check climb --output climb.json --key ")
    assert certificate.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    done = site.rlhf("plugins", "verify", "climb.json", "--signers", str(keys / "signers"))
    assert done.returncode == 0, done.stdout


def test_it_is_verified_here_and_by_ssh_keygen(made, installed, verify, keys):
    done = verify(made)
    assert done.exit_code == 0, done.output
    assert "signed     by alice@example.org with SHA256:" in done.stdout
    assert "same       3 files" in done.stdout
    words = ["-n", "rlhf-certificate", "-I", "alice@example.org", "-f", keys / "signers", "-s", f"{made}.sig"]
    subprocess.run(["ssh-keygen", "-Y", "verify", *words], input=made.read_bytes(), check=True, capture_output=True)


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def flipped(value):
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else f"{value}x"


def test_every_field_that_is_changed_is_noticed(copy, installed, verify):
    original = json.loads(copy.read_text())
    fields = list(leaves(original))
    assert len(fields) > 30
    for path, value in fields:
        changed = json.loads(json.dumps(original))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = flipped(value)
        copy.write_text(json.dumps(changed, indent=1, ensure_ascii=False) + "\n")
        done = verify(copy)
        assert done.exit_code == 2 or (done.exit_code == 1 and "FORGED" in done.stdout), (path, done.output)
        line = told(
            Listed(text=copy.read_text(), signature=copy.with_name("climb.json.sig").read_text()), PLUGIN, "cert-climb", None
        )
        assert line.startswith("certificate REFUSED: "), (path, line)


def test_a_key_that_nobody_allows_is_not_enough(copy, installed, verify, keys, rlhf_here):
    copy.with_name("climb.json.sig").write_bytes(signed_by(keys / "mallory", copy.read_bytes()))
    done = verify(copy)
    assert done.exit_code == 1
    assert "unknown    signed with SHA256:" in done.stdout
    assert rlhf_here("plugins", "verify", copy).exit_code == 1


def test_signatures_of_other_things_are_forged(copy, installed, verify, keys):
    words = ["ssh-keygen", "-Y", "sign", "-f", keys / "alice", "-n", "git"]
    other = subprocess.run(words, input=copy.read_bytes(), capture_output=True, check=True).stdout
    for signature in (
        other,
        signed_by(keys / "alice", b"another text"),
        b"",
        b"-----BEGIN SSH SIGNATURE-----\n\xff\n",
        b"\0" * 99,
    ):
        copy.with_name("climb.json.sig").write_bytes(signature)
        done = verify(copy)
        assert (done.exit_code, "FORGED" in done.stdout) == (1, True), done.output


def test_an_unsigned_one_says_so(copy, installed, verify):
    copy.with_name("climb.json.sig").unlink()
    done = verify(copy)
    assert done.exit_code == 1
    assert "unsigned" in done.stdout
    assert ", ".join(("certificate of version 1.0 unsigned", "contract"))[:36] in told(
        Listed(text=copy.read_text()), PLUGIN, "cert-climb", None
    )


def test_without_ssh_keygen_a_signature_is_neither_accepted_nor_refused(copy, installed, verify, monkeypatch):
    monkeypatch.setenv("PATH", str(copy.parent))
    listed = Listed(text=copy.read_text(), signature=copy.with_name("climb.json.sig").read_text())
    why = "signatures need ssh-keygen, which is not on PATH: install OpenSSH's client"
    assert told(listed, PLUGIN, "cert-climb", None) == f"certificate not checked: {why}"
    done = verify(copy)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"Error: {why}\n")


def test_a_key_that_does_not_sign_leaves_the_certificate_and_says_how_to_sign_it(installed, tmp_path):
    key = tmp_path / "my key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "a passphrase", "-f", key], check=True)
    key.write_text("damaged\n")
    (info,) = (info for info in discover() if info.distribution == "cert-climb")
    file = tmp_path / "climb.json"
    how = f"the certificate is in {file}, unsigned; ssh-keygen -Y sign -n rlhf-certificate -f '{key}' {file} signs it"
    with pytest.raises(UserError, match=re.escape(how)):
        write(file, key, info, (), [Checked("check", "passed")], SHOWN, 1.0, "rlhf plugins check climb")
    assert read(file).signature is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda text: text[: len(text) // 2], "EOF while parsing"),
        (lambda text: b"", "EOF while parsing"),
        (lambda text: b"[" * 5000, "recursion limit exceeded"),
        (lambda text: b" " * (LIMIT_BYTES + 1), "is larger than 1,000,000 bytes"),
        (lambda text: b"\xef\xbb\xbf" + text, "JSON in UTF-8 without a mark"),
        (lambda text: text.decode().encode("utf-16"), "JSON in UTF-8 without a mark"),
        (lambda text: text.replace(b'"climb"', b'"clim\xff"', 1), "unicode"),
        (lambda text: text.replace(b'"climb"', b'"climb\\u202e"', 1), "plugin.name: must be a line of text"),
        (lambda text: text.replace(b'"climb"', b'"\\ud800"', 1), "hex escape"),
        (lambda text: text.replace(b'"certificate": 1', b'"certificate": 2', 1), "certificate: Input should be 1"),
        (
            lambda text: text.replace(b'"seconds"', b'"second"', 1),
            "second is no key of such a certificate; did you mean 'seconds'",
        ),
        (lambda text: text.replace(b'"before": 0', b'"before": NaN, "x": 0', 1), ""),
        (lambda text: b"7", "the certificate"),
    ],
)
def test_what_is_no_certificate_is_a_mistake_of_the_caller(copy, verify, content, said):
    copy.write_bytes(content(copy.read_bytes()))
    done = verify(copy)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {copy}")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_names_in_other_alphabets_are_other_names(made, keys):
    text = made.read_text().replace('"climb"', '"сlimb"', 1)  # a Cyrillic letter
    listed = Listed(text=text, signature=signed_by(keys / "alice", text.encode()).decode())
    assert told(listed, PLUGIN, "cert-climb", None) == "certificate REFUSED: it is one of algo сlimb from cert-climb 1.0"


def test_what_is_installed_is_compared(made, here, verify):
    assert "missing    algo climb is not installed here" in verify(made).stdout
    here.install("cert-climb", POINTS, {"cert_climb.py": ALGO + "\n# one more line\n"})
    done = verify(made)
    assert done.exit_code == 1
    assert "differs    files differ: cert_climb.py changed" in done.stdout


def test_another_version_is_named(made, here, verify):
    here.install("cert-climb", POINTS, {"cert_climb.py": ALGO}, version="1.1")
    done = verify(made)
    assert done.exit_code == 1
    assert "differs    for another version (here 1.1)" in done.stdout
    assert "files differ: .dist-info/METADATA changed" in done.stdout


def test_a_list_shows_what_was_verified(made, here, rlhf_here, verify, tmp_path):
    listed = json.loads(verify(made, "--listing").stdout)

    def entry(distribution, name):
        plugin = {"kind": "algo", "name": name, "about": "Climbs.", "certificate": listed}
        return {"name": distribution, "version": "1.0", "summary": "S", "api": ">=0.10,<0.11", "plugins": [plugin]}

    index = tmp_path / "index.json"
    index.write_text(json.dumps({"distributions": [entry("cert-climb", "climb"), entry("cert-thief", "climb")]}))

    def lines():
        rows = json.loads(rlhf_here("plugins", "search", "--index", index, "--json").stdout)
        return [row["certificate"] for row in rows]

    ours, thief = lines()
    assert ours.startswith("certificate of version 1.0 by SHA256:")
    assert ours.endswith("; not installed, so not compared")
    assert ", gradients " in ours
    assert ", learns 0." in ours
    assert thief == "certificate REFUSED: it is one of algo climb from cert-climb 1.0"
    here.install("cert-climb", POINTS, {"cert_climb.py": ALGO})
    assert lines()[0].endswith("; files as installed here")
    (here.folder / "cert_climb.py").write_text("# something else\n")
    assert lines()[0].endswith("; files differ: cert_climb.py changed")
    assert "certificate of version 1.0 by SHA256:" in " ".join(rlhf_here("plugins", "search", "--index", index).stdout.split())


def test_failures_are_in_the_certificate(site, keys):
    wrong = algorithm_source(f"-advantages * {MASKED} + 0.1 * {MASKED}.detach() ** 2")
    site.install("cert-climb", POINTS, {"cert_climb.py": wrong})
    done = site.rlhf("plugins", "check", "climb", "--output", "climb.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "certificate, unsigned: climb.json" in done.stdout
    assert "gradients FAILED" in done.stdout
    assert "--stopped loss" in done.stdout
    assert read(site.folder / "climb.json").certificate.failures == ["gradients"]
    refused = site.rlhf("plugins", "check", "climb", "--output", "climb.json")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "climb.json: it exists already" in refused.stderr


def test_a_class_in_a_file_is_certified_by_its_hash(site, keys):
    file = site.folder / "judge.py"
    file.write_text(
        '"""A reward."""\nfrom rlhf_host import hookimpl\n\n\nclass Digits:\n    """Counts digits."""\n\n    @hookimpl\n'
        "    def score(self, trajectories):\n        return [float(sum(map(str.isdigit, row.text))) for row in trajectories]\n"
    )
    words = ("--kind", "reward", "--output", "judge.json", "--key", str(keys / "alice"))
    done = site.rlhf("plugins", "check", "judge.py:Digits", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    certificate = read(site.folder / "judge.json").certificate
    assert list(certificate.files) == ["judge.py"]
    signers = ("--signers", str(keys / "signers"))
    assert site.rlhf("plugins", "verify", "judge.json", *signers).returncode == 1
    assert site.rlhf("plugins", "verify", "judge.json", *signers, "--source", "judge.py").returncode == 0
    file.write_text(file.read_text() + "\n")
    assert "files differ: judge.py changed" in site.rlhf("plugins", "verify", "judge.json", "--source", "judge.py").stdout


def test_what_cannot_be_made_is_refused_first(installed, rlhf_here, keys, tmp_path):
    new, no_key = tmp_path / "new.json", tmp_path / "no_key"
    no_key.write_text("no key\n")
    key = keys / "alice"
    for words, said in (
        (["--key", key], "--key needs --output FILE"),
        (["--stopped", "loss"], "--stopped needs --output FILE"),
        (["--output", tmp_path / "no/new.json"], f"there is no directory {tmp_path / 'no'}"),
        (["--output", new, "--key", no_key], f"--key {no_key}: "),
    ):
        done = rlhf_here("plugins", "check", "climb", *words)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert said in done.stderr
    assert not new.exists()


def test_public_keys_alone_are_no_signers(made, rlhf_here, keys):
    done = rlhf_here("plugins", "verify", made, "--signers", keys / "alice.pub")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "a line is NAME KEYTYPE KEY; put a name before ssh-ed25519 AAAA" in done.stderr
