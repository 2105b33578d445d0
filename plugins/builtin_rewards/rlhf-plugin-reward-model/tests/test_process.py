"""Process reward models judge as plain transformers does: what they read, where, and what becomes of the steps' scores."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rlhf_authoring.models import SYMBOLS, write_tiny_model
from rlhf_plugin_reward_model.process import ProcessReward
from rlhf_plugin_reward_model.steps import parts_of, steps_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from rlhf_host import Needs, ScoreContext, Segment, Task, Trajectory, Unjudged, UserError
from rlhf_host.cli.main import main
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.models.loading import context_length, load_model, load_tokenizer
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.runtimes.compute import Inline
from rlhf_host.runtimes.local_runtime import LocalTrainer
from rlhf_host.training.role import Role
from rlhf_host.training.role_handles import TrainerRole
from rlhf_host.training.worker import Worker

CHAT = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<eos>{% endfor %}"
TAG = "<extra_0>"
ANSWERS = ("1+1=2\nso 2", "a bird\n\nno.\n4", "no. no. no.", "2\n")
STEPS = (("1+1=2", "so 2"), ("a bird", "no.", "4"), ("no. no. no.",), ("2",))


def write(directory: Path, kind, symbols=SYMBOLS, config=LlamaConfig, seed=5, **settings) -> Path:
    """A random model with a tokenizer of characters, whose numbers are of size 1."""
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = CHAT
    if TAG in symbols:
        tokenizer.add_special_tokens({"additional_special_tokens": [TAG]})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(
            config(
                vocab_size=len(symbols),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=96,
                pad_token_id=0,
                **settings,
            )
        )
        for weight in model.parameters():
            weight.data.normal_(std=0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def scalar(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("scalar") / "prm", LlamaForSequenceClassification, num_labels=1)


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> Path:
    """A token classifier as TRL's trainer saves it: two labels, a head with a bias; another vocabulary."""
    return write(tmp_path_factory.mktemp("labels") / "prm", LlamaForTokenClassification, SYMBOLS[::-1], num_labels=2)


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """The head of Qwen2.5-Math-PRM (arXiv:2501.07301): two layers with a ReLU between them, two labels."""

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        width = config.hidden_size
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self.post_init()

    def forward(self, input_ids):
        return self.score(self.model(input_ids=input_ids).last_hidden_state)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    directory = write(tmp_path_factory.mktemp("qwen") / "prm", Qwen2ForProcessRewardModel, [*SYMBOLS, TAG], config=Qwen2Config)
    file = directory / "config.json"
    code = {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}  # which is not there, and is not run
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": code}))
    return directory


@pytest.fixture(scope="module")
def tags(tmp_path_factory) -> Path:
    """A language model that says + or - after a tag, as Math-Shepherd's."""
    return write(tmp_path_factory.mktemp("tags") / "prm", LlamaForCausalLM, [*SYMBOLS, "|"])


def group_of(policy: Path, answers=ANSWERS, prompt="1+1=") -> list[Trajectory]:
    tokenizer = load_tokenizer(RoleConfig(model=str(policy)))
    return [
        Trajectory(
            f"0-{sample}", "0", Task(prompt), [
                Segment("prompt", tokenizer(prompt)["input_ids"]),
                Segment("action", [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]),
            ],
            sample=sample, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )
        for sample, answer in enumerate(answers)
    ]  # fmt: skip


def role_of(path: Path) -> TrainerRole:
    settings = RoleConfig(model=str(path), device="cpu")
    model, train = load_model(settings, head="scalar"), TrainConfig()
    worker = Worker({"prm": Role.of("prm", model, train)}, PluginManager([]), train, Needs())
    return TrainerRole(LocalTrainer(worker, Inline()), "prm", settings, context_length(model), temperature=1.0)


def judged(rows, role=None, *, policy=None, **options):
    plugin = ProcessReward(ProcessReward.Options(**options))

    async def ask():
        tokenizers = {"actor": load_tokenizer(RoleConfig(model=str(policy)))} if policy else {}
        plugin.check_run({}, tokenizers | ({} if role is None else {"prm": role.tokenizer}))
        await plugin.run_started(SimpleNamespace())
        try:
            return await plugin.score(rows, ScoreContext(roles={} if role is None else {"prm": role}))
        finally:
            await plugin.run_finished()

    return asyncio.run(ask())


def values(rewards):
    return [reward.total for reward in rewards]


