"""Games by scripted players: who sees what, who is paid, how games end, and training by self-play."""

import asyncio
import json
import random
import subprocess
import sys
import threading

import pytest
import torch
from rlhf_authoring import tasks_contract
from rlhf_authoring.models import write_tiny_model
from rlhf_plugin_textarena import TextArena, TextArenaTasks, agent, games
from rlhf_plugin_textarena.games import Game, fewest_players

import rlhf_host
from rlhf_host import Episode, EpisodeFailed, Segment, Task, Trajectory, UserError
from rlhf_host.records.episodes import NoRoom
from rlhf_host.records.messages import Reply

TestTasks = tasks_contract("textarena", options={"games": ["TicTacToe-v0", "Nim-v0"], "size": 20, "eval_size": 6})

GAME = Task("Play.", metadata={"textarena": {"game": "TicTacToe-v0", "seed": 3}})


class Player:
    """A policy that says its words in turn; forks and roles too."""

    def __init__(self, words, name=""):
        self.words, self.name, self.talks, self.others = words, name, [], []

    def fork(self, name):
        self.others.append(Player(self.words, name))
        return self.others[-1]

    def role(self, name):
        return self.fork(name)

    async def chat(self, messages):
        said = self.words.pop(0)
        if isinstance(said, Exception):
            raise said
        self.talks.append([dict(message) for message in messages])
        return Reply(said)

    def trajectories(self):
        return [row(one.name, len(one.talks)) for one in self.others if one.talks and one.name != "opponent"]


def row(role, turns):
    return Trajectory("e", "g", GAME, [Segment("prompt", [0]), *[Segment("action", [1])] * turns], role=role)


def play(*words, sample=0, task=GAME, **options):
    """The rows of a game, by role, and who played."""
    policy, episode = Player(list(words)), Episode("e", "g", task, sample=sample)
    rows = asyncio.run(TextArena(TextArena.Options(**options)).agent_run(episode, policy))
    return {one.role: one for one in rows}, {one.name: one for one in policy.others}, episode


def test_self_play_pays_each_seat():
    rows, players, episode = play("4", "I take [0]", "[1]", "2", "[7]")
    assert {role: one.agent_rewards for role, one in rows.items()} == {"player_0": [None, None, 1.0], "player_1": [None, -1.0]}
    assert [one.score for one in rows.values()] == [1.0, 0.0]
    assert rows["player_0"].metrics == {
        "textarena/turns": 5.0, "textarena/unfinished": 0.0, "textarena/invalid": 0.0, "textarena/won": 1.0, "textarena/drawn": 0.0,
    }  # fmt: skip
    assert [event["move"] for event in episode.events] == ["4", "I take [0]", "[1]", "2", "[7]"]
    first, second = players["player_0"].talks[:2]
    assert first[0]["content"].startswith("Play.\n\n[GAME] You are Player 0 in Tic Tac Toe.")
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[:1] == first, "what was said before stays as it was"
    seen = second[2]["content"]
    assert "[Player 1] I take [0]" in seen
    assert "placed their symbol (X) in cell 0" in seen
    assert "[Player 0] [4]" not in seen, "a player is not told its own words"


def test_a_draw_and_a_wrong_move():
    rows, _, _ = play("0", "1", "2", "4", "3", "5", "7", "6", "8")
    assert [(one.agent_rewards[-1], one.score, one.metrics["textarena/drawn"]) for one in rows.values()] == [
        (0.0, 0.5, 1.0)
    ] * 2
    rows, players, _ = play("0", "0", "hm")
    assert [one.agent_rewards[-1] for one in rows.values()] == [1.0, -1.0]
    assert [one.metrics["textarena/invalid"] for one in rows.values()] == [0.0, 1.0]
    assert "already occupied" in players["player_1"].talks[1][2]["content"]


def test_the_games_own_view_is_asked_anew():
    _, players, _ = play("4", "0", "1", "2", "7", sees="game")
    assert [len(talk) for talk in players["player_0"].talks] == [1, 1, 1]
    assert players["player_0"].talks[-1][0]["content"].count("You are Player 0") == 1


def test_a_frozen_opponent_has_the_other_seats():
    for sample in range(3):
        rows, players, _ = play("4", "0", "1", "2", "7", sample=sample, opponent="frozen")
        assert set(rows) == {f"player_{sample % 2}"}
        assert set(players) == {f"player_{sample % 2}", "opponent"}
    [need] = TextArena(TextArena.Options(opponent="frozen")).needs().roles
    assert (need.name, need.generates) == ("opponent", True)


def test_a_game_that_the_opponent_ends_at_once_is_played_again_and_the_policy_begins():
    rows, players, _ = play("x", "y", "4", "0", "1", "2", "7", sample=1, opponent="frozen")
    assert rows["player_0"].agent_rewards == [None, None, 1.0]
    assert set(rows) == {"player_0"}
    assert players["player_0"].talks[0][0]["content"].startswith("Play.\n\n[GAME] You are Player 0"), "a game from its start"


