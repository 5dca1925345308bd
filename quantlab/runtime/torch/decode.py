"""Decoding of a static batch: captured in a CUDA graph, and by transformers' own `generate`.

A step of a small model is hundreds of kernel launches; the graph launches them as one, so that what is left is the
kernels' own time. `generate` of transformers is what most users run: its gap to the graph is the launch overhead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from quantlab.runtime.backend import Generation, Request
from quantlab.runtime.torch.attention import NAME, Asked, sdpa, seen
from quantlab.runtime.torch.kv import BLOCK_TOKENS, Blocks, Storage, blocks_of


class _StaticStep:
    """One token for each of the first `n` sequences, all at home; tensors of one shape, positions on the device."""

    def __init__(self, storage: Storage, per_seq: int, n: int, length: int) -> None:
        device = storage.keys[0].device
        self._storage, self._n, self._length = storage, n, length
        self._seq_tokens = per_seq * BLOCK_TOKENS
        self._homes = torch.arange(n, device=device) * self._seq_tokens
        self._stored = torch.arange(length, device=device)
        self.positions = torch.zeros(n, dtype=torch.long, device=device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def begin(self) -> None:
        """Before each pass: the masks are those of the positions now."""
        self._masks.clear()

    def attend(self, asked: Asked) -> torch.Tensor:
        """Store the new keys and values, and attend: (sequences, heads, size)."""
        keys, values = self._storage.keys[asked.layer], self._storage.values[asked.layer]
        places = self._homes + self.positions
        keys.index_copy_(0, places, asked.key)
        values.index_copy_(0, places, asked.value)
        if asked.window not in self._masks:
            mask = seen(self.positions[:, None], self._stored, asked.window)[:, None]
            # Added to the scores: the kernels turn a mask of truth values into this in every layer.
            added = torch.zeros(mask.shape, dtype=asked.query.dtype, device=mask.device)
            self._masks[asked.window] = added.masked_fill_(~mask, float("-inf"))
        k, v = (
            tensor.view(-1, self._seq_tokens, *tensor.shape[1:])[: self._n, : self._length] for tensor in (keys, values)
        )
        return sdpa(asked.query[:, None], k, v, self._masks[asked.window], asked.scale)[:, 0]


class StaticDecoder:
    """Greedy steps of a static batch as one CUDA graph, which serves again for batches of its size."""

    def __init__(self, network: Any, storage: Storage, blocks: Blocks) -> None:
        self._network, self._storage, self._blocks = network, storage, blocks
        self._captured: _Captured | None = None
        self._failed: dict[tuple[int, int], str] = {}
        # Why the last batch on CUDA was not captured.
        self.no_graph: str | None = None

    def ready(self, requests: Sequence[Request]) -> bool:
        """Capture the steps of a batch whose sequences are empty, and give these their blocks.

        False, and nothing is given, without CUDA, where a sequence cannot be at home, and where kernels wait for the
        host in the middle of a step: then `no_graph` tells why, and batches of that size are not tried again.
        """
        self.no_graph = None
        if self._storage.keys[0].device.type != "cuda":
            return False
        needs = [len(request.prompt) + request.max_new_tokens for request in requests]
        for seq, need in enumerate(needs):
            self._blocks.extend(seq, 0, need)
        size = (len(requests), blocks_of(max(needs)) * BLOCK_TOKENS)
        if not all(self._blocks.at_home(seq) for seq in range(len(requests))):
            self.no_graph = "the blocks of a sequence are not in one place"
        elif self._capture(size):
            return True
        for seq in range(len(requests)):
            self._blocks.truncate(seq, 0)
        return False

    def _capture(self, size: tuple[int, int]) -> bool:
        if size not in self._failed and (self._captured is None or self._captured.size != size):
            # The old graph's memory goes first.
            self._captured = None
            try:
                self._captured = _Captured(self._network, self._storage, self._blocks.per_seq, size)
            except RuntimeError as error:
                self._failed[size] = next(iter(str(error).splitlines()), repr(error))
                torch.cuda.synchronize()
        self.no_graph = self._failed.get(size)
        return self.no_graph is None

    def begin(self, tokens: list[int], requests: Sequence[Request]) -> None:
        """The first new token of each request, whose prompt is in the cache."""
        lengths = [len(request.prompt) for request in requests]
        last = [n + request.max_new_tokens - 1 for n, request in zip(lengths, requests, strict=True)]
        assert self._captured is not None
        self._captured.begin(tokens, lengths, last)

    def step(self) -> list[int]:
        """The next id of each request; returns when the ids are on the host."""
        assert self._captured is not None
        return self._captured.replay()


class StaticPass:
    """One greedy step of `n` sequences that see `length` places, over tensors that stay where they are."""

    def __init__(self, network: Any, storage: Storage, per_seq: int, size: tuple[int, int]) -> None:
        n, length = self.size = size
        self._network = network
        self._step = _StaticStep(storage, per_seq, n, length)
        device = storage.keys[0].device
        self.tokens = torch.zeros(n, dtype=torch.long, device=device)
        self._last = torch.zeros(n, dtype=torch.long, device=device)

    def begin(self, tokens: list[int], positions: list[int], last: list[int]) -> None:
        """The tokens to compute next, where, and the last position that each sequence owns."""
        for target, values in ((self.tokens, tokens), (self._step.positions, positions), (self._last, last)):
            target.copy_(torch.tensor(values))

    @torch.inference_mode()
    def run(self) -> None:
        """Compute `tokens` and put the most likely next ones in their place."""
        self._step.begin()
        positions = self._step.positions
        output = self._network(
            input_ids=self.tokens[None], position_ids=positions[None], use_cache=False, quantlab_step=self._step
        )
        self.tokens.copy_(output.logits[0].argmax(-1))
        # A sequence that is done goes on at its last place until the batch is.
        positions.copy_(torch.minimum(positions + 1, self._last))


class _Captured(StaticPass):
    """The pass as a CUDA graph."""

    def __init__(self, network: Any, storage: Storage, per_seq: int, size: tuple[int, int]) -> None:
        super().__init__(network, storage, per_seq, size)
        self._host = torch.zeros(size[0], dtype=torch.long, pin_memory=True)
        # Lazy initialisation and autotuning of kernels must not be captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.run()

    def replay(self) -> list[int]:
        """Compute one token for each sequence."""
        self._graph.replay()
        self._host.copy_(self.tokens, non_blocking=True)
        torch.cuda.synchronize()
        ids: list[int] = self._host.tolist()
        return ids


class _Stamps(BaseStreamer):
    """The ids and the time of every step of `generate`."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[int]]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """The prompts first, then one id for each sequence."""
        if self._prompt_seen:
            self.steps.append((time.perf_counter(), value.reshape(-1).tolist()))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""


def generate_plain(
    model: Any, requests: Sequence[Request], eos: frozenset[int], device: torch.device
) -> list[Generation]:
    """Transformers' `generate` on one static batch, prompts padded on the left, sdpa attention, its own cache."""
    longest = max(len(request.prompt) for request in requests)
    ids, mask = np.zeros((len(requests), longest), np.int64), np.zeros((len(requests), longest), np.int64)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.prompt) :] = request.prompt
        mask[row, longest - len(request.prompt) :] = 1
    stops = all(not request.ignore_eos for request in requests)
    settings = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=max(request.max_new_tokens for request in requests),
        eos_token_id=sorted(eos) if stops else None,
        pad_token_id=0,
    )
    stamps = _Stamps()
    model.set_attn_implementation("sdpa")
    try:
        start = time.perf_counter()
        model.generate(
            torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            generation_config=settings,
            streamer=stamps,
        )
    finally:
        model.set_attn_implementation(NAME)
    generations = []
    for row, request in enumerate(requests):
        generation = Generation(start)
        for now, tokens in stamps.steps[: request.max_new_tokens]:
            generation.tokens.append(tokens[row])
            generation.times_s.append(now)
            if tokens[row] in eos and not request.ignore_eos:
                generation.finish_reason = "stop"
                break
        generations.append(generation)
    return generations
