"""``rlhf plugins check``: the contract suite by the command line, on plugins that keep it and plugins that do not."""

from __future__ import annotations

import json

import pytest

HEAD = '''
"""A reward for tests."""
import os, time
from pydantic import BaseModel, ConfigDict, Field
from rlhf_host import hookimpl

class Judge:
    """Judges by length."""
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        longest: int = Field(10, gt=0, description="characters that earn the full reward")
    def __init__(self, options):
        self.options = options
    @hookimpl
    def score(self, trajectories):
'''
GOOD = HEAD + "        return [min(1.0, len(t.text) / self.options.longest) for t in trajectories]\n"
SHORT = HEAD + "        return [1.0]\n"


@pytest.fixture
def judged(site):
    """Installs one reward and gives its report: check → ``(result, message)``."""

    def install(code, *arguments, code_expected=0):
        site.install("cli-judge", {"rlhf.rewards": "judge = cli_judge:Judge"}, {"cli_judge.py": code})
        done = site.rlhf("plugins", "check", "judge", "--json", *arguments)
        assert done.returncode == code_expected, done.stdout + done.stderr
        (report,) = json.loads(done.stdout)
        return {check["name"]: (check["result"], check["message"]) for check in report["checks"]}

    return install


def test_a_plugin_that_keeps_the_contract_passes_every_check(site):
    site.install("cli-judge", {"rlhf.rewards": "judge = cli_judge:Judge"}, {"cli_judge.py": GOOD})
    done = site.rlhf("plugins", "check", "judge")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines, last = filter(None, done.stdout.splitlines())
    assert first == "reward judge from cli-judge 1.0"
    assert {line.split()[0] for line in lines} == {"passed"}
    assert {"entry_point_is_unique", "options_are_described", "score_gives_one_result_each"} <= {
        line.split()[1] for line in lines
    }
    assert last.startswith(f"{len(lines)} passed in ")


def test_a_broken_rule_is_told_with_the_rule_and_what_was_wrong(site):
    site.install("cli-judge", {"rlhf.rewards": "judge = cli_judge:Judge"}, {"cli_judge.py": SHORT})
    done = site.rlhf("plugins", "check", "judge", COLUMNS="120")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    start = lines.index("  FAILED   score_gives_one_result_each")
    assert lines[start + 1 : start + 3] == [
        "           A list as long as the group, of one and of many trajectories; synchronous or not.",
        "           score gave 1 results for 7 trajectories",
    ]
    passed, failed = (sum(line.startswith(f"  {word} ") for line in lines) for word in ("passed", "FAILED"))
    assert lines[-1].startswith(f"{passed} passed, {failed} failed in ")


def test_what_cannot_run_because_of_a_more_basic_failure_is_skipped(judged):
    found = judged(GOOD.replace("self.options = options", "raise RuntimeError('no weights')"), code_expected=1)
    assert found["defaults_are_valid"][0] == "failed"
    assert "building it failed: RuntimeError: no weights" in found["defaults_are_valid"][1]
    assert found["score_gives_one_result_each"][0] == "skipped"


def test_a_check_that_ends_the_process_fails_and_the_others_still_run(judged):
    dies = HEAD + "        if any('=' * 3 in t.task.prompt for t in trajectories) or len(trajectories) == 1: os._exit(7)\n"
    found = judged(dies + GOOD.splitlines()[-1] + "\n", code_expected=1)
    ended = {name for name, (_, message) in found.items() if message.startswith("it ended the process with exit code 7")}
    assert "score_gives_one_result_each" in ended
    assert {found[name][0] for name in ended} == {"failed"}
    names = list(found)
    assert found[names[-1]][0] == "passed" or names[-1] in ended
    assert found["options_are_described"][0] == "passed"
    assert names == list(dict.fromkeys(names))


@pytest.mark.parametrize(
    ("start", "deadline", "reason"),
    [("os._exit(5)", "300", "it ended the process with exit code 5"), ("time.sleep(600)", "3", "it took longer than 3 s")],
)
def test_an_import_that_dies_or_hangs_is_one_failure(judged, start, deadline, reason):
    found = judged(f"import os, time\n{start}\n", "--deadline", deadline, code_expected=1)
    assert list(found) == ["entry_point_loads"]
    assert found["entry_point_loads"] == ("failed", reason)


