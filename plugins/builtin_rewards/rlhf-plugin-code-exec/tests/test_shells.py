"""Contained shells: what their commands have in common, and what they cannot do; at both levels."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rlhf_plugin_code_exec import interpreters, shells
from rlhf_plugin_code_exec.interpreters import interpreter_at, reachable_python
from rlhf_plugin_code_exec.shell_checks import shell_escapes
from rlhf_plugin_code_exec.shells import File, JailFailed, Shell, ShellLimits

NOBODY = 65534
SMALL = ShellLimits(memory=256 << 20, processes=12, file=8 << 20, files=60, disk=24 << 20, output=1 << 20)
LEVELS = [("A", "/app"), ("B", "")]


@pytest.fixture(params=LEVELS, ids=["A", "B"])
def session(request, place, needs_level):
    """Plays with a shell: ``session(work)``, where ``work`` is a coroutine function of the shell. Nothing of it may be left."""
    level, work = request.param
    needs_level(level)

    def play(working, limits=SMALL):
        async def played():
            shell = Shell(reachable_python(), limits, level, work)
            try:
                await shell.open()
                return await working(shell)
            finally:
                await shell.close()

        return asyncio.run(played())

    yield play
    assert os.listdir(place) == []
    assert inside(place) == []


def inside(place):
    """Processes that work in folders of shells."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "cwd").startswith(f"{place}/"):
                found.append(process.name)
        except OSError:
            continue
    return found


def outputs(session, *commands, seconds=10.0, limits=SMALL):
    async def work(shell):
        return [await shell.run(command, seconds) for command in commands]

    return session(work, limits)


def test_commands_have_files_folder_variables_and_functions_in_common(session):
    told = outputs(
        session,
        "mkdir d; cd d; export X='a  b'; f() { echo f:$1; }; plain=1",
        'pwd; echo "$X"; f 2; echo "[$plain]$#"; exit 5',
        "cd ..; cat <<< in; false",
        "pwd; echo x > d/y; ls",
    )
    assert [each.code for each in told] == [0, 5, 1, 0]
    first, second = told[1].output.splitlines()[0], told[3].output.splitlines()[0]
    assert first == f"{second}/d"
    assert told[1].output.splitlines()[1:] == ["a  b", "f:2", "[]0"]
    assert told[3].output.splitlines()[1:] == ["d"]


def test_what_people_do_in_a_shell(session):
    told = outputs(
        session,
        "mv a.txt b; sed -i s/hi/ho/ b; cat b",
        "yes | head -2; cat <(echo sub); awk 'BEGIN{print 2}'; python3 -c 'print(1+1)'",
        "printf 'one\\ntwo\\n' | sort -r | tee out | wc -l; rm out; mktemp >/dev/null && echo made",
        "timeout 0.2 sleep 5; echo $?; (exit 3) || echo $?",
        "echo )",
    )
    assert told[0].code == 1, "there is no a.txt"
    assert told[1].output == "y\ny\nsub\n2\n2\n"
    assert told[2].output == "2\nmade\n"
    assert told[3].output == "124\n3\n"
    assert told[4].code == 2
    assert "syntax error" in told[4].output
    assert "line 1" in told[4].output


@pytest.mark.skipif(os.getuid() != 0, reason="only a user of its own may change modes")
def test_modes_and_times_of_its_own_files_can_be_changed(session):
    told = outputs(
        session,
        "printf '#!/bin/sh\\necho ran\\n' > x; chmod +x x; ./x; touch -d 2001-01-01 x; stat -c %y x | head -c 4; pwd",
        "chmod u+s x || echo refused; chmod 700 /usr/bin || echo refused; touch /etc/passwd || echo refused",
    )
    ran, year = told[0].output.splitlines()
    assert ran == "ran"
    assert year.startswith("2001") == (year[4:] == "/app"), "elsewhere it could change times of files that all may write"
    assert told[1].output.count("Operation not permitted\nrefused\n") == 2


