"""Settings of a model behind OpenAI's API: which one, how it is asked, what it costs, and a server of the run's own."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ChatOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field("", description="the model's name for its server")
    base_url: str | None = Field(None, description="its server, ending in /v1; default: $OPENAI_BASE_URL, else OpenAI")
    key_env: str = Field("OPENAI_API_KEY", description="environment variable with the API key; keys stand in no file")
    system: str | None = Field(None, description="the system message")
    temperature: float = Field(0.0, ge=0, description="of the model")
    max_tokens: int = Field(512, ge=1, description="longest answer")
    at_once: int = Field(16, ge=1, description="open requests")
    timeout_s: float = Field(60.0, gt=0, description="deadline for an answer of the server, in seconds")
    tries: int = Field(4, ge=1, description="requests in all, where the server is not reached, busy or failing")
    price_in: float = Field(0.0, ge=0, description="price of a million tokens that it reads, for the metric cost")
    price_out: float = Field(0.0, ge=0, description="price of a million tokens that it writes")
    cache_dir: str | None = Field(None, description="folder of answers that several runs share; default: the run's own")
    cache_mb: int = Field(64, ge=0, description="answers that are kept, in memory and on the disk; 0: none")
    serve: str | None = Field(
        None, description="in place of base_url: a model for a server of the run's own, started and ended with it"
    )
    serve_with: str = Field(
        "rlhf", description="what serves it: rlhf, vllm, or a command with {port}, and perhaps {model}, {name} and {key_file}"
    )
    serve_flags: str = Field("", description="further flags of this command, as in a shell")
    serve_devices: str | None = Field(None, description="CUDA_VISIBLE_DEVICES of this server; default: those of the run")
    serve_timeout_s: float = Field(600.0, gt=0, description="deadline for this server to answer, in seconds")


class GroupOptions(ChatOptions):
    """Those of a judge that answers in JSON."""

    answer: Literal["last", "all"] = Field("all", description="what is judged: the last turn, or all after the prompt")
    structured: bool = Field(True, description="ask the server for JSON by a schema; false: by words alone")
