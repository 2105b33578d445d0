"""``rlhf plugins requirements``: exact versions of what a run stands on, in its directory and on the command line."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from rlhf_host.plugins.requirements import pinned


def read(text: str) -> dict[str, str]:
    """Name → version, of lines as pip reads them: exact versions, each once."""
    found = {}
    for line in text.splitlines():
        requirement = line.partition("  #")[0]
        if requirement.startswith("#"):
            continue
        parsed = Requirement(requirement)
        (specifier,) = parsed.specifier
        assert specifier.operator == "=="
        assert parsed.name not in found
        found[parsed.name] = specifier.version
    return found


def test_a_run_writes_them_and_the_command_prints_them(rlhf, rlhf_here, small_run, tmp_path):
    run_dir = tmp_path / "run"
    rlhf.run(*small_run, "--train.steps", "1", "--run-dir", run_dir)  # here, other tests may have imported Ray
    text = (run_dir / "requirements.txt").read_text()
    found = read(text)
    for name in ("rlhf-host", "rlhf-plugin-rloo", "torch", "transformers", "pydantic"):
        assert found[name] == version(name)
    assert found["test-rewards"] == "1.0"
    assert not {"rlhf-plugin-ppo", "ray", "deepspeed", "pytest"} & set(found)
    printed = rlhf_here("plugins", "requirements", run_dir)
    assert (printed.exit_code, printed.stdout) == (0, text)

    (run_dir / "requirements.txt").unlink()
    without = rlhf_here("plugins", "requirements", run_dir)
    assert (without.exit_code, without.stdout) == (2, "")
    assert "requirements.txt cannot be read" in without.stderr
    assert "the versions of this run are not known" in without.stderr


def test_without_a_run_it_is_what_is_installed(rlhf_here):
    found = read(rlhf_here("plugins", "requirements").stdout)
    assert found["rlhf-plugin-rloo"] == version("rlhf-plugin-rloo")
    assert found["torch"] == version("torch")
    assert "pytest" not in found


def test_it_follows_requirements_with_their_extras_and_markers(here):
    here.install("rq-a", {}, requires=["rlhf-host>=1", "rq_b[fast]>=1", "rq-absent", "rq-old; python_version<'3'"])
    here.install("rq-b", {}, requires=["rq-c; extra == 'fast'", "rq-d; extra == 'slow'", "rq-a"], version="2.5")
    for name in ("rq-c", "rq-d", "rq-old", "rq-stranger"):
        here.install(name, {}, requires=[])
    found = read(pinned(["rq-a", "rq-not-installed"]))
    assert {name: version for name, version in found.items() if name.startswith("rq-")} == {
        "rq-a": "1.0",
        "rq-b": "2.5",
        "rq-c": "1.0",
    }


def test_extras_of_the_host_come_in_when_a_run_uses_them():
    assert "gguf" not in read(pinned([]))
    assert read(pinned([], ["gguf"]))["gguf"] == version("gguf")


def test_where_it_was_installed_from_is_told_without_credentials(here):
    about = here.install("rq-mine", {}, requires=[])
    (about / "direct_url.json").write_text('{"url": "https://me:secret@example.org/mine.git", "vcs_info": {}}')
    text = pinned(["rq-mine"])
    assert "rq-mine==1.0  # from https://example.org/mine.git\n" in text
    assert "secret" not in text


@pytest.mark.parametrize("run_dir", ["none", "empty"])
def test_what_is_no_run_is_refused(rlhf_here, tmp_path, run_dir):
    (tmp_path / "empty").mkdir()
    done = rlhf_here("plugins", "requirements", tmp_path / run_dir)
    assert done.exit_code == 2
    assert "run directory" in done.stderr