def means(rewards):
    return [reward.metrics["prm/mean"] for reward in rewards]


# --- the forms, against plain transformers ----------------------------------------------------------------------------


def test_a_scalar_head_is_read_after_each_step_as_it_is_trained(policy, scalar):
    """The prompt's own tokens, then each step and the separator tokenised apart: what ``--algo prm`` trains on."""
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(scalar), AutoTokenizer.from_pretrained(scalar)
    rows, expected = group_of(policy), []
    for row, steps in zip(rows, STEPS, strict=True):
        ids, places = list(row.prompt_ids), []
        for step in steps:
            ids += tokenizer(step)["input_ids"] + tokenizer("\n")["input_ids"]
            places.append(len(ids) - 1)
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([ids])).last_hidden_state
            expected.append(model.score(states)[0, places, 0].sigmoid().tolist())
    role = role_of(scalar)
    for aggregate, function in (("min", min), ("last", lambda each: each[-1]), ("product", math.prod), ("sum", sum)):
        found = values(judged(rows, role, policy=policy, aggregate=aggregate))
        assert found == pytest.approx([function(each) for each in expected], abs=1e-5)
    found = judged(rows, role, policy=policy, aggregate="mean")
    assert values(found) == pytest.approx([sum(each) / len(each) for each in expected], abs=1e-5)
    assert [reward.metrics["prm/steps"] for reward in found] == [2, 3, 1, 1]
    assert max(map(max, expected)) - min(map(min, expected)) > 0.1, "nothing was compared"


def test_a_classifier_of_two_labels_is_read_where_trls_trainer_puts_its_labels(policy, labels):
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(labels), AutoTokenizer.from_pretrained(labels)
    rows, expected = group_of(policy), []
    for steps in STEPS:
        ids, places = tokenizer("1+1=")["input_ids"], []
        for step in steps:
            ids += tokenizer(step)["input_ids"] + tokenizer("\n")["input_ids"]
            places.append(len(ids) - 1)
        with torch.no_grad():
            expected.append(min(model(input_ids=torch.tensor([ids])).logits.softmax(-1)[0, places, 1].tolist()))
    assert model.classifier_bias if hasattr(model, "classifier_bias") else model.score.bias is not None
    found = judged(rows, form="labels", model=str(labels), template="pieces", device="cpu")
    assert values(found) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.02


def test_a_head_of_two_layers_is_read_at_its_tag_in_its_chat_template(policy, qwen):
    model, tokenizer = Qwen2ForProcessRewardModel.from_pretrained(qwen), AutoTokenizer.from_pretrained(qwen)
    tag, expected = tokenizer.convert_tokens_to_ids(TAG), []
    for steps in STEPS:
        messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": TAG.join(steps) + TAG}]
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False, return_tensors="pt")
        ids = ids["input_ids"]
        with torch.no_grad():
            probabilities = model(ids).softmax(-1)[0, (ids[0] == tag).nonzero().squeeze(-1), 1]
        expected.append(float(probabilities.mean()))
    found = judged(group_of(policy), form="labels", model=str(qwen), template="chat", tag=TAG, aggregate="mean", device="cpu")
    assert values(found) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01


@pytest.mark.parametrize("join", ["", "\n"])
def test_a_language_model_says_good_or_bad_after_each_tag(policy, tags, join):
    model, tokenizer = LlamaForCausalLM.from_pretrained(tags), AutoTokenizer.from_pretrained(tags)
    good, bad, tag = (tokenizer.convert_tokens_to_ids(token) for token in "+-|")
    expected = []
    for steps in STEPS:
        text = "1+1=" + join.join(f"{step}|" for step in steps)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[:, :, [good, bad]].softmax(dim=-1)[:, :, 0]
        expected.append(math.prod(scores[ids == tag].tolist()))
    chosen = {"form": "tags", "model": str(tags), "template": "text", "tag": "|", "aggregate": "product", "device": "cpu"}
    found = judged(group_of(policy), **chosen, **({"join": join} if join else {}))
    assert values(found) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.02


def test_what_shares_a_batch_changes_nothing(policy, scalar, labels):
    rows, role = group_of(policy), role_of(scalar)
    published = {"form": "labels", "model": str(labels), "template": "pieces", "device": "cpu"}
    for judge in (lambda rows: judged(rows, role, policy=policy), lambda rows: judged(rows, **published)):
        alone = [judge([row])[0].total for row in rows]
        assert values(judge(rows[::-1])) == pytest.approx(alone[::-1], abs=1e-5)