def test_an_episode_without_a_row_of_the_policy_fails(monkeypatch):
    monkeypatch.setattr(Player, "trajectories", lambda self: [])
    with pytest.raises(EpisodeFailed, match="ended before the policy had a move"):
        play("x", "y", "x", "y", sample=1, opponent="frozen")


@pytest.mark.parametrize(("name", "players"), [("MarketEntryGame-v0", 4), ("PublicGoodsGame-v0", 3), ("QuantumTicTacToe-v0", 2),
                                               ("Mastermind-v0", 1), ("LiarsDice-v0", 2), ("SecretMafia-v0", 6)])  # fmt: skip
def test_games_are_played_by_as_many_as_they_support(name, players):
    assert fewest_players(name) == players
    if players in (2, 3, 4):
        with pytest.raises(UserError, match=f"{name} is not played by 1"):
            TextArena(TextArena.Options(game=name, players=1))


def test_a_game_that_hangs_fails_its_episode_and_holds_up_no_other(monkeypatch):
    from textarena.envs.TicTacToe.env import TicTacToeEnv

    usual = TicTacToeEnv.step

    def step(self, action):
        while action == "[5]":
            pass
        return usual(self, action)

    monkeypatch.setattr(TicTacToeEnv, "step", step)
    monkeypatch.setattr(games, "MOVE_S", 0.2)
    with pytest.raises(EpisodeFailed, match=r"TicTacToe-v0 hangs: it took more than 0.2 s"):
        play("4", "[5]")
    assert not [one for one in threading.enumerate() if one.name == "rlhf-game-move"], "its thread is stopped"
    assert play("4", "0", "1", "2", "7")[0]["player_0"].agent_rewards[-1] == 1.0


