"""Rotary embeddings whose factors depend on the length of the text: settled at load for the context that is opened.

transformers chooses them in every step by its largest position (longrope: short or long factors; dynamic NTK: another
base). A text fed in pieces, or beside a longer one, would be rotated by several. So the factors are those of one pass
over a text of `n_ctx` tokens, as vLLM settles them by the longest text that it serves.
"""

from __future__ import annotations

from typing import Any

import torch

from quantlab.core.errors import QuantlabError


def settle(network: Any, n_ctx: int) -> None:
    """Fix the factors for `n_ctx` tokens; QuantlabError for a rotary embedding that chooses by a rule of its own."""
    positions = torch.tensor([[min(1, n_ctx - 1), n_ctx - 1]], device=network.device)
    like = torch.zeros(1, device=network.device)
    for module in network.modules():
        found = getattr(module, "rope_type", None)
        kinds = found if isinstance(found, dict) else {None: found}
        if not any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds.values()):
            continue
        calls = [{} if layer_type is None else {"layer_type": layer_type} for layer_type in kinds]
        whole = [module(like, positions, **named)[0] for named in calls]
        # Of this kind nothing is chosen in a step.
        module.rope_type = dict.fromkeys(kinds, "default") if isinstance(found, dict) else "default"
        alone = [module(like, positions[:, :1], **named)[0] for named in calls]
        if not all(torch.allclose(a[..., 0, :], b[..., 0, :]) for a, b in zip(whole, alone, strict=True)):
            raise QuantlabError(
                f"`{type(module).__name__}` rotates by the longest text of a step, which the torch runtime does not",
                "use a smaller `--n-ctx`, or try a GGUF of it",
            )


def factors(network: Any) -> bytes:
    """The bytes of what all rotations are made of: keys that others rotated are of no use."""
    buffers = sorted((name, buffer) for name, buffer in network.named_buffers() if name.endswith("inv_freq"))
    return b"".join(buffer.float().cpu().numpy().tobytes() for _, buffer in buffers)
