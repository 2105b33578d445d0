"""Self-play against a league: the opponents are earlier steps of the run."""

from rlhf_plugin_league.league import League

__all__ = ["League"]
