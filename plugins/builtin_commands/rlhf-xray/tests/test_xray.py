"""X-rays of a batch: pushes and gradients against those by hand and of a run, what is chosen, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rlhf_authoring.models import write_tiny_model
from rlhf_xray.measures import Algorithm, XRay, cosines
from rlhf_xray.saved_batch import SavedBatch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhf_host
from rlhf_host import UserError
from rlhf_host.commands import main
from rlhf_host.runs import read_steps
from rlhf_host.sampling import TrajectoryFile

rlhf_samples = pytest.importorskip("rlhf_samples")
for each in ("rloo", "grpo", "raft", "ppo", "group_methods", "online_dpo", "sft"):
    pytest.importorskip(f"rlhf_plugin_{each}")


def vowels(text: str, label: Any) -> float:
    return sum(letter in "aeiou" for letter in text) / 8


SMALL = {"n": 4, "max_new_tokens": 8, "batch_size": 4, "train": {"threads": 1}, "kernels": "none"}
ROWS = [{"prompt": f"{i}+{7 * i % 100}=", "label": str(i)} for i in range(8)]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def answers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 prompts × 4 answers of up to 8 tokens."""
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    rlhf_samples.rollout(model=tiny_model, data=ROWS, rewards=vowels, output=path, **SMALL)
    return path


