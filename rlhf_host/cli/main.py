"""``rlhf``: the command group. A command's module is imported only when that command runs."""

from __future__ import annotations

import errno
from typing import Any

import click

from rlhf_host import __version__
from rlhf_host.cli.lazy import LazyGroup
from rlhf_host.errors import RunError, UserError, visible

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("rlhf_host.cli.train:train", "Train a model: algorithm, rewards, data and all settings as flags or YAML."),
    "eval": ("rlhf_host.cli.eval:evaluate", "Evaluate a model: pass@k and rewards on one or more task sets."),
    "rollout": ("rlhf_host.cli.rollout:rollout", "Sample and score without training, into a file."),
    "generate": ("rlhf_host.cli.generate:generate", "Write the best of several answers to each prompt, to train on."),
    "translate": ("rlhf_host.cli.translate:translate", "Turn a command line of OpenRLHF, TRL or verl into a configuration."),
    "serve": ("rlhf_host.cli.serve:serve", "Serve a model by OpenAI's API, as programs reach it in training."),
    "serve-reward": ("rlhf_host.cli.serve_reward:serve_reward", "Serve a reward model, as the reward http_reward asks it."),
    "chat": ("rlhf_host.cli.chat:chat", "Talk to a model in the terminal."),
    "replay": ("rlhf_host.cli.replay:replay", "Score saved trajectories again with other plugins; show what changes."),
    "runs": ("rlhf_host.cli.runs:runs", "List runs: how far they are, and their most important figure."),
    "show": ("rlhf_host.cli.show:show", "Show one run in the terminal: curves, warnings, answers."),
    "compare": ("rlhf_host.cli.compare:compare", "Compare runs: settings, curves, answers to the same prompts."),
    "report": ("rlhf_host.cli.report:report", "Write runs as one page for a browser, without a network."),
    "view": ("rlhf_host.cli.view:view", "Open runs in the browser, and follow those that go on."),
    "episodes": ("rlhf_host.cli.episodes:episodes", "Show saved episodes in the terminal: turns, tools, branches, rewards."),
    "data": ("rlhf_host.cli.data:data", "Show how a run reads data; remove what runs keep of it."),
    "export": ("rlhf_host.cli.export:export", "Write a run's model for other programs, with a model card; or as GGUF."),
    "push": ("rlhf_host.cli.push:push", "Upload a run's model and its card to the Hugging Face Hub."),
    "merge-lora": ("rlhf_host.cli.merge_lora:merge_lora", "Merge a LoRA adapter into its base, write the model and compare."),
    "plugins": ("rlhf_host.cli.plugins:plugins", "List installed plugins; show, check, bench, install or uninstall one."),
    "doctor": ("rlhf_host.cli.doctor:doctor", "Check this machine and its libraries: what is wrong and what to do."),
    "completion": ("rlhf_host.cli.completion:completion", "Print the script for completion in bash, zsh or fish."),
}
"""Name → (``module:attribute`` of the command, its line in ``rlhf --help``)."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Standard output is a file on a full disk."""


class Failure(click.ClickException):
    """A message for a person, and the exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__("\n".join(map(visible, message.split("\n"))))
        self.exit_code = exit_code  # type: ignore[misc]


class Main(LazyGroup):
    """Turns the project's errors into a message and an exit code, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise Failure(str(error), 2) from error
        except RunError as error:
            raise Failure(str(error), 1) from error
        except OSError as error:
            if error.filename is None and error.errno not in FULL:
                raise
            raise Failure(f"{error.filename or 'the output cannot be written'}: {error.strerror}", 1) from error
        except KeyboardInterrupt as interrupt:
            click.echo(str(interrupt) or "Interrupted.", err=True)
            ctx.exit(130)


@click.group(cls=Main, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlhf")
def main() -> None:
    """Post-training for language models: algorithms, rewards and environments are plugins."""


if __name__ == "__main__":
    main(prog_name="rlhf")