def test_files_are_there_before_and_hidden_ones_only_where_asked_for(session):
    async def work(shell):
        await shell.put({"src/a.sh": File(b"echo ran", True), "b": File(b"\xff\x00")})
        before = await shell.run("./src/a.sh; wc -c < b; ls .. / /tests $TESTS_DIR; cat ../../tests/test.sh", 5)
        await shell.put({"test.sh": File(b"echo secret; echo 1 > $LOGS_DIR/v/reward.txt", True), "more/x": File(b"x")}, "tests")
        unseen = await shell.run("cat /tests/test.sh ../../tests/test.sh; ls $TESTS_DIR/", 5)
        await shell.run("mkdir -p ../logs/v; echo 9 > ../logs/v/reward.txt; ln -s /etc/passwd ../logs/v/link", 5)
        await shell.logs(["v"])
        seen = await shell.run("cat $TESTS_DIR/more/x; bash $TESTS_DIR/test.sh", 5, fresh=True, sees=("tests", "logs"))
        write = await shell.run("echo x > $TESTS_DIR/test.sh || echo x > $TESTS_DIR/new", 5, sees=("tests",))
        return before, unseen, seen, await shell.read("logs/v/reward.txt"), write, await shell.read("logs/v/link")

    before, unseen, seen, reward, write, link = session(work)
    assert "ran\n2\n" in before.output
    assert "secret" not in before.output + unseen.output
    assert "test.sh" not in unseen.output.replace("tests/test.sh", "")
    assert seen.output == "xsecret\n"
    assert reward == b"1\n"
    assert link is None
    assert write.code == 1


def test_files_at_home_start_no_code_in_a_fresh_command(session):
    leave = """
        site=$(python3 -c 'import site; print(site.getusersitepackages())')
        mkdir -p $site; echo 'print("mine")' > $site/usercustomize.py; printf '[alias]\nst = !echo mine\n' > ~/.gitconfig
        echo 'echo mine' | tee ~/.bashrc ~/.profile > ~/.bash_profile; export BASH_ENV=~/.bashrc
    """
    command = "python3 -c 'print(1)'; bash -c 'echo 2'; git st 2>&1"

    async def work(shell):
        await shell.run(leave, 10)
        return await shell.run(command, 10), await shell.run(command, 10, fresh=True)

    other, fresh = session(work)
    assert "mine\n1\nmine\n2\n" in other.output
    assert "1\n2\n" in fresh.output
    assert "mine" not in fresh.output


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "", "a/./b", "a\0b"])
def test_names_of_files_that_leave_the_folder(name):
    with pytest.raises(ValueError, match="cannot be made: give a path below the folder"):
        asyncio.run(Shell("python", SMALL, "B").put({name: File(b"")}))


