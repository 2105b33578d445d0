"""``rlhf data clear``: remove what runs keep of data: tokens, and log-probabilities of a reference."""

from __future__ import annotations

import click

from rlhf_host.internals import cache_directory, remove_directory

STORED = {"units": "tokens", "logprobs": "log-probabilities"}
"""Beginning of the names of directories in the cache → what is in them."""


@click.command()
def clear() -> None:
    """Remove the tokens of data, and the log-probabilities of references, that earlier runs kept. The next run that needs some
    makes them again."""
    for name, what in STORED.items():
        found = [each for root in cache_directory().glob(f"{name}-*") for each in root.iterdir() if each.is_dir()]
        size, count = sum(file.stat().st_size for each in found for file in each.rglob("*") if file.is_file()), len(found)
        for each in found:
            remove_directory(each)
        click.echo(f"Removed the {what} of {count} data source{'s' * (count != 1)}, {size / 1e6:.1f} MB.")
