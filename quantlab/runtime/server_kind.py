"""Which program serves an OpenAI-compatible endpoint, and what each does differently: how it is recognized, what it is
asked beyond the OpenAI fields, where its tokenizer and its own counters are.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quantlab.core.result import RuntimeInfo

Kind = Literal["vllm", "sglang", "llama-server", "llama_cpp.server", "unknown"]
# GET a path below the root of the server: the JSON object or text of a 200, else None.
Get = Callable[[str], Awaitable[Any]]
Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
PromptForm = Literal["token ids", "text", "chat"]


@dataclass(frozen=True)
class Dialect:
    """What one kind of server is asked.

    `extra` are fields of a request: penalties that a server or the model's folder sets by default and that would
    change greedy text, and counts with every event. `tokenize` and `detokenize` are (path, key of the question, key of
    the answer, fixed fields). `counters` are our names of Prometheus counters and theirs, one for each version that
    renamed them; `+` adds two.
    """

    name: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    stream_options: Mapping[str, Any] = field(default_factory=lambda: {"include_usage": True})
    ignores_eos: bool = False
    tokenize: tuple[str, str, str, Mapping[str, Any]] | None = None
    detokenize: tuple[str, str, str, Mapping[str, Any]] | None = None
    counters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # A gauge of the tokens that a verify hands out, where no counter tells.
    accept_length: str = ""


# One line of a Prometheus page: name, labels, value.
_SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?[ \t]+([-+0-9.eE]+)(?:[ \t]+\d+)?\s*$", re.M)
_RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}

DIALECTS: dict[Kind, Dialect] = {
    "vllm": Dialect(
        "vLLM",
        # The folder's generation_config.json sets a penalty for some models.
        extra={"repetition_penalty": 1.0, "return_token_ids": True},
        stream_options=_RUNNING_USAGE,
        ignores_eos=True,
        tokenize=("tokenize", "prompt", "tokens", {}),
        detokenize=("detokenize", "tokens", "prompt", {}),
        counters={
            "server_prompt_tokens": ("vllm:prompt_tokens_total",),
            "server_new_tokens": ("vllm:generation_tokens_total",),
            "server_prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
            "server_prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            "server_preempted": ("vllm:num_preemptions_total",),
            "server_drafts": ("vllm:spec_decode_num_drafts_total",),
            "server_draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
            "server_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
            "server_accepted_at": ("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
        },
    ),
    "sglang": Dialect(
        "SGLang",
        extra={"repetition_penalty": 1.0},
        stream_options=_RUNNING_USAGE,
        ignores_eos=True,
        tokenize=("tokenize", "prompt", "tokens", {}),
        detokenize=("detokenize", "tokens", "text", {}),
        counters={
            "server_prompt_tokens": ("sglang:prompt_tokens_total",),
            "server_new_tokens": ("sglang:generation_tokens_total",),
            # It counts hits only; what it looks up is the prompt.
            "server_prefix_queries": ("sglang:prompt_tokens_total",),
            "server_prefix_hits": ("sglang:cached_tokens_total",),
            "server_preempted": ("sglang:num_retracted_requests_total",),
        },
        accept_length="sglang:spec_accept_length",
    ),
    "llama-server": Dialect(
        "llama-server",
        extra={"repeat_penalty": 1.0, "timings_per_token": True},
        ignores_eos=True,
        tokenize=("tokenize", "content", "tokens", {"add_special": True, "parse_special": True}),
        detokenize=("detokenize", "tokens", "content", {}),
        counters={
            # Its count of prompt tokens leaves out those of the cache.
            "server_prompt_tokens": ("llamacpp:prompt_tokens_total+llamacpp:prompt_tokens_cached_total",),
            "server_new_tokens": ("llamacpp:tokens_predicted_total",),
            "server_prefix_queries": ("llamacpp:prompt_tokens_total+llamacpp:prompt_tokens_cached_total",),
            "server_prefix_hits": ("llamacpp:prompt_tokens_cached_total",),
        },
    ),
    "llama_cpp.server": Dialect(
        "llama_cpp.server",
        # Its default is 1.1.
        extra={"repeat_penalty": 1.0},
        tokenize=("extras/tokenize", "input", "tokens", {}),
        detokenize=("extras/detokenize", "tokens", "text", {}),
    ),
    "unknown": Dialect("unknown server"),
}


@dataclass(frozen=True)
class ServerInfo:
    """What answers. `version` is empty and `n_ctx` None where the server does not tell.

    `prompts` is the form in which the token ids of a Request are sent: as they are, or as text that the server
    tokenizes again; a server of "chat" takes messages only.
    """

    url: str
    kind: Kind
    version: str
    model: str
    n_ctx: int | None
    prompts: PromptForm = "token ids"
    has_usage: bool = True
    has_counters: bool = False

    @property
    def ignores_eos(self) -> bool:
        """Whether an answer can be made to go on to its limit; else it may end early."""
        return DIALECTS[self.kind].ignores_eos

    @property
    def runtime(self) -> RuntimeInfo:
        """The `runtime` of a Result; a server tells neither its device nor its types."""
        version = f"{DIALECTS[self.kind].name} {self.version}".rstrip()
        return RuntimeInfo("server", version, device="unknown", dtype="unknown", kernels={}, threads=0)


def body(info: ServerInfo, prompt: Prompt, max_new_tokens: int, *, ignore_eos: bool) -> tuple[str, bytes]:
    """The path and the JSON of a request for a greedy streamed answer."""
    dialect = DIALECTS[info.kind]
    chat = not isinstance(prompt, str) and not isinstance(prompt[0], int)
    fields: dict[str, Any] = {
        "model": info.model,
        "messages" if chat else "prompt": prompt,
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "stream": True,
        **dialect.extra,
    }
    if info.has_usage:
        fields["stream_options"] = dict(dialect.stream_options)
    if ignore_eos and info.ignores_eos:
        fields["ignore_eos"] = True
    return "chat/completions" if chat else "completions", msgspec.json.encode(fields)


async def recognize(card: Mapping[str, Any], get: Get) -> tuple[Kind, str, int | None]:
    """The kind of a server, its version ("" where it tells none) and the context of the model that `card` describes.

    `card` is the model's entry in /v1/models.
    """
    context = _number(card.get("max_model_len"))
    owner = card.get("owned_by")
    if owner == "vllm":
        return "vllm", _text(await get("version"), "version"), context
    if owner == "sglang":
        told = await get("server_info") or await get("get_server_info")
        return "sglang", _text(told, "version"), context
    if owner == "llamacpp":
        props = await get("props")
        settings = props.get("default_generation_settings") if isinstance(props, dict) else None
        slot = _number(settings.get("n_ctx")) if isinstance(settings, dict) else None
        return "llama-server", _text(props, "build_info"), slot
    api = await get("openapi.json")
    about = api.get("info") if isinstance(api, dict) else None
    if isinstance(api, dict) and "/extras/tokenize" in (api.get("paths") or {}):
        return "llama_cpp.server", _text(about, "version"), context
    return "unknown", _text(about, "version"), context


def counters_in(metrics: str, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """The counters of a Prometheus page by our names; a counter with labels is the sum of its series.

    A counter that is not on the page is left out. `NAME_at` becomes `NAME_at_0`, `NAME_at_1`..., by `position` labels.
    """
    sums: dict[str, float] = {}
    places: dict[str, dict[int, float]] = {}
    for name, labels, value in _SERIES.findall(metrics):
        sums[name] = sums.get(name, 0.0) + float(value)
        if position := re.search(r'\bposition="(\d+)"', labels):
            at = places.setdefault(name, {})
            at[int(position[1])] = at.get(int(position[1]), 0.0) + float(value)
    found: dict[str, int] = {}
    for name, choices in wanted.items():
        for parts in (choice.split("+") for choice in choices):
            if name.endswith("_at"):
                found |= {f"{name}_{i}": round(n) for i, n in places.get(parts[0], {}).items()}
            elif name not in found and all(part in sums for part in parts):
                found[name] = round(sum(sums[part] for part in parts))
    return found


def gauge_in(metrics: str, name: str) -> float | None:
    """The largest value of a gauge of a Prometheus page, None where it is not on it."""
    values = [float(value) for found, _, value in _SERIES.findall(metrics) if found == name]
    return max(values, default=None)


def _text(told: Any, key: str) -> str:
    value = told.get(key) if isinstance(told, dict) else None
    return value if isinstance(value, str) else ""


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
