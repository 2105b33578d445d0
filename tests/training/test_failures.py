"""What a run that fails keeps, and that its trackers do not take it down."""

import shutil

import pytest

import rlhf_host
from rlhf_host import Adjust, RunError, UserError, hookimpl
from rlhf_host.command import rlhf
from rlhf_host.training.checkpoints import checkpoint_dirs, copy_checkpoint, load_checkpoint

MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")


class Fails:
    """Takes part in a run with a state of its own, and fails once in ``hook``, at ``at``."""

    def __init__(self, hook=None, at=3):
        self.hook, self.at = hook, at
        self.scored = self.step = 0

    def _at(self, hook, step):
        if (hook, step) == (self.hook, self.at):
            raise ConnectionError("the judge is down")

    @hookimpl
    def transform_rewards(self, experience, rewards):
        self.scored += 1
        self._at("transform_rewards", experience.step)
        return rewards * self.scored

    @hookimpl
    def prepare_batch(self, experience):
        self._at("prepare_batch", experience.step)

    @hookimpl
    def step_finished(self, step, metrics):
        self.step += 1
        metrics["finished"] = float(self.step)
        self._at("step_finished", step)

    @hookimpl
    def state_dict(self):
        return {"scored": self.scored, "step": self.step}

    @hookimpl
    def load_state_dict(self, state):
        self.scored, self.step = state["scored"], state["step"]


@pytest.fixture
def train(tiny_model, prompts, tmp_path):
    """Four steps by default; ``judge`` is the reward, and evaluations happen after every second step."""

    def judge(text):
        return sum(char in "aeiou" for char in text) / 8

    def run(name="run", *, extension=None, rewards=judge, **settings):
        small = {"rollout": {"n": 4, "max_new_tokens": 8}, "actor.lr": 1e-3, "kernels": "none", "checkpoint.every": 0}
        small |= {"train.steps": 4, "train.batch_size": 2, "train.threads": 1, "eval.every": 2, "eval.max_new_tokens": 2}
        where = {"resume": tmp_path / name} if (tmp_path / name).exists() else {"run_dir": str(tmp_path / name)}
        chosen = {"algo": "rloo", "rewards": {"judge": rewards}, "extensions": {"fails": extension} if extension else {}}
        data = {"model": tiny_model, "data": prompts, "eval_data": prompts}
        return rlhf_host.train(**chosen, **data, **where, **(small | settings))

    run.judge = judge
    return run


def curve(run):
    return [{key: value for key, value in row.items() if not key.startswith(MACHINE)} for row in run.metrics]


@pytest.fixture(scope="module")
def whole_rows():
    return {}


def whole(train, kept):
    """The rows of the run that never failed, trained once."""
    if not kept:
        kept["rows"] = curve(train("whole", extension=Fails()))
    return kept["rows"]


@pytest.mark.parametrize("hook", ["transform_rewards", "prepare_batch", "step_finished", "judge", "eval"])
def test_a_run_that_fails_keeps_the_last_finished_step(train, tmp_path, hook, whole_rows):
    calls = []

    def down(text, trajectory):
        calls.append(text)
        if len(calls) > {"judge": 24 + 16 + 24, "eval": 24 + 16 + 5}[hook]:
            raise ConnectionError("the judge is down")
        return train.judge(text)

    rewards = down if hook in ("judge", "eval") else train.judge
    with pytest.raises(RunError) as failed:
        train(extension=Fails(hook), rewards=rewards)
    step = 3 if hook == "step_finished" else 2
    assert [number for number, _ in checkpoint_dirs(tmp_path / "run")] == [step]
    again = rlhf("train", "--resume", tmp_path / "run")
    assert str(failed.value).endswith(f"; continue from {tmp_path}/run/checkpoints/step-{step:06d} with {again}")
    assert curve(train(extension=Fails())) == whole(train, whole_rows)


@pytest.mark.parametrize("kind", ["extension", "tracker"])
def test_a_run_that_is_refused_as_it_starts_leaves_its_directory_free(train, tmp_path, kind):
    """Trackers start last, when others have written already."""

    class Refuses:
        key = "wrong"

        @hookimpl
        def run_started(self, context):
            if self.key == "wrong":
                (context.run_dir / "own").mkdir()
                (context.run_dir / "own/file").touch()
                raise UserError("the server refuses the key")

        @hookimpl
        def run_finished(self, outcome):
            if self.key == "wrong":
                (tmp_path / "run/own/file").unlink()  # still there

        @hookimpl
        def log_metrics(self, step, metrics):
            pass

    refuses = Refuses()
    plugins = {"extension": refuses} if kind == "extension" else {"trackers": [refuses]}
    with pytest.raises(UserError, match="the server refuses the key"):
        train(**plugins)
    assert not (tmp_path / "run").exists()
    refuses.key = "right"
    assert len(train(**plugins, **{"train.steps": 1, "eval.every": 0}).metrics) == 2