def test_a_process_ends_while_a_game_hangs():
    """Also where its thread cannot be stopped, as inside C code."""
    script = (
        "import asyncio\n"
        "from textarena.envs.TicTacToe.env import TicTacToeEnv\n"
        "from rlhf_plugin_textarena.games import Game\n"
        "from rlhf_plugin_textarena.threads import in_thread\n"
        "def step(self, action):\n"
        "    while True:\n"
        "        try:\n"
        "            while True: pass\n"
        "        except BaseException: pass\n"
        "TicTacToeEnv.step = step\n"
        "async def main():\n"
        "    game = await in_thread(Game, 'TicTacToe-v0', 2, 0)\n"
        "    await asyncio.wait_for(in_thread(game.move, '[1]'), 0.3)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "TimeoutError")


@pytest.mark.parametrize("name", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"])
def test_a_text_in_place_of_a_reward_is_a_wrong_move(name):
    rows, _, _ = play("hm", "hm", task=Task("x", metadata={"textarena": {"game": name, "seed": 1}}))
    assert (rows["player_0"].agent_rewards[-1], rows["player_0"].metrics["textarena/invalid"]) == (0.0, 1.0)
    game = Game("TicTacToe-v0", 2, 0)
    game.env.state.rewards = {0: 1, 1: "a wrong move"}
    assert game.result()[0] == {0: 1.0, 1: -1.0}


def test_more_digits_than_a_number_may_have_are_a_wrong_move():
    game = Task("x", metadata={"textarena": {"game": "Nim-v0", "seed": 1}})
    rows, _, _ = play(*[f"[{'9' * 5000} {'9' * 5000}]"] * 2, task=game)
    assert rows["player_0"].metrics["textarena/invalid"] == 1.0


def test_a_pattern_that_takes_too_long_finds_no_move(monkeypatch):
    monkeypatch.setattr(agent, "PATTERN_S", 0.05)
    player = TextArena(TextArena.Options(pattern="(a|a)*[bc]"))
    assert player._move("a" * 40) == ""
    assert player._move("aab") == "a"
    assert TextArena(TextArena.Options(pattern="(x)|y"))._move("y") == ""


def test_moves_in_answers():
    rows, _, _ = play("<move>4</move>", "0 <move>1</move><move>0</move>", "<move>1</move>", "<move>2</move>", "so <move>7</move>",
                      pattern="<move>(.*?)</move>")  # fmt: skip
    assert rows["player_0"].agent_rewards[-1] == 1.0
    rows, _, _ = play("4", "5", pattern="<move>(.*?)</move>")
    assert rows["player_0"].metrics["textarena/invalid"] == 1.0


def test_games_that_do_not_end():
    rows, _, _ = play("4", "0", "1", max_turns=3, unfinished=-0.5)
    assert [(one.agent_rewards[-1], one.score) for one in rows.values()] == [(-0.5, None)] * 2
    rows, _, _ = play("4", NoRoom("full"))
    assert rows["player_0"].metrics["textarena/unfinished"] == 1.0
    with pytest.raises(NoRoom):
        play(NoRoom("full"))


def test_one_player_and_three():
    one = Task("Guess.", metadata={"textarena": {"game": "GuessTheNumber-v0", "seed": 1}})
    rows, _, _ = play(*(f"[{n}]" for n in range(1, 21)), task=one)
    assert 0 <= rows["player_0"].score <= 1
    three = Task("Play.", metadata={"textarena": {"game": "ThreePlayerTicTacToe-v0", "seed": 1}})
    rows, players, _ = play("0", "1", "2", "hm", "hm", *map(str, range(3, 25)), task=three, max_turns=8)
    assert set(players) == {"player_0", "player_1", "player_2"}


def test_games_side_by_side_have_their_own_random_numbers():
    def cards(game):
        return [game.turn()[1], game.move("[check]"), game.turn()[1], game.move("[check]"), game.turn()[1]]

    alone = [cards(Game("KuhnPoker-v0", 2, seed)) for seed in range(4)]
    assert len({str(game) for game in alone}) > 1
    random.seed(0)
    before = random.getstate()
    games = [Game("KuhnPoker-v0", 2, seed) for seed in range(4)]
    steps = [[game.turn()[1] for game in games]]
    for _ in range(2):
        steps.append([game.move("[check]") for game in games])
        steps.append([game.turn()[1] for game in games])
    assert [list(game) for game in zip(*steps, strict=True)] == alone
    assert random.getstate() == before, "nobody else's numbers change"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "TicTacTo-v0"}, "no game 'TicTacTo-v0'; did you mean TicTacToe-v0"),
        ({"game": "TicTacToe-v0", "players": 3}, "is not played by 3"),
        ({"game": "GuessTheNumber-v0", "opponent": "frozen"}, "has one player, so no opponent"),
        ({"pattern": "("}, "no regular expression"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        TextArena(TextArena.Options(**options))


def test_tasks():
    source = TextArenaTasks(TextArenaTasks.Options(games="TicTacToe-v0,Nim-v0", size=4, eval_size=2))
    train, held_out = source.load_tasks("train", 0), source.load_tasks("eval", 0)
    assert [task.metadata["textarena"]["game"] for task in train] == ["TicTacToe-v0", "Nim-v0"] * 2
    assert not {task.metadata["textarena"]["seed"] for task in train} & {
        task.metadata["textarena"]["seed"] for task in held_out
    }
    for names, message in (("", "no game ''"), ("Nim-v00", "did you mean Nim-v0")):
        with pytest.raises(UserError, match=message):
            TextArenaTasks(TextArenaTasks.Options(games=names)).load_tasks("train", 0)
    with pytest.raises(EpisodeFailed, match="names no game"):
        play("1", task=Task("x"))


def test_a_game_that_cannot_be_had_here(monkeypatch):
    def lost(*_, **__):
        raise LookupError("no word list")

    import textarena

    fewest_players.cache_clear()
    monkeypatch.setattr(textarena, "make", lost)
    with pytest.raises(UserError, match="Nim-v0 cannot be played here: LookupError: no word list"):
        fewest_players("Nim-v0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One with room for a game."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder


def trained(model, folder, steps, **agent):
    """Rows of a run on TicTacToe, where a random letter is sometimes a move. Games are cut short: they get longer as it learns."""
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": steps, "train.threads": 1, "rollout.max_new_tokens": 1}
    settings |= {"model": str(model), "actor.lr": 1e-2, "trajectories.every": 1, "seed": 1}
    data = {"sources": [{"path": "textarena", "games": ["TicTacToe-v0"], "size": 16}]}
    run = rlhf_host.train(
        algo="rloo", agent={"name": "textarena", "max_turns": 4, **agent}, data=data, run_dir=str(folder), **settings
    )
    rows = [json.loads(line) for path in sorted((folder / "trajectories").glob("*.jsonl")) for line in path.open()]
    return run, rows


def test_ten_steps_of_self_play(model, tmp_path):
    run, rows = trained(model, tmp_path / "run", 10)
    assert len(run.metrics) == 10
    assert {one["role"] for one in rows} == {"player_0", "player_1"}
    assert {one["reward"] for one in rows} >= {1.0, -1.0}
    before, after = (torch.cat([p.flatten() for p in load(path)]) for path in (model, tmp_path / "run/model"))
    assert not torch.equal(before, after)


def test_two_steps_against_a_frozen_opponent(model, tmp_path):
    run, rows = trained(model, tmp_path / "run", 2, opponent="frozen")
    assert len(run.metrics) == 2
    assert all(one["reward"] is not None for one in rows), "the policy always has a move"
    assert len(rows) == 2 * 2 * 4


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).parameters()
