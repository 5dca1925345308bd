"""What the prefix-cache bench is asked to measure."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from quantlab.bench.roofline import check_device
from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.model import ModelFile
from quantlab.core.result import DEVICES, DTYPES

SCENARIOS = ("system-prompt", "few-shot", "chat", "rag", "timestamp-first", "timestamp-last")
# A prompt is cut into parts: fewer tokens leave none for some of them.
_LEAST_PREFIX = 64
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


class PrefixCacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model, and the prompts whose beginnings its cache is to hold.

    A scenario's requests have `prefix_tokens` that some of them share and `suffix_tokens` of their own; `requests` is
    how many are measured. With `trace` they are those of a recording (Mooncake), 512 tokens of which become one block.
    `budget_bytes` bounds the KV that the cache holds on the device, None: as much as it needs.

    `simulate` runs in virtual time: its step model is fitted to a short run of the model, or is the roofline of
    `bandwidth_bytes_per_s` and `flops_per_s`.
    """

    model: ModelFile
    # What an endpoint calls the model, where it serves several.
    served_model: str | None = None
    scenario: list[str] | None = None
    trace: str | None = None
    requests: int | None = None
    repeats: int = 3
    warmup: int = 1
    prefix_tokens: int = 512
    suffix_tokens: int = 16
    new_tokens: int = 8
    block_tokens: int = 16
    budget_bytes: int | None = None
    tiers: bool = True
    simulate: bool = False
    bandwidth_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name in ("requests", "repeats", "suffix_tokens", "new_tokens", "block_tokens", "budget_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`--{name.removesuffix('_bytes').replace('_', '-')}` {value}", "give at least 1")
        if self.prefix_tokens < _LEAST_PREFIX:
            raise UsageError(f"`--prefix-tokens` {self.prefix_tokens}", f"give at least {_LEAST_PREFIX}")
        for name in ("warmup", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"`--{name}` {getattr(self, name)}", "give 0 or more")
        if self.scenario is not None and self.trace is not None:
            raise UsageError("`--scenario` and `--trace` both tell what to send", "give one of them")
        if self.scenario is not None and not self.scenario:
            raise UsageError("`--scenario` names none", f"known: {', '.join(SCENARIOS)}")
        for name, value, known in (
            *(("scenario", scenario, SCENARIOS) for scenario in self.scenario or ()),
            ("dtype", self.dtype, DTYPES),
            ("device", self.device, DEVICES),
        ):
            if value not in known:
                raise unknown_name(name, value, known)
        self._check_simulation()
        if not self.endpoint and self.served_model is not None:
            raise UsageError("`--model` names a model of an endpoint", "leave it out for files")

    def _check_simulation(self) -> None:
        check_device(self.bandwidth_bytes_per_s, self.flops_per_s, simulate=self.simulate)
        if self.simulate and self.endpoint:
            raise UsageError("an endpoint is not simulated", "leave `--simulate` out, or give the model's files")

    @property
    def endpoint(self) -> bool:
        """Whether the model is behind a URL."""
        return self.model.path.startswith(("http://", "https://"))

    def check_heeded(self, given: Iterable[str]) -> None:
        """Raise UsageError for an option of `given` that changes nothing here."""
        if self.endpoint:
            self._check_endpoint(given)
        of_text = [name for name in ("prefix_tokens", "suffix_tokens") if name in given]
        if self.trace is not None and of_text:
            raise UsageError(
                f"`--{of_text[0].replace('_', '-')}` changes nothing here: a trace has its own lengths", "leave it out"
            )
        if self.simulate and "tiers" in given:
            raise UsageError("tiers are not simulated: bytes are moved in no time there", "leave `--simulate` out")
        if self.bandwidth_bytes_per_s is not None:
            self._check_roofline(given)

    def _check_roofline(self, given: Iterable[str]) -> None:
        of_runs = [name for name in ("repeats", "warmup") if name in given]
        if of_runs:
            raise UsageError(f"`--{of_runs[0]}` changes nothing here: virtual time repeats itself", "leave it out")
        of_machine = ["threads"] if "threads" in given else []
        of_machine += [name for name in ("device", "dtype") if getattr(self, name) != "auto"]
        if of_machine:
            raise UsageError(
                f"`--{of_machine[0]}` changes nothing here: no model is run for a roofline", "leave it out"
            )

    def _check_endpoint(self, given: Iterable[str]) -> None:
        if self.trace is not None:
            raise UsageError(
                "a trace has token ids of its own, and an endpoint's vocabulary is not known",
                "give the model's files, or `--scenario`",
            )
        of_files = [name for name in ("budget", "budget_bytes", "tiers", "threads") if name in given]
        of_files += [name for name in ("device", "dtype") if getattr(self, name) != "auto"]
        if of_files:
            raise UsageError(
                f"`--{of_files[0]}` changes nothing at an endpoint: its server has its own", "leave it out"
            )

    def chosen(self) -> tuple[str, ...]:
        """The scenarios that run, in their order; of a trace the one that it is."""
        if self.trace is not None:
            return ("trace",)
        return tuple(name for name in SCENARIOS if name in (self.scenario or SCENARIOS))


def parse_bytes(value: str | int, option: str) -> int:
    """Bytes of `64MB`, `1.5GiB` or a number; `option` is named in errors."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?[iI]?[bB]?)\s*", str(value))
    unit = _BYTES.get(match[2].upper().removesuffix("B")) if match else None
    if match is None or unit is None:
        raise UsageError(f"`{option}` {value}: no size", f"for example `{option} 64MB`")
    return int(float(match[1]) * unit)
