"""``rlhf data clear``: remove what runs keep of data: tokens, and log-probabilities of a reference."""

from __future__ import annotations

import click

from rlhf_host.internals import clear_cache

STORED = {"units": "tokens", "logprobs": "log-probabilities"}
"""Beginning of the names of directories in the cache → what is in them."""


@click.command()
def clear() -> None:
    """Remove the tokens of data, and the log-probabilities of references, that earlier runs kept. The next run that needs some
    makes them again."""
    for name, what in STORED.items():
        count, size = clear_cache(f"{name}-")
        click.echo(f"Removed the {what} of {count} data source{'s' * (count != 1)}, {size / 1e6:.1f} MB.")
