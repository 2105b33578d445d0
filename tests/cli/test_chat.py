"""``rlhf chat``: lines in, answers out."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


def talk(model, lines, *flags):
    command = [sys.executable, "-m", "rlhf_host.cli.main", "chat", str(model), "--rollout.temperature", "0", *flags]
    return subprocess.run(
        command, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, timeout=100, check=False
    )


def test_lines_are_messages_and_an_empty_one_begins_anew():
    done = talk("quickstart", ["12+34=", "", "12+34=", "%"])
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split()
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert "(a new conversation)" in done.stderr
    assert "no tokens for the observation '%'" in done.stderr, "it cannot be said, and the conversation stays"


def test_ctrl_c_ends_it_at_once():
    command = [sys.executable, "-m", "rlhf_host.cli.main", "chat", "quickstart"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdin.write("1+1=\n")
    process.stdin.flush()
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)
    assert process.returncode == 0
    assert process.stderr.read().rstrip().endswith("Ended.")
    process.stdin.close()


@pytest.mark.parametrize(
    ("words", "message"), [([], "no model is given: rlhf chat MODEL"), (["nowhere"], "no model 'nowhere': no such directory")]
)
def test_no_model(rlhf_here, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = rlhf_here("chat", *words)
    assert result.exit_code == 2
    assert message in result.output