def test_options_reach_the_plugin_as_a_run_would_give_them(judged, site):
    strict = GOOD.replace("self.options = options", "assert options.longest == 3, options\n        self.options = options")
    assert {result for result, _ in judged(strict, "--option", "longest=3").values()} == {"passed"}


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("longst=3", "reward 'judge' from cli-judge 1.0 has no option 'longst'; did you mean 'longest'?"),
        ("longest=x", "reward 'judge' from cli-judge 1.0: longest: should be a valid integer, not 'x'"),
        ("longest", "--option longest: write KEY=VALUE"),
    ],
)
def test_options_that_do_not_fit_are_the_callers_mistake(site, option, line):
    site.install("cli-judge", {"rlhf.rewards": "judge = cli_judge:Judge"}, {"cli_judge.py": GOOD})
    done = site.rlhf("plugins", "check", "judge", "--option", option)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {line}")
    assert "Traceback" not in done.stderr


def test_every_plugin_of_the_name_is_checked_and_kind_chooses(site):
    files = {"cli_two.py": GOOD, "cli_presets/__init__.py": "", "cli_presets/two.yaml": "rollout: {n: 3, top: 1}\n"}
    points = {"rlhf.rewards": "two = cli_two:Judge", "rlhf.presets": "two = cli_presets:two.yaml"}
    site.install("cli-two", points, files)
    both = json.loads(site.rlhf("plugins", "check", "two", "--json").stdout)
    assert [(report["kind"], report["distribution"]) for report in both] == [("reward", "cli-two"), ("preset", "cli-two")]
    done = site.rlhf("plugins", "check", "two", "--kind", "preset")
    assert done.returncode == 1
    assert "FAILED   settings_are_valid" in done.stdout
    assert "preset cli-two:two:1: rollout.top: no such key" in " ".join(done.stdout.split())


@pytest.mark.usefixtures("others")
def test_what_has_no_hooks_and_what_is_not_there_are_refused(site):
    assert site.rlhf("plugins", "bench", "transformers").stderr == (
        "Error: engine 'transformers' has no hooks to call: see rlhf plugins show transformers\n"
    )
    assert site.rlhf("plugins", "check", "openai").stderr == (
        "Error: server 'openai' has no contract suite: see rlhf plugins show openai\n"
    )
    for command in ("check", "bench", "show"):
        assert site.rlhf("plugins", command, "rloo", "--kind", "reward").stderr.startswith(
            "Error: no reward named 'rloo' is installed; 'rloo' is the name of an algo"
        )
    done = site.rlhf("plugins", "check", "dynamic_filterng")
    assert (done.returncode, done.stderr) == (
        2,
        "Error: no plugin named 'dynamic_filterng' is installed; did you mean 'dynamic_filtering'?\n",
    )


@pytest.mark.parametrize("words", [["doctor"], ["plugins", "show"], ["plugins", "check", "kl"], ["plugins", "show", "kl"]])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_deadline_is_above_0(rlhf_here, words, seconds):
    done = rlhf_here(*words, "--deadline", seconds)
    said = f"Error: --deadline {seconds}: should be a number of seconds above 0\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.usefixtures("others")
def test_kernels_have_no_hooks_and_are_checked_all_the_same(site):
    """Without a GPU these suit nothing; what they refuse is not judged."""
    done = site.rlhf("plugins", "check", "liger", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    results = {check["name"]: check["result"] for check in report["checks"]}
    assert results["unsuited_computes_nothing"] == "passed"
    assert results["gradients_are_the_models"] in ("passed", "skipped")
    assert "hooks_are_known" not in results


def test_an_option_that_the_configuration_needs_for_itself_is_named(judged):
    found = judged(GOOD.replace("longest", "weight"), code_expected=1)
    assert found["defaults_are_valid"] == (
        "failed",
        "cli_judge.Judge: Options has the field 'weight', a key that the configuration needs for itself: rename the field",
    )


@pytest.mark.usefixtures("others")
def test_an_extension_that_is_named_like_a_setting_is_warned_of(site):
    code = HEAD.replace("def score(self, trajectories):", "def keep_group(self, group):") + "        return True\n"
    site.install("cli-judge", {"rlhf.extensions": "rollout = cli_judge:Judge\nsift = cli_judge:Judge"}, {"cli_judge.py": code})
    done = site.rlhf("plugins", "check", "rollout")
    warning = "Warning: 'rollout' is a setting too, and --rollout.OPTION sets that: write --with.rollout.OPTION\n"
    assert (done.returncode, done.stderr) == (0, warning), done.stdout
    assert site.rlhf("plugins", "check", "sift").stderr == ""
    flags = (
        "train",
        "--rollout.n",
        "3",
        "--with",
        "rollout",
        "--with.rollout.longest",
        "4",
        "--algo",
        "rloo",
        "--print-config",
    )
    printed = site.rlhf(*flags).stdout
    assert "rollout:\n  n: 3\n" in printed
    assert "with:\n  rollout:\n    name: rollout\n    longest: 4\n" in printed
