"""A torch model that also gives the hidden states of each step: what its output layer reads, and heads draft from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Batch, Logits
from quantlab.runtime.torch.backend import TorchBackend, order_rows


class HiddenBackend(TorchBackend):
    """A `TorchBackend`; `hidden` are the states of the last step, (tokens, hidden size), in the order of its batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hidden = torch.empty(0)
        self._caught: list[torch.Tensor] = []
        self._opened().network.base_model.register_forward_hook(
            lambda _module, _inputs, output: self._caught.append(output.last_hidden_state[0])
        )

    def forward(self, batch: Batch) -> Logits:
        """See `Backend`."""
        counts = Counter(batch.seqs.tolist())
        lengths = list(self._lengths)
        self._caught.clear()
        logits = super().forward(batch)
        # The model computed the rows in another order, in parts.
        order = order_rows(batch.seqs, {seq: lengths[seq] + n for seq, n in counts.items()}, lengths)
        caught = torch.cat(self._caught)
        self.hidden = torch.empty_like(caught)
        self.hidden[torch.from_numpy(order).to(caught.device)] = caught
        return logits

    @property
    def output_weight(self) -> torch.Tensor:
        """The output layer's matrix (n_vocab, hidden size); QuantlabError where it is packed."""
        layer = self._opened().network.get_output_embeddings()
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point or weight.ndim != 2:
            raise QuantlabError(
                f"the output layer of `{self._opened().path.name}` is packed, and heads draft with it",
                "give a target whose output layer is not quantized",
            )
        return weight.detach()

    @property
    def input_weight(self) -> torch.Tensor:
        """The embedding's matrix (n_vocab, hidden size)."""
        weight: torch.Tensor = self._opened().network.get_input_embeddings().weight
        return weight.detach()