# --- steps and their places -------------------------------------------------------------------------------------------


def test_steps_end_at_the_token_that_completes_their_separator(policy):
    rows = group_of(policy)
    for row, steps in zip(rows, STEPS, strict=True):
        found = steps_of(row, "\n")
        assert [step.text for step in found] == list(steps)
        ends = [row.decode(row.actions[0].token_ids[: step.token + 1]) for step in found]
        assert [end.rstrip("\n").split("\n")[-1] for end in ends] == list(steps)
    # A last step without a separator ends with the turn, the end token included.
    assert steps_of(rows[0], "\n")[-1].token == rows[0].action_length - 1
    assert steps_of(rows[0], "+")[0].token == 1


def test_steps_go_on_over_turns(policy):
    row = group_of(policy)[0]
    row.segments += [Segment("observation", [5, 6]), Segment("action", row.segments[1].token_ids)]
    first = len(row.segments[1].token_ids)
    assert [step.token for step in steps_of(row, "\n")] == [5, first - 1, first + 5, 2 * first - 1]


def test_a_part_of_the_reward_is_at_the_end_of_each_step_and_the_sum_is_the_same(policy, scalar):
    rows, role = group_of(policy), role_of(scalar)
    for aggregate in ("min", "last", "mean", "product", "sum"):
        end = judged(rows, role, policy=policy, aggregate=aggregate)
        placed = judged(rows, role, policy=policy, aggregate=aggregate, place="steps")
        assert values(placed) == pytest.approx(values(end), abs=1e-6)
        for row, reward in zip(rows, placed, strict=True):
            assert len(reward.tokens) == row.action_length
            ends = {step.token for step in steps_of(row, "\n")}
            assert {place for place, value in enumerate(reward.tokens) if value} <= ends


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("min", [0.8, -0.3, 0.0]),
        ("last", [0.8, -0.3, 0.1]),
        ("product", [0.8, -0.4, -0.16]),
        ("mean", [0.8 / 3, 0.5 / 3, 0.2]),
        ("sum", [0.8, 0.5, 0.6]),
    ],
)
def test_parts_are_the_changes_of_the_aggregate(aggregate, expected):
    assert parts_of([0.8, 0.5, 0.6], aggregate) == pytest.approx(expected)


# --- what is refused, and what cannot be judged -----------------------------------------------------------------------


def test_answers_without_steps_too_long_ones_and_tags_in_an_answer_are_unjudged(policy, scalar, qwen):
    rows = group_of(policy, ("", " \n\n", "2", "2 " * 60))
    found = judged(rows, role_of(scalar), policy=policy)
    assert [getattr(each, "reason", None) for each in found] == [
        "the answer has no step",
        "the answer has no step",
        None,
        "125 tokens are more than the limit of 96",
    ]
    written = group_of(qwen, (f"2{TAG}",))
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    written[0].decode = lambda ids: tokenizer.decode(ids).replace("<eos>", "")
    (found,) = judged(written, form="labels", model=str(qwen), template="text", tag=TAG, device="cpu")
    assert found == Unjudged("2 tags for 1 steps: the answer or its prompt has the tag itself")


