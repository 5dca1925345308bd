"""What a perplexity run is asked to do; JSON both ways."""

from __future__ import annotations

from typing import Literal

import msgspec

from quantlab.core.errors import unknown_name
from quantlab.core.model import ModelFile
from quantlab.core.result import DEVICES, DTYPES

Protocol = Literal["hf", "llama.cpp", "stride", "seed"]


class PplSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on one text; `against` is the parent it is compared with.

    `n_ctx` and `stride` in tokens, None for the protocol's own; `limit` takes the first windows only; `dtype` is what
    torch computes in.
    """

    model: ModelFile
    data: str = "wikitext2"
    protocol: Protocol = "hf"
    n_ctx: int | None = None
    stride: int | None = None
    limit: int | None = None
    against: ModelFile | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        """Refuse what no run can do."""
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.device not in DEVICES:
            raise unknown_name("device", self.device, DEVICES)