MANY = """
import os
for number in range(10**6):
    try: os.mkdir(str(number))
    except OSError: pass
"""
ENDLESS = {
    "sleeps": ("sleep 1000", "late"),
    "loops": ("while :; do :; done", "late"),
    "waits for input": ("read x; cat; sleep 1000", "late"),
    "stops itself": ("kill -STOP $$ $BASHPID; (kill -STOP $BASHPID); sleep 1000", "late"),
    "hides from its session": ("setsid sleep 1000 & disown; nohup setsid sleep 1000 & wait", "late"),
    "ignores signals": ("trap '' TERM INT HUP; (trap '' TERM; sleep 1000)", "late"),
    "writes without end": ("cat /dev/zero", "output"),
    "writes lines without end": ("yes", "output"),
    "fills the disk with a file": (
        "cat /dev/zero > big; cat /dev/zero > big2; cat /dev/zero > b3; cat /dev/zero > b4; sleep 9",
        "disk",
    ),
    "fills the disk with files that it removes": (
        'for i in 3 4 5 6 7 8; do eval "exec $i>f$i"; rm f$i; head -c 8000000 /dev/zero >&$i; done; sleep 9',
        "disk",
    ),
    "fills memory": (
        "for i in 1 2 3 4; do python3 -c 'x = bytearray(150 << 20); import time; time.sleep(9)' & done; wait",
        "memory",
    ),
    "makes files without end": (f"python3 -c {shlex.quote(MANY)}", "files"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_commands_are_ended_and_the_next_works(name, session):
    command, why = ENDLESS[name]
    first, second = outputs(session, command, "echo alive", seconds=2.0)
    assert first.why == why
    assert first.code is None
    assert len(first.output) <= SMALL.output + (1 << 16)
    assert (second.why, second.output) == ("ended", "alive\n") or why in ("disk", "files")


def test_who_has_too_many_files_may_remove_some_and_add_none(session):
    many = "for i in $(seq 80); do : > f$i; done; sleep 1"
    told = outputs(session, many, "rm f?; ls | wc -l", "ls | wc -l", many, "rm -f f*; ls | wc -l; : > new; ls", seconds=3)
    assert [each.why for each in told] == ["files", "ended", "ended", "files", "ended"]
    assert told[-1].output == "0\nnew\n"


def test_the_time_of_a_command_begins_with_it(session):
    assert outputs(session, "echo here", seconds=0.001)[0].why in ("ended", "late")


def test_commands_heed_signals_where_the_run_is_in_the_background(session):
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        [told] = outputs(
            session, "python3 -c 'import signal; print(*(signal.getsignal(n).name for n in (1, 3)), signal.getsignal(2))'"
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert told.output.startswith("SIG_DFL SIG_DFL <built-in function default_int_handler>")


def test_a_fork_bomb(session):
    first, second = outputs(
        session, ":(){ :|:& };:; sleep 1; echo over", "ls /proc | grep -c '^[0-9]*$' >/dev/null; echo alive", seconds=4
    )
    assert first.why in ("ended", "late", "memory")
    assert second.output.endswith("alive\n")


def test_nothing_goes_on_behind_a_command(session):
    async def work(shell):
        started = time.monotonic()
        told = await shell.run("(sleep 0.7; echo late > file) & setsid sh -c 'sleep 0.7; echo late > file2' & echo started", 5)
        brief = time.monotonic() - started
        await asyncio.sleep(1)
        return told, brief, await shell.run("ls", 5)

    told, brief, after = session(work)
    assert told.output == "started\n"
    assert brief < 3
    assert after.output == ""


def test_commands_that_destroy_their_shell(session):
    told = outputs(
        session,
        "export KEPT=1",
        "kill -9 $PPID; kill -9 -1; kill -9 $$; echo here",
        "exec 0<&- 1>&- 2>&- 58>&-",
        "for end in /proc/self/fd/*; do echo 'export KEPT=2' > $end; done; exec sleep 0",
        "chmod 000 ~ . $TMPDIR; rm -rf ~ ../work . $TMPDIR; ln -s / ../tmp; cd /; exec 58>/dev/null",
        "chmod 000 ~ .. $TMPDIR",
        "echo $KEPT; pwd",
    )
    assert told[-1].code == 0
    assert told[-1].output.splitlines()[0] in ("1", "2"), "the shell's own variables are its own"


def test_binary_output_and_a_long_state(session):
    told = outputs(
        session,
        "head -c 3000 /dev/urandom; printf '\\xff\\x00'",
        "export BIG=$(head -c 150000 /dev/zero | tr '\\0' x)",
        "echo ${#BIG}",
    )
    assert "\ufffd" in told[0].output
    assert told[1].lost
    assert told[2].output == "0\n"


@pytest.mark.parametrize(("level", "work"), LEVELS)
def test_no_attack_gets_out_of_a_shell(level, work, place, at_level):
    assert at_level(level, shell_escapes(reachable_python(), level, work)) == []
    assert os.listdir(place) == []


def test_uncontained_the_same_attacks_succeed():
    """Shows that a trial which finds nothing has looked."""
    found = asyncio.run(shell_escapes(reachable_python(), "none"))
    assert any("forks 300 times" in each for each in found)
    assert any("a change outside: written" in each for each in found)


AS_NOBODY = """
import asyncio, os
os.setgroups([])
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
from rlhf_plugin_code_exec.runner import JailFailed
from rlhf_plugin_code_exec.shell_checks import shell_escapes
from rlhf_plugin_code_exec.shell_checks import shell_escapes
from rlhf_plugin_code_exec.shells import Shell, ShellLimits
async def main():
    print(await shell_escapes({python!r}, {level!r}, {work!r}))
    shell = Shell({python!r}, ShellLimits(processes=20), {level!r}, {work!r})
    await shell.open()
    many = "echo x > a; (echo b | tee c) >> a; sort a | tr '\\n' ' '"
    for command in (many, "rm -rf ~ 2>&-; cd /", "cd; pwd > f; cat f | wc -l"):
        print((await shell.run(command, 5)).output.strip())
    print((await shell.run(":(){{ :|:& }};:; sleep 0.5", 3)).why)
    await shell.close()
try:
    asyncio.run(main())
except JailFailed as failure:
    print("no level", failure)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests are those of a user")
@pytest.mark.parametrize(("level", "work"), LEVELS)
def test_shells_of_a_user_that_is_not_root(level, work, place, anyone_s_python, packages):
    place.chmod(0o777)
    code = AS_NOBODY.format(user=NOBODY, level=level, work=work, python=anyone_s_python)
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": str(place), "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    out = subprocess.run([anyone_s_python, "-c", code], capture_output=True, text=True, env=env, cwd=place, timeout=120)
    if out.stdout.startswith("no level"):
        pytest.skip(out.stdout)
    assert out.stdout.splitlines()[:4] == ["[]", "b x", "", "1"], out.stdout + out.stderr
    assert os.listdir(place) == []
    assert inside(place) == []


def test_forks_are_not_interrupted_by_children_that_end(session):
    script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $i | cat > f$i; done; ls f* | wc -l"
    assert [each.output for each in outputs(session, *[f"dash -c '{script}'"] * 5)] == ["12\n"] * 5


def test_links_lead_nowhere(session):
    secret = Path("/etc/hostname")
    told = outputs(
        session,
        f"ln -s {secret} a; cat a; ln -s / r; ls r/; ln -s /tmp t; echo x > t/rlhf-escaped-link; ln {secret} h; cat h",
        "rm -f a r t h; echo kept",
    )
    assert secret.read_text().strip() not in told[0].output
    assert not Path("/tmp/rlhf-escaped-link").exists()
    assert told[1].output == "kept\n"


RUN = """
import asyncio, sys
from rlhf_plugin_code_exec.interpreters import reachable_python
from rlhf_plugin_code_exec.shell_checks import shell_escapes
from rlhf_plugin_code_exec.shells import Shell, ShellLimits
async def main():
    shell = Shell(reachable_python(), ShellLimits(), sys.argv[1])
    await shell.open()
    await shell.run("setsid sleep 300 & sleep 300", 300)
asyncio.run(main())
"""


@pytest.mark.parametrize("level", ["A", "B"])
def test_a_run_that_is_killed_takes_its_shells_with_it(level, place):
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, level], env={**os.environ, "TMPDIR": str(place)}, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 20
    try:
        while len(inside(place)) < 2 and run.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
        run.wait(30)
    finally:
        run.kill()
    while inside(place) or any(os.listdir(folder) for folder in place.iterdir()):
        assert time.monotonic() < until + 10
        time.sleep(0.05)


def test_a_shell_that_is_closed_or_cancelled_amid_a_command(place):
    async def work():
        shell = Shell(reachable_python(), SMALL, "B")
        await shell.open()
        job = asyncio.create_task(shell.run("sleep 100", 100))
        await asyncio.sleep(0.5)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        with pytest.raises(JailFailed, match="the shell is closed"):
            await shell.run("echo", 1)
        await shell.close()

    asyncio.run(work())
    assert os.listdir(place) == []
    assert inside(place) == []


def test_a_working_folder_hides_nothing_of_the_interpreter(place, needs_level, monkeypatch):
    python = "/usr/bin/python3"
    told = interpreter_at(python)
    for module in (interpreters, shells):
        monkeypatch.setattr(module, "interpreter_at", lambda _: replace(told, readable=[*told.readable, "/work/x"]))
    assert shells.home(python) == "/workspace"
    needs_level("A")
    with pytest.raises(JailFailed, match="the working folder /work would hide /usr/bin/python3: name another"):
        asyncio.run(Shell(python, SMALL, "A", "/work").open())


def test_an_interpreter_beside_one_s_own_files_is_refused(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "project"], check=True)
    (tmp_path / "project/runs").mkdir()
    monkeypatch.chdir(tmp_path / "project/runs")
    with pytest.raises(OSError, match=r"is installed in .*/project, all of which programs could read, with .*/project/runs"):
        interpreter_at(str(tmp_path / "project/bin/python"))
    monkeypatch.chdir(tmp_path)
    assert interpreter_at(str(tmp_path / "project/bin/python")).readable


def test_a_path_of_its_own_needs_its_own_file_system_and_none_of_the_system_s(place):
    async def opened(level, work):
        shell = Shell(reachable_python(), SMALL, level, work)
        try:
            await shell.open()
            return await shell.run(f"echo {shlex.quote(work)}", 2)
        finally:
            await shell.close()

    with pytest.raises(JailFailed, match="paths such as /app need a file system of their own"):
        asyncio.run(opened("B", "/app"))
    with pytest.raises(JailFailed, match="/usr"):
        asyncio.run(opened("A", "/usr/bin"))