@pytest.fixture
def rlhf_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """The command line in this process, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, ["xray", *map(str, arguments)])


def weights_of(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.fixture(scope="module")
def found(tiny_model, answers):
    return rlhf_host.xray(answers, model=tiny_model, algos=["rloo", "raft", "ppo", "opo"], train={"threads": 1})


def test_a_push_is_the_advantage_over_all_tokens(found):
    rloo = found.algorithms[0]
    tokens = found.about["tokens"]
    groups = {}
    for row in found.answers:
        groups.setdefault(row.group_id, []).append(row.reward)
    for row, push in zip(found.answers, rloo.push, strict=True):
        rewards = groups[row.group_id]
        advantage = row.reward - (sum(rewards) - row.reward) / (len(rewards) - 1)
        assert push == pytest.approx([advantage / tokens] * row.action_length, abs=1e-7)


def test_answers_that_are_not_chosen_have_no_push(found):
    raft = next(each for each in found.algorithms if each.name == "raft")
    best = {}
    for row in found.answers:
        best[row.group_id] = max(best.get(row.group_id, -math.inf), row.reward)
    acting = [row for row, push in zip(found.answers, raft.push, strict=True) if any(push)]
    assert raft.rows == len(acting) == len(best)
    assert all(row.reward == best[row.group_id] for row in acting)


def test_texts_of_tokens_are_those_of_the_answers(found, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for row, pieces, logprobs in zip(found.answers, found.pieces, found.logprobs, strict=True):
        assert len(pieces) == len(logprobs) == row.action_length
        assert "".join(pieces) == tokenizer.decode(row.actions[0].token_ids)
        assert logprobs == pytest.approx(list(row.actions[0].logprobs), abs=1e-4)


@pytest.mark.parametrize("algo", ["rloo", "raft", "ppo"])
def test_a_gradient_is_that_of_a_run(found, tiny_model, answers, algo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = rlhf_host.train(
        algo=algo,
        from_trajectories=answers,
        model=tiny_model,
        lr=1.0,
        steps=1,
        actor={"max_grad_norm": 0.0, "warmup_steps": 0},
        backend={"name": "torch", "optimizer": "SGD"},
        trackers=[],
        run_dir="run",
        **SMALL,
    )
    before, after = weights_of(tiny_model), weights_of(run.model)
    number = [each.name for each in found.algorithms].index(algo)
    assert found.gradients[number].keys() <= before.keys()
    for name, gradient in found.gradients[number].items():
        assert torch.allclose(gradient, before[name] - after[name], atol=1e-5), name
    assert found.algorithms[number].length > 0


def test_ratios_to_the_file_clip(answers, tiny_model, tmp_path):
    (step,) = read_steps(answers)
    for row in step.rows:
        for segment in row.actions:
            segment.logprobs = [value - 1.0 for value in segment.logprobs]
    file = TrajectoryFile(tmp_path / "moved.jsonl")
    file.add(step)
    file.write()
    settings = {"model": tiny_model, "algos": ["grpo", "grpo/pg"], "train": {"threads": 1}}
    first, later = (rlhf_host.xray(file.path, old_logprobs=old, **settings) for old in ("model", "file"))
    assert later.about["logprob_gap"]["mean"] == pytest.approx(1.0, abs=1e-3)
    assert any("differ by 1 on average" in notice for notice in first.about["notices"])
    for before, after in zip(first.algorithms[0].push, later.algorithms[0].push, strict=True):
        # every ratio is e: a clip leaves only what makes tokens less likely
        assert after == pytest.approx([math.e * value if value < 0 else 0.0 for value in before], rel=1e-3)
    assert later.algorithms[1].push == first.algorithms[1].push


def test_pushes_count_by_hand():
    each = Algorithm.of("one", torch.tensor([3.0, 4.0]), [[4.0, -3.0, 0.0], [0.5], [0.0, 1e-9]])
    assert (each.length, each.rows, each.tokens, each.half, each.largest) == (5.0, 2, 3, 1, 4.0)
    nothing = Algorithm.of("none", torch.zeros(2), [[0.0]])
    assert (nothing.length, nothing.rows, nothing.tokens, nothing.half) == (0.0, 0, 0, 0)


def test_cosines_are_those_of_torch():
    vectors = [*torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.zeros(7)]
    for number, values in enumerate(cosines(vectors, at_once=2)):
        for other, value in enumerate(values):
            if bool(vectors[number].any()) and bool(vectors[other].any()):
                expected = torch.cosine_similarity(vectors[number].double(), vectors[other].double(), dim=0)
                assert value == pytest.approx(float(expected), abs=1e-9)
            else:
                assert math.isnan(value)


def test_columns_are_the_algorithms_that_differ_most():
    vectors = [torch.tensor(row) for row in ([1.0, 0.0], [1.0, 0.01], [0.0, 0.0], [0.0, 1.0], [-1.0, 0.0])]
    each = [Algorithm.of(str(number), vector, [[1.0]]) for number, vector in enumerate(vectors)]
    found = XRay(each, cosines(vectors), {}, [], [], [], {})
    assert found.spread(2) == [0, 4]
    assert found.spread(9) == [0, 1, 3, 4]
    assert found.alike() == [["0", "1"]]


def test_everything_installed_is_compared_or_left_out_with_its_reason(answers, tiny_model, rlhf_here):
    result = rlhf_here(answers, "--model", tiny_model, "--train.threads", "1", "--output", "x.html", "--rows", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(result.stdout.split())
    assert "16 answers to 4 prompts" in text
    for name in ("rloo", "rloo/gspo", "grpo", "raft", "online_dpo", "ppo"):
        assert any(f" {name} " in line for line in lines), name
    assert "sft: it trains on rows of a data set" in text
    page = Path("x.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["answers"]) == 3
    assert data["left"] == 13
    assert len(data["cosines"]) == len(data["algorithms"]) >= 15
    assert "@@" not in page


def test_teachers_are_compared_where_they_are_known(answers, tiny_model, tmp_path):
    pytest.importorskip("rlhf_plugin_distill")
    other = write_tiny_model(tmp_path / "teacher", seed=1)
    sdpo = {
        "name": "sdpo",
        "template": "{prompt}{solution}",
        "solution_template": "{solution}",
        "feedback": "never",
        "success": 0.1,
        "signal": "full",
    }
    settings = {"model": tiny_model, "train": {"threads": 1}}
    taught = rlhf_host.xray(answers, algos=[sdpo, "rloo"], **settings).algorithms[0]
    assert taught.length > 0
    assert taught.unseen
    (teacher, rloo) = rlhf_host.xray(
        answers, algos=["on_policy_distill", "rloo"], teacher={"model": other}, **settings
    ).algorithms
    assert teacher.rows == 16 > rloo.rows
    with pytest.raises(UserError, match=r"nothing says which model that is: give teacher\.model=DIR"):
        rlhf_host.xray(answers, algos=["on_policy_distill"], **settings)
    with pytest.raises(UserError, match="its role teacher differs from that of another algorithm"):
        rlhf_host.xray(answers, algos=["on_policy_distill", sdpo], teacher={"model": other}, **settings)


def test_texts_cannot_leave_the_data_of_the_page(found):
    from rlhf_xray.page import page

    pieces = [["</script><script>alert(1)</script>"] * len(row) for row in found.pieces]
    text = page(XRay(found.algorithms, found.cosines, {}, found.answers, pieces, found.logprobs, found.about), 99)
    assert text.count("</script>") == 2
    assert "alert(1)" in text


def test_weights_of_the_last_layer_and_of_an_adapter(answers, tiny_model, found, rlhf_here):
    common = (answers, "--model", tiny_model, "--algo", "rloo", "--train.threads", "1", "--json")
    last, pattern, lora = (
        json.loads(rlhf_here(*common, "--weights", weights).stdout) for weights in ("last-layer", "*norm*", "lora")
    )
    assert 0 < pattern["numbers"] < last["numbers"] < found.about["numbers"]
    assert 0 < lora["numbers"] < found.about["numbers"]
    assert all(each["algorithms"][0]["length"] > 0 for each in (last, pattern, lora))
    assert last["algorithms"][0]["length"] < found.algorithms[0].length


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """Two runs of two steps: one with tokens, which keeps the model after each step, and one without."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"algo": "rloo", "rewards": vowels, "model": tiny_model, "data": ROWS, "trackers": [], "steps": 2, **SMALL}
    rlhf_host.train(
        run_dir=folder / "kept", trajectories={"tokens": True, "every": 1}, checkpoint={"every": 1, "keep": 5}, **common
    )
    rlhf_host.train(run_dir=folder / "texts", trajectories={"every": 1}, **common)
    return folder


