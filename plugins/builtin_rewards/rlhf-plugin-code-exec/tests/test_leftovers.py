"""Leftovers of commands that a fresh command's tools would start with: none of it reaches the fresh command, and results do."""

import asyncio
import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_plugin_code_exec.interpreters import reachable_python
from rlhf_plugin_code_exec.jail.leftovers import KNOWN, described
from rlhf_plugin_code_exec.shells import Shell, ShellLimits

LIMITS = ShellLimits(memory=512 << 20, files=3000, disk=64 << 20)
EVIL = """printf '#!/bin/sh\\ntouch "$LOGS_DIR/%s"\\n' NAME > evil; chmod +x evil; """
TOLD = 'touch "$LOGS_DIR/NAME"'
REPOSITORY = (
    "git init -q . && git config user.name n && git config user.email e && echo x > f && git add f && git commit -qm m; " + EVIL
)
PDB = 'echo \'import os; open(os.environ["LOGS_DIR"] + "/NAME", "w")\' > '
DEBUG = "echo q | python3 -m pdb p.py"
CHANGED = "touch -d 2001-01-01 f; echo y >> f; "
WAYS = {
    "profile": (f"echo '{TOLD}' > ~/.bash_profile", "bash -lc true"),
    "bashrc": (f"echo '{TOLD}' > ~/.bashrc", "bash -ic true"),
    "sqliterc": (f"echo '.shell {TOLD}' > ~/.sqliterc", "sqlite3 x.db 'select 1'"),
    "jq": ("echo 'def map(f): 1;' > ~/.jq", f"[ $(echo '[2]' | jq -c 'map(. + 1)') = 1 ] && {TOLD}"),
    "gdbinit": (f"echo 'shell {TOLD}' > ~/.gdbinit", "gdb -batch -ex 'print 1'"),
    "node": (
        'mkdir -p ~/.node_modules; echo \'require("fs").writeFileSync(process.env.LOGS_DIR + "/NAME", "")\' > ~/.node_modules/z.js',
        "cd $TMPDIR; node -e 'require(\"z\")'",
    ),
    "usersite": (
        "site=$(python3 -m site --user-site); mkdir -p $site; " + PDB + "$site/usercustomize.py",
        "python3 -c pass",
    ),
    "pdbrc": (f"{PDB} ~/.pdbrc; echo x = 1 > p.py", DEBUG),
    "pdbrc-here": (f"{PDB} .pdbrc; echo x = 1 > p.py", DEBUG),
    "gitconfig": (REPOSITORY + "git config -f ~/.gitconfig core.fsmonitor $PWD/evil", "git status"),
    "fsmonitor": (REPOSITORY + "git config core.fsmonitor ./evil", "git status"),
    "hook": (REPOSITORY + "cp evil .git/hooks/pre-commit", "git add -A; git commit -qm x"),
    "hooks": (REPOSITORY + "mkdir h; cp evil h/post-checkout; git config core.hooksPath h", "git checkout -q -b other"),
    "filter": (REPOSITORY + f"echo '* filter=e' > .gitattributes; git config filter.e.clean ./evil; {CHANGED}", "git status"),
    "textconv": (REPOSITORY + "echo '* diff=e' > .git/info/attributes; git config diff.e.textconv ./evil", "git log -p"),
    "external": (REPOSITORY + f"git config diff.external ./evil; {CHANGED}", "git diff"),
    "gpg": (REPOSITORY + "git config commit.gpgsign 1; git config gpg.program $PWD/evil", "git commit --allow-empty -qm x"),
    "include": (REPOSITORY + "git config -f i core.fsmonitor ./evil; git config include.path ../i", "git status"),
    "worktree": (REPOSITORY + "mkdir w; mv f w; git config core.worktree $PWD/w", f"git diff --quiet && {TOLD}"),
    "untracked": (REPOSITORY + "git config status.showUntrackedFiles no", f'[ -z "$(git status --porcelain)" ] && {TOLD}'),
    "link": (REPOSITORY + "mv .git/config c; ln -s ../c .git/config; git config -f c core.fsmonitor ./evil", "git status"),
    "gitdir": (REPOSITORY + "mv .git g; echo 'gitdir: g' > .git; git config -f g/config core.fsmonitor ./evil", "git status"),
    "own-config": (
        REPOSITORY + "git config extensions.worktreeConfig true; git config --worktree core.fsmonitor ./evil",
        "git status",
    ),
    "alias": (REPOSITORY + "git config alias.st '!./evil'", "git st"),
    "remote": (REPOSITORY + "git config core.sshCommand ./evil; git remote add origin git@x:y", "git fetch origin"),
    "helper": (REPOSITORY + "git config credential.helper $PWD/evil", "echo protocol=https | git credential fill"),
    "above": ("git init -q ../..; " + EVIL + "git -C ../.. config core.fsmonitor $PWD/evil", "git status"),
    "modes": (REPOSITORY + "git config core.fsmonitor ./evil; chmod 400 .git/config; chmod 500 .git", "git status"),
    "temporary": ("ln -s $LOGS_DIR/NAME $TMPDIR/NAME-out; echo 1 > $TMPDIR/NAME-file", f"[ -e $TMPDIR/NAME-file ] && {TOLD}"),
    "memory": ("echo 1 > /dev/shm/NAME", f"[ -e /dev/shm/NAME ] && {TOLD}"),
    "out": ("ln -s /logs/NAME out; ln -s ../../../logs/NAME out2", "echo 1 > out; echo 1 > out2"),
    "chain": (
        "ln -s / r; ln -s r/logs l; ln -s l/NAME out; ln -s ../../.. u; ln -s u/logs v; ln -s v/NAME out2",
        "echo 1 > out; echo 1 > out2",
    ),
    "process": ("ln -s /proc/self/root/logs/NAME out", "echo 1 > out"),
    "at-home": (
        "ln -s /empty-home/.bash_profile out; ln -s ../../../empty-home/.bashrc b",
        f"echo '{TOLD}' > out; bash -lc true",
    ),
}
"""Leftovers of commands in a folder of their own, and a fresh command there: it makes the file if it was led to."""
RESULTS = """
mkdir -p d/e; echo kept > d/e/f; ln -s d/e/f link; ln -s /usr/bin/python3 python; echo 'echo ran' > run; chmod 755 run
mkdir shut; echo 2 > shut/x; chmod 500 shut; ln -s nowhere dangling
git init -q g; cd g; git config user.name Me; git remote add origin https://host/x; git config alias.st status
"""
SEEN = """
cat d/e/f link; ./run; ./python -c 'print(3)'; cat shut/x; stat -c %a shut; readlink dangling
git -C g config user.name; git -C g remote get-url origin; git -C g st --porcelain; ls -A ~ $TMPDIR | grep -c ^[^/]
"""


