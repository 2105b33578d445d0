"""The folder of a job: made, given to its programs and emptied by descriptors, out of reach of other users."""

import asyncio
import errno
import os
import re
import shutil
import subprocess
import sys

import pytest
from rlhf_plugin_code_exec.forms import Programs
from rlhf_plugin_code_exec.jail import folders

NOBODY = 65534


def test_a_folder_that_others_can_change_is_refused(place):
    for mode in (0o777, 0o775, 0o772):
        place.chmod(mode)
        with pytest.raises(OSError, match="can be changed by others"):
            folders.Job(str(place))
    place.chmod(0o700)
    (place.parent / "link").unlink(missing_ok=True)
    (place.parent / "link").symlink_to(place)
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ENOTDIR))):
        folders.Job(str(place.parent / "link"))
    (place.parent / "link").unlink()


def test_files_are_not_written_through_links(place):
    (place / "victim").write_text("kept")
    (place / "program.py").symlink_to(place / "victim")
    place.chmod(0o700)
    with pytest.raises(FileExistsError):
        folders.Job(str(place)).file("program.py", b"the model's text", os.getuid())
    assert (place / "victim").read_text() == "kept"


def test_a_folder_is_emptied_and_what_its_links_lead_to_is_not(place):
    other = place / "other"
    other.mkdir()
    (other / "kept").write_text("kept")
    inside = place / "job"
    inside.mkdir(0o700)
    (inside / "a/b/c").mkdir(parents=True)
    (inside / "a/b/file").write_text("x")
    (inside / "a/link").symlink_to(other)
    (inside / "link").symlink_to(other / "kept")
    (inside / "a/closed").mkdir()
    (inside / "a/closed/file").write_text("x")
    (inside / "a/closed").chmod(0)
    folders.Job(str(inside)).clear()
    assert os.listdir(inside) == []
    assert os.listdir(other) == ["kept"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
@pytest.mark.parametrize("level", ["A", "B"])
def test_another_user_changes_nothing_of_a_job(level, place, runner, at_level):
    """It goes after each folder of a job as soon as there is one: to put links in it, to swap it, to write into it."""
    place.chmod(0o1777)
    victim = place / "victim"
    victim.write_text("kept")
    attacker = subprocess.Popen(
        [shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-c", RIVAL, str(place), str(victim)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        told = []
        agent = runner(level, timeout_s=60.0)  # it shares the processor with the other
        for _ in range(10):
            told.append(at_level(level, again(agent, Programs(["1", "2"], ["2", "3"]))))
    finally:
        attacker.terminate()
        out, _ = attacker.communicate()
    assert [each["stdout"] for results in told for each in results["results"]] == ["2\n", "3\n"] * 10
    assert victim.read_text() == "kept"
    assert out == ""


async def again(agent, tests):
    agent._free = None
    return await agent.tests("print(int(input()) + 1)\nopen('left', 'w').write('x')", tests)


RIVAL = """
import contextlib, os, sys
place, victim = sys.argv[1:]
while True:
    for name in os.listdir(place):
        folder = f"{place}/{name}"
        if not name.startswith("rlhf-code-"): continue
        for attempt in (
            lambda: os.rename(folder, folder + "x"),
            lambda: os.listdir(folder),
            lambda: os.symlink(victim, folder + "/program.py"),
            lambda: os.symlink(victim, folder + "/program/left"),
            lambda: open(folder + "/program.py").read(),
            lambda: open(folder + "/input").read(),
            lambda: open(folder + "/program.py", "a"),
        ):
            with contextlib.suppress(OSError):
                attempt()
                print("got in", flush=True)
"""


def test_one_run_of_a_program_finds_nothing_of_the_run_before(place, runner):
    code = "import os\nprint(len(os.listdir('.')))\nopen('left', 'w')"
    told = asyncio.run(runner("B").tests(code, Programs(["", ""], ["0", "0"]), first_only=False))
    assert [each["stdout"] for each in told["results"]] == ["0\n", "0\n"]


@pytest.mark.skipif(os.getuid() != 0, reason="programs of a user are that user's")
def test_a_program_is_a_user_of_its_own_and_its_folder_that_user_s(runner):
    code = (
        "import os\ns, t = os.stat('.'), os.stat('..')\nprint(os.getuid(), s.st_uid, oct(s.st_mode), t.st_uid, oct(t.st_mode))"
    )
    told = asyncio.run(runner("B").tests(code, Programs([""], [""])))["results"][0]["stdout"].split()
    assert told[0] == told[1] != "0"
    assert told[2:] == ["0o40700", "0", "0o40711"]