def test_of_a_run_the_model_is_the_one_that_sampled(runs, tiny_model):
    for step, model in ((1, tiny_model), (2, runs / "kept/checkpoints/step-000001/model")):
        found = rlhf_host.xray(f"{runs / 'kept'}@{step}", algos=["rloo"], only_actor=True, train={"threads": 1})
        assert Path(found.about["model"]) == model
        assert found.about["step"] == step
        assert found.about["old_logprobs"] == "model"
        assert found.about["logprob_gap"]["max"] < 1e-3


@pytest.fixture
def run_of_rows(answers, tiny_model, tmp_path):
    """Writes a run directory by hand: step 3, sampled by weights of some versions, with models after steps 1 and 2."""

    def write(versions, actor=None, **settings):
        run = tmp_path / "run"
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["step"] = 3
            for segment in row["segments"]:
                if segment["kind"] == "action":
                    segment["versions"] = [versions[number % len(versions)]] * len(segment["token_ids"])
        (run / "trajectories").mkdir(parents=True)
        (run / "trajectories/train-step-000003.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in (1, 2):
            place = run / f"checkpoints/step-{step:06}"
            place.mkdir(parents=True)
            (place / "state.json").write_text("{}")
            (place / "model").symlink_to(tiny_model, target_is_directory=True)
        tree = {"train": {"steps": 3}, "checkpoint": {}, "data": {"sources": []}, "roles": {"actor": actor or {}}, **settings}
        tree["roles"]["actor"].setdefault("model", str(tiny_model))
        (run / "config.yaml").write_text(json.dumps(tree))
        return run

    return write


@pytest.mark.parametrize(
    ("versions", "model", "old"),
    [([2], "step-000002", "model"), ([1], "step-000001", "model"), ([1, 2], "step-000002", "file")],
)
def test_of_a_run_that_sampled_ahead_the_versions_of_rows_count(run_of_rows, versions, model, old):
    batch = SavedBatch.of(f"{run_of_rows(versions, async_depth=1)}@3", None, None, None)
    assert model in batch.model
    assert batch.old_logprobs == old
    assert [("ratios are to the log-probabilities of the file" in notice) for notice in batch.notices] == [True] * (
        old == "file"
    )


def test_the_model_that_a_run_began_with_is_loaded_as_the_run_loaded_it(run_of_rows, tiny_model):
    how = {"revision": "main", "adapter": "adapters/x", "tokenizer": "tok", "dtype": "bfloat16"}
    run = run_of_rows([0], actor={**how, "quantize": None, "attn_implementation": "auto", "trust_remote_code": False})
    batch = SavedBatch.of(f"{run}@3", None, None, None)
    assert (Path(batch.model), batch.loaded) == (tiny_model, how)
    assert SavedBatch.of(f"{run}@3", tiny_model, None, None).loaded == {}
    with pytest.raises(UserError, match="the run began with the adapter adapters/x"):
        rlhf_host.xray(f"{run}@3", algos=["rloo"], weights="lora")


WRONG = {
    "no batch": ([], "no batch is given"),
    "no model": (["{answers}"], "--model DIR"),
    "an unknown algorithm": (["{answers}", "--model", "{model}", "--algo", "grpoo"], "did you mean 'grpo'"),
    "an unknown loss": (["{answers}", "--model", "{model}", "--algo", "rloo/clipp"], "rloo/clipp: it has no loss 'clipp'"),
    "rows of a data set": (["{answers}", "--model", "{model}", "--algo", "sft"], "sft: it trains on rows of a data set"),
    "a role": (["{answers}", "--model", "{model}", "--algo", "ppo", "--only-actor", "true"], "only the actor is loaded"),
    "no tokens": (["{runs}/texts@1"], "--trajectories.tokens"),
    "several steps": (["{runs}/kept"], "has the steps 1, 2"),
    "a step that is not there": (["{runs}/kept@7"], "no trajectories of step 7"),
    "two steps": (["{runs}/kept@1", "--step", "2"], "names a step already"),
    "no page": (["{answers}", "--model", "{model}", "--output", "page.txt"], "ends in .html"),
    "no pattern": (["{answers}", "--model", "{model}", "--algo", "rloo", "--weights", "*nothing*"], "nothing"),
    "other log-probabilities": (["{answers}", "--model", "{model}", "--old-logprobs", "new"], "model or file"),
    "a setting of training": (["{answers}", "--model", "{model}", "--rollout.n", "4"], "rlhf xray does not use it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_compared_is_refused(case, answers, tiny_model, runs, rlhf_here):
    arguments, message = WRONG[case]
    result = rlhf_here(*(word.format(answers=answers, model=tiny_model, runs=runs) for word in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_answers_without_rewards_are_refused(tiny_model):
    rows = rlhf_samples.rollout(model=tiny_model, data=ROWS, rollouts=4, **SMALL)
    with pytest.raises(UserError, match="no answer of step 1 has a reward"):
        rlhf_host.xray(rows, model=tiny_model)