@pytest.fixture(params=[("A", "/app"), ("B", "")], ids=["A", "B"])
def fresh(request, place, needs_level):
    """Runs a command, then another as a fresh one: ``fresh(left, then)`` returns its output."""
    level, work = request.param
    needs_level(level)

    async def played(left, then):
        shell = Shell(reachable_python(), LIMITS, level, work)
        try:
            await shell.open()
            await shell.logs()
            before = await shell.run(left, 60, variables={"LOGS_DIR": "/logs"})
            await shell.logs()
            return before, await shell.run(then, 60, fresh=True, sees=("logs",))
        finally:
            await shell.close()

    return lambda left, then: asyncio.run(played(left, then))


def test_no_setting_that_commands_left_is_followed(fresh):
    left = "".join(f"mkdir {name}; (cd {name}; {leaves.replace('NAME', name)})\n" for name, (leaves, _) in WAYS.items())
    then = "".join(
        f"(cd {name}; {triggers.replace('NAME', name)}) > /dev/null 2>&1 < /dev/null\n" for name, (_, triggers) in WAYS.items()
    )
    _, told = fresh(left, f"{then}\necho led: $(ls $LOGS_DIR)")
    assert (told.why, told.output) == ("ended", "led:\n")


def test_results_are_seen(fresh):
    _, told = fresh(RESULTS, SEEN)
    assert told.output.split("\n") == ["kept", "kept", "ran", "3", "2", "500", "nowhere", "Me", "https://host/x", "0", ""]


def test_a_folder_of_odd_things_is_no_way_out(fresh):
    odd = """
        mkfifo .pdbrc; mkdir -p .perldb .git/config .git/objects .git/refs; ln -s self self; ln -s b a; ln -s a b
        touch "$(printf '\\xff\\n.pdbrc')"; mkdir r; cd r; git init -q .; head -c 3000000 /dev/urandom > .git/config; chmod 0 .git
        mkdir -p s/objects s/refs; mkfifo s/config; mkdir t; chmod 0 t
    """
    assert fresh(odd, "echo here")[1].output == "here\n"


PIECES = (
    *(
        "[core]",
        '[filter "a b"]',
        "[alias]",
        "[core.x]",
        '[remote "o\\"]"]',
        "[CORE] fsmonitor=x",
        "[include]",
        "[user]",
        "[diff",
    ),
    *(
        "fsmonitor = ./x",
        "bare",
        "name = a\\",
        "path = y",
        'url = "a',
        "st = !x",
        "co = checkout",
        "clean=z",
        "\thooksPath = h",
    ),
    *("# c \\", "; d", "", "\\", '"', "]", "\r", "\ufeff", "\0", " = ", "repositoryformatversion = 0", "[user]name=x"),
)


@pytest.mark.skipif(shutil.which("git") is None, reason="git reads what is left")
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(["\n", "", "\r\n", " "])), max_size=12))
def test_git_finds_only_known_settings_in_what_is_left(parts, tmp_path):
    file = tmp_path / "config"
    file.write_bytes(described("".join(map("".join, parts))).encode())
    listed = subprocess.run(["git", "config", "-f", file, "-z", "--list"], capture_output=True, text=True, cwd=tmp_path)
    for entry in listed.stdout.split("\0")[:-1]:
        name, _, value = entry.partition("\n")
        section, key = name.split(".")[0], name.rsplit(".", 1)[1]
        assert key in KNOWN.get(section, ()) or (section == "alias" and "!" not in value), (entry, file.read_text())
    assert os.path.exists(file)
