{% set suite = {'algo': 'algorithm_contract', 'weight-sync': 'weight_sync_contract'}.get(cookiecutter.kind, cookiecutter.kind ~ '_contract') %}
"""The host's contract, check by check."""

from rlhf_authoring import {{ suite }}

TestContract = {{ suite }}("{{ cookiecutter.__plugin }}")