def test_numbers_that_are_not_finite_are_no_reward(policy, scalar):
    role = role_of(scalar)
    role._trainer.worker.roles["prm"].passes.model.score.weight.data[0, 3] = math.nan
    assert judged(group_of(policy)[:1], role, policy=policy) == [Unjudged("the model's numbers are not finite")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"good": "yes"}, "good and bad are tokens of form tags; form scalar has none"),
        ({"device": "cpu"}, "is a role of the run: set --roles.prm.device"),
        ({"form": "labels", "template": "text"}, "form labels needs model"),
        ({"form": "tags", "model": "x"}, "form tags reads with its own tokenizer: set template to pieces, text or chat"),
        ({"join": "\n"}, "template same_tokens tokenises each step apart: leave join out"),
        ({"aggregate": "max"}, "aggregate"),
        ({"seperator": "\n"}, "seperator"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ProcessReward.Options(**options)


def test_models_and_tags_that_do_not_fit_are_refused(policy, scalar, labels, tags, tmp_path):
    def start(role=None, **options):
        return judged([], role, policy=policy, **options)

    with pytest.raises(UserError, match=r"the tag must be one token .* 'END' is 0: set tag"):  # it has no capitals
        start(role_of(scalar), template="text", tag="END")
    with pytest.raises(UserError, match=r"the tag must be one token .* 'end' is 3: set tag"):
        start(role_of(scalar), template="text", tag="end")
    with pytest.raises(UserError, match="has no token for the tag 'END'"):
        start(role_of(scalar), tag="END")
    with pytest.raises(UserError, match=r"another vocabulary than the policy .* set template to pieces, text or chat"):
        start(role_of(write(tmp_path / "other", LlamaForSequenceClassification, SYMBOLS[::-1], num_labels=1)))
    with pytest.raises(UserError, match=r"'yes' is 3 tokens .* good and bad are one token each"):
        start(form="tags", model=str(tags), template="text", tag="|", good="yes")
    with pytest.raises(UserError, match="has no head called score: form labels takes token classifiers"):
        start(form="labels", model=str(tags), template="pieces")
    with pytest.raises(UserError, match="has 1 outputs, and form labels needs two, wrong and right; form scalar takes it"):
        start(form="labels", model=str(scalar), template="pieces")
    with pytest.raises(UserError, match=r"is no language model, or is incomplete: no lm_head.weight"):
        start(form="tags", model=str(labels), template="pieces", tag="\n")
    with pytest.raises(UserError, match="there is no directory"):
        start(form="labels", model=str(tmp_path / "none"), template="pieces")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in labels.iterdir():
        if file.suffix != ".jinja":
            (bare / file.name).symlink_to(file)
    with pytest.raises(UserError, match="no chat template: set template to text or pieces"):
        start(form="labels", model=str(bare), template="chat", tag=TAG)


# --- the command line -------------------------------------------------------------------------------------------------

ALGORITHM = '''
import torch
from rlhf_host import Advantages, hookimpl
from rlhf_host import functional as F


class Suffix:
    """Advantages are the rewards from each token on."""

    @hookimpl
    def needs(self):
        return F.policy_needs(F.PolicyLossOptions())

    @hookimpl
    def compute_advantages(self, experience):
        rewards = torch.where(experience.action_mask, experience.token_rewards, 0.0)
        return Advantages(rewards.flip(-1).cumsum(-1).flip(-1))

    @hookimpl
    def compute_loss(self, outputs, batch):
        return F.policy_loss(outputs, batch, F.PolicyLossOptions())
'''


@pytest.fixture
def flags(policy, tmp_path):
    (tmp_path / "suffix.py").write_text(ALGORITHM)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    fixed = ["--algo", f"{tmp_path / 'suffix.py'}:Suffix", "--reward", "prm", "--actor.model", policy, "--data", prompts]
    size = ["--rollout.n", "2", "--rollout.max-new-tokens", "24", "--train.batch-size", "4", "--train.steps", "3"]
    return ["train", *fixed, *size, "--train.threads", "1", "--run-dir", tmp_path / "run", "--reward.prm.separator", "e"]


def rlhf_here(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("form", ["scalar", "tags"])
def test_a_run_gives_each_step_its_credit(flags, form, scalar, tags, tmp_path):
    chosen = {
        "scalar": ["--roles.prm.model", scalar],
        "tags": ["--reward.prm.form", "tags", "--reward.prm.model", tags, "--reward.prm.template", "pieces"],
    }[form]
    rlhf_here(*flags, *chosen, "--reward.prm.place", "steps", "--reward.prm.aggregate", "last", "--trajectories.every", "1")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 and row["prm/steps"] > 1 for row in rows)
    assert all(0 < row["prm/mean"] < 1 for row in rows)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(flags, policy, labels, tmp_path):
    assert "the role 'prm' has no model: give --roles.prm.model PATH" in rlhf_here(*flags, code=2)
    assert "has no scalar head" in rlhf_here(*flags, "--roles.prm.model", policy, code=2)
    said = rlhf_here(*flags, "--reward.prm.form", "labels", "--reward.prm.model", labels, code=2)
    assert "form labels reads with its own tokenizer" in said
    chosen = ["--reward.prm.form", "labels", "--reward.prm.model", policy, "--reward.prm.template", "pieces"]
    assert "has no head called score" in rlhf_here(*flags, *chosen, code=2)
    assert not (tmp_path / "run").exists()


def test_a_damaged_head_is_told_from_a_whole_one(labels, tmp_path, policy):
    for file in labels.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: weights[name] for name in weights if name != "score.weight"}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserError, match="has no head called score"):
        judged(group_of(policy), form="labels", model=str(tmp_path), template="pieces")
