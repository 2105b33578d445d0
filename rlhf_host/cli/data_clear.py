"""``rlhf data clear``: remove what runs keep of data: tokens, and log-probabilities of a reference."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_host.directories import cache_directory, directory_size, remove_directory

KEPT = {"units": "tokens", "logprobs": "log-probabilities"}
"""Beginning of the names of directories in the cache → what is in them."""


@click.command()
def clear() -> None:
    """Remove the tokens of data, and the log-probabilities of references, that earlier runs kept. The next run that needs some
    makes them again."""
    for name, what in KEPT.items():
        count = size = 0
        for root in cache_directory().glob(f"{name}-*"):
            for directory in filter(Path.is_dir, root.iterdir()):
                size += directory_size(directory)
                remove_directory(directory)
                count += 1
        click.echo(f"Removed the {what} of {count} data source{'s' * (count != 1)}, {size / 1e6:.1f} MB.")
