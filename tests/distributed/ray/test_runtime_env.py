"""Ray's ``runtime_env`` of all workers and engines: secrets are passed on by name, and written nowhere."""

import pytest
from pydantic import ValidationError

from rlhf_host.distributed.ray.plugin import Ray, passed_on
from rlhf_host.errors import UserError


@pytest.mark.parametrize(
    "runtime_env",
    [
        {"env_vars": {"HF_TOKEN": "hf_abc"}},
        {"env_vars": {"WANDB_API_KEY": "abc"}},
        {"env_vars": {"PGPASSWORD": "abc"}},
        {"pip": {"packages": ["x"], "pip_install_options": ["--index-url=https://me:abc@host/simple"]}},
    ],
)
def test_secrets_are_not_written_down(runtime_env):
    with pytest.raises(ValidationError, match="trackers would show it"):
        Ray.Options(runtime_env=runtime_env)


def test_secrets_are_passed_on_by_name(monkeypatch):
    given = {"env_vars": {"HF_TOKEN": "${HF_TOKEN}", "TOKENIZERS_PARALLELISM": "false", "PATH": "${PATH}:/opt"}, "pip": ["x"]}
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    options = Ray.Options(runtime_env=given)
    assert passed_on(options.runtime_env) == given | {"env_vars": given["env_vars"] | {"HF_TOKEN": "hf_abc"}}
    assert options.model_dump()["runtime_env"] == given
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"\$\{HF_TOKEN\}, which is not set in the environment"):
        passed_on(options.runtime_env)
    with pytest.raises(UserError, match="not set in the environment"):  # in a dry run too
        Ray(options).describe(None)