def test_a_refusal_after_the_start_keeps_what_was_written(train, tmp_path):
    class Refuses:
        @hookimpl
        def transform_rewards(self, experience):
            raise UserError("no such rewards")

    with pytest.raises(UserError, match="no such rewards"):
        train(extension=Refuses())
    assert (tmp_path / "run/config.yaml").exists()
    assert (tmp_path / "run/metrics.jsonl").exists()


def test_a_failure_with_the_weights_on_their_way_saves_nothing_wrong(train, tmp_path):
    class Late(Fails):
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            self._at("compute_loss", self.step + 1)

    with pytest.raises(RunError, match=r"the judge is down \(.*test_failures\.py:24\); continue from .*step-000002 with"):
        train(extension=Late("compute_loss"), **{"checkpoint.every": 1, "eval.every": 0, "checkpoint.keep": 0, "debug": True})
    assert load_checkpoint(tmp_path / "run").step == 2


def test_weights_that_diverged_are_not_kept(train, tmp_path):
    """The step before is, and the message names it; from there the run goes on."""

    class Reckless:
        @hookimpl
        def step_finished(self, step, metrics):
            return Adjust({"actor.lr": 1e30 if step == 2 else 1e-3})

    with pytest.raises(RunError, match=r"actor diverged: after step 3 .* lower lr; continue from .*step-000002 with"):
        train(extension=Reckless(), **{"checkpoint.every": 1, "eval.at_end": False, "actor.max_grad_norm": 0.0})
    assert [step for step, _ in checkpoint_dirs(tmp_path / "run")] == [1, 2]


def test_state_that_cannot_be_saved_is_noticed_before_the_first_step(train):
    class Odd(Fails):
        @hookimpl
        def state_dict(self):
            return {"scored": {1, 2}}

    scored = []
    with pytest.raises(RunError, match="extension:fails gives a set in state_dict"):
        train(extension=Odd(), rewards=lambda text: scored.append(text) or 0.0)
    assert scored == []


@pytest.mark.parametrize("hook", ["log_metrics", "log_trajectories", "run_finished"])
def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(train, caplog, hook):
    calls = []

    class Down:
        def _fail(self, name):
            calls.append(name)
            if name == hook:
                raise ConnectionError("no route to host")

        @hookimpl
        def log_metrics(self, step, metrics):
            self._fail("log_metrics")

        @hookimpl
        def log_trajectories(self, step, split, trajectories):
            self._fail("log_trajectories")

        @hookimpl
        def run_finished(self, outcome):
            self._fail("run_finished")

    run = train(trackers={"down": Down()}, **{"train.steps": 2, "eval.at_start": False, "eval.at_end": False})
    assert run.outcome.status == "finished"
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert calls.count(hook) == 1
    assert calls[-1] == "run_finished"
    assert [line for line in caplog.messages if "no route to host" in line]


def test_a_run_that_fails_again_after_a_resume_names_the_checkpoint_before(train, tmp_path):
    with pytest.raises(RunError):
        train(extension=Fails("transform_rewards"), **{"checkpoint.every": 1})
    run_dir = tmp_path / "run"
    one, two = (f"{run_dir}/checkpoints/step-00000{step}" for step in (1, 2))
    with pytest.raises(RunError, match=f"continue from {two} .*; if that fails again, remove {two} to continue from {one}$"):
        train(extension=Fails("transform_rewards"))
    left = [run_dir / name for name in (".run.json.99.partial", "trajectories/.eval-step-000001.jsonl.99.partial")]
    for file in left:
        file.parent.mkdir(exist_ok=True)
        file.write_text("half")
    with pytest.raises(RunError):
        train(extension=Fails("transform_rewards"))
    assert [file for file in left if file.exists()] == [], "what a killed writer left is gone after a resume"
    rows = run_dir / "metrics.jsonl"
    rows.unlink()
    rows.mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be used: Is a directory; .*--resume \S+$"):
        train(extension=Fails())


def test_nothing_starts_from_a_damaged_model_of_a_checkpoint(tiny_model, prompts, tmp_path):
    def save(path):
        shutil.copytree(tiny_model, path, dirs_exist_ok=True)

    model = copy_checkpoint(tmp_path / "old", 1, {}, {}, {"actor": save}, lambda path: None, lambda path: None)() / "model"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50] + bytes(50))
    with pytest.raises(
        UserError, match=r"step-000001 is damaged: model/model.safetensors is not as it was written; take anoth"
    ):
        rlhf_host.train(algo="rloo", rewards={"length": len}, model=model, data=prompts, run_dir=tmp_path / "run")
    with pytest.raises(UserError, match=r"step-000001 is damaged"):
        rlhf_host.evaluate(model=tmp_path / "old", rewards={"length": len}, data=prompts)


def test_a_closed_standard_output_does_not_end_the_run(rlhf, small_run, tmp_path):
    process = rlhf.start(*small_run, "--train.steps", "2", "--checkpoint.final", "false", "--run-dir", tmp_path / "run")
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
