"""Certificates in a folder get into the list of the project's plugins, if a key that is allowed there signed them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from rlhf_authoring.commands.certify import write
from rlhf_authoring.commands.check import Checked

from rlhf_host.errors import UserError
from rlhf_host.plugins.selection import find

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")

SHOWN = (
    {"name": "gradients", "result": "skipped", "message": "made up", "losses": []},
    {"name": "learning", "result": "skipped", "message": "made up", "runs": []},
)


@pytest.fixture
def folder(tmp_path):
    """A folder with a key, and a signed certificate of a plugin with figures that were not measured."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"]
    subprocess.run(words, check=True)
    (tmp_path / "allowed_signers").write_text(f"alice {(tmp_path / 'key.pub').read_text()}")
    certify(tmp_path / "one.json", tmp_path / "key", "algo", "rloo")
    return tmp_path


def certify(file, key, kind, name):
    write(file, key, find(kind, name), (), [Checked("made_up", "passed")], SHOWN, 1.0, "rlhf plugins check")


def test_a_certificate_is_beside_its_plugin(generator, folder):
    index = generator.catalogue.our_index(folder)
    certified = {
        plugin.name: plugin.certificate for entry in index.distributions for plugin in entry.plugins if plugin.certificate
    }
    assert list(certified) == ["rloo"]
    assert certified["rloo"].text == (folder / "one.json").read_text()
    assert certified["rloo"].signature == (folder / "one.json.sig").read_text()


def test_what_is_not_signed_by_an_allowed_key_is_refused(generator, folder):
    def refused(said):
        with pytest.raises(UserError, match=said):
            generator.catalogue.our_index(folder)

    shutil.copy(folder / "one.json", folder / "two.json")
    refused("no key of .* signed it")
    shutil.copy(folder / "one.json.sig", folder / "two.json.sig")
    refused("there is another certificate of algo rloo")
    (folder / "two.json").write_text((folder / "two.json").read_text().replace("made_up", "made_it"))
    refused("its signature is not valid")
    (folder / "two.json").unlink()
    (folder / "allowed_signers").write_text("")
    refused("no key of .* signed it")


def test_a_certificate_of_the_host_cannot_be_in_its_own_list(generator, folder):
    certify(folder / "two.json", folder / "key", "tracker", "jsonl")
    with pytest.raises(UserError, match="the list is a file of rlhf-host"):
        generator.catalogue.our_index(folder)
