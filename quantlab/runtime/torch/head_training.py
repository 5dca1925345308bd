"""Train Medusa heads or an EAGLE layer for a target that stays as it is, in a child process.

All learn from the target's own answers (head_data.py): Medusa their tokens, as the paper has it; EAGLE the target's
hidden states and distributions there (Hinton, G., et al. 2015, distillation). Greedy answers that were held out tell
how often a draft would have been accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import nn

from quantlab.core.errors import UsageError
from quantlab.core.result import RuntimeInfo
from quantlab.runtime.backend import Capacity
from quantlab.runtime.torch import heads
from quantlab.runtime.torch.head_data import Windows, answered, beginnings
from quantlab.runtime.torch.heads_file import HeadsRecord
from quantlab.runtime.torch.hidden import HiddenBackend
from quantlab.runtime.worker import Channel

_HELD_OUT = 0.1
_SEQUENCES = 32
# Positions of a step of Medusa, windows of a step of EAGLE.
_POSITIONS, _WINDOWS = 256, 4
_LEARNING_RATE = 2e-3
_WARM_UP_STEPS = 20
# Later heads are harder, and count less: 0.8 each, as Medusa has it.
_FADES = 0.8
# EAGLE's states drift when it reads its own: it learns from disturbed ones.
_NOISE = 0.1
# What cross entropy passes over: tokens that are not drafted.
_NO_PLACE = -100
# Of held-out windows every so many places are drafted at.
_STRIDE = 4
# This part of a window is text to begin from.
_BEGINNING = 1 / 8


class Job(msgspec.Struct, frozen=True):
    """Heads to train for the model at `path`, into the temporary file `out`."""

    path: str
    target: str
    target_sha256: str
    method: str
    out: str
    text: str
    windows: int
    length: int
    heads: int
    epochs: int
    draft_vocab: int
    seed: int
    device: str
    dtype: str
    threads: int | None


class Trained(msgspec.Struct, frozen=True):
    """`agreement`: of each draft position the share that is the target's choice, in greedy answers held out."""

    runtime: RuntimeInfo
    agreement: list[float]
    loss: list[float]
    tokens: int
    draft_ids: int
    parameters: int
    answers_s: float
    training_s: float
    record: dict[str, Any]


def work(job_json: object, channel: Channel) -> Trained:
    """Have the target answer, train, write."""
    job = msgspec.convert(job_json, Job)
    torch.manual_seed(job.seed)
    capacity = Capacity(n_ctx=job.length, n_seq=_SEQUENCES, n_batch=_SEQUENCES * job.length, n_outputs=_SEQUENCES)
    backend = HiddenBackend(Path(job.path), capacity, device=job.device, dtype=job.dtype, threads=job.threads)
    loaded = backend.describe()
    if loaded.n_ctx_train and job.length > loaded.n_ctx_train:
        raise UsageError(
            f"windows of {job.length} tokens, the context of `{job.target}` holds {loaded.n_ctx_train}",
            "lower `--calib-length`",
        )
    began = time.perf_counter()
    bos = loaded.bos if loaded.adds_bos else None
    begun = max(2, round(_BEGINNING * job.length))
    prompts = beginnings(backend.encode(job.text), bos, job.windows, begun, job.seed)
    windows = answered(backend, prompts, job.length, job.seed, lambda done: channel.progress("answers", done, 1))
    answers_s = time.perf_counter() - began
    trainer = _Trainer(job, backend, windows)
    loss = trainer.train(lambda done: channel.progress("training", done, 1))
    agreement = trainer.agreement()
    record = trainer.record(loss, agreement)
    heads.save(Path(job.out), trainer.module, record, trainer.ids)
    return Trained(
        runtime=loaded.runtime,
        agreement=agreement,
        loss=loss,
        tokens=windows.tokens.numel(),
        draft_ids=len(trainer.ids),
        parameters=sum(p.numel() for p in trainer.module.parameters()),
        answers_s=answers_s,
        training_s=time.perf_counter() - began - answers_s,
        record=msgspec.to_builtins(record),
    )


class _Trainer:
    """One module, the windows it learns from, and those held out."""

    def __init__(self, job: Job, backend: HiddenBackend, windows: Windows) -> None:
        self._job = job
        weight = backend.output_weight.float().cpu().clone()
        self._embedding = backend.input_weight.float().cpu().clone()
        self.ids = _frequent(windows.tokens, len(weight), job.draft_vocab)
        self._scale = float(windows.hidden.pow(2).mean().sqrt())
        # Of hidden states of size one.
        self._output = weight[self.ids] * self._scale
        # The first windows are greedy.
        n_held = max(1, round(_HELD_OUT * len(windows.tokens)))
        self._tokens, self._hidden = windows.tokens[n_held:], windows.hidden[n_held:] / self._scale
        self._held = Windows(windows.tokens[:n_held], windows.hidden[:n_held] / self._scale, windows.begun)
        self._n_vocab, hidden_size = weight.shape
        # Of each token its place among the drafted ids.
        self._place = torch.full((self._n_vocab,), _NO_PLACE)
        self._place[self.ids] = torch.arange(len(self.ids))
        self._bare = HeadsRecord(
            job.method, job.target, job.target_sha256, hidden_size, self._n_vocab, job.heads, self._scale
        )
        self.module = heads.make(self._bare)
        self._random = np.random.default_rng(job.seed)

    def train(self, advance: Callable[[float], None]) -> list[float]:
        """Every epoch's mean loss."""
        medusa = self._job.method == "medusa"
        places = self._tokens.numel() if medusa else len(self._tokens)
        size = _POSITIONS if medusa else _WINDOWS
        steps = -(-places // size)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(steps * self._job.epochs))
        losses = []
        self.module.train()
        for epoch in range(self._job.epochs):
            order, total = self._random.permutation(places), 0.0
            for step in range(steps):
                part = torch.from_numpy(order[step * size : (step + 1) * size])
                loss = self._medusa_loss(part) if medusa else self._eagle_loss(part)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                optimizer.step()
                rate.step()
                total += float(loss.detach())
                advance((epoch + (step + 1) / steps) / self._job.epochs)
            losses.append(total / steps)
        return losses

    def _medusa_loss(self, places: torch.Tensor) -> torch.Tensor:
        """Head i at a position against the token i + 2 positions later: the next one is the target's own to say."""
        length = self._tokens.shape[1]
        window, at = places // length, places % length
        later = at[:, None] + 2 + torch.arange(self._job.heads)
        goal = self._place[self._tokens[window[:, None], later.clamp(max=length - 1)]]
        goal = goal.masked_fill((later >= length) | (later < self._held.begun), _NO_PLACE)
        made = self.module(self._hidden[window, at]) @ self._output.T
        apart = F.cross_entropy(made.transpose(1, 2), goal, ignore_index=_NO_PLACE, reduction="none")
        weights = _FADES ** torch.arange(self._job.heads)
        return (apart * weights).sum() / (goal != _NO_PLACE).sum().clamp(min=1)

    def _eagle_loss(self, windows: torch.Tensor) -> torch.Tensor:
        """The next hidden state, and the distribution that the target makes of it; then once more on its own states."""
        hidden, tokens = self._hidden[windows], self._tokens[windows]
        embedded = self._embedding[tokens[:, 1:]]
        read = hidden[:, :-1] + _NOISE * torch.randn_like(hidden[:, :-1])
        total = torch.zeros(())
        for _ in range(2):
            made, _ = self.module(read, embedded)
            total = total + F.smooth_l1_loss(made, hidden[:, 1:])
            total = total + _cross_entropy(made @ self._output.T, hidden[:, 1:] @ self._output.T).mean()
            # What it said of a position is what it reads there.
            read = torch.cat([hidden[:, :1], made[:, :-1].detach()], dim=1)
        return total / 2

    @torch.no_grad()
    def agreement(self) -> list[float]:
        """See `Trained`: chains drafted at places of held-out windows, against the target's choices along the text.

        A later position counts where the text itself followed the target's choices, and the draft, up to it.
        """
        self.module.eval()
        tokens, hidden, begun = self._held
        chosen = self.ids[(hidden @ self._output.T).argmax(-1)]
        at = torch.arange(begun - 1, tokens.shape[1] - self._job.heads - 1, _STRIDE)
        drafts = self._medusa_chain(hidden[:, at]) if self._job.method == "medusa" else self._eagle_chain(at)
        alive = torch.ones(len(tokens), len(at), dtype=torch.bool)
        found = []
        for i in range(self._job.heads):
            goal = chosen[:, at + i + 1]
            right = drafts[:, :, i] == goal
            found.append(float(right[alive].float().mean()) if alive.any() else 0.0)
            alive &= right & (tokens[:, at + i + 2] == goal)
        return found

    def _medusa_chain(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = self.module(hidden.reshape(-1, hidden.shape[-1])) @ self._output.T
        return self.ids[flat.argmax(-1)].view(*hidden.shape[:2], -1)

    def _eagle_chain(self, places: torch.Tensor) -> torch.Tensor:
        """The layer's own chains: each reads true states before its place and its own after it."""
        tokens, hidden, _ = self._held
        chains = torch.zeros(len(tokens), len(places), self._job.heads, dtype=torch.long)
        for row, at in enumerate(places.tolist()):
            made, past = self.module(hidden[:, : at + 1], self._embedding[tokens[:, 1 : at + 2]])
            for i in range(self._job.heads):
                drafted = self.ids[(made[:, -1] @ self._output.T).argmax(-1)]
                chains[:, row, i] = drafted
                made, past = self.module(made[:, -1:], self._embedding[drafted][:, None], past)
        return chains

    def record(self, loss: list[float], agreement: list[float]) -> HeadsRecord:
        """What the file says of itself."""
        trained = {
            "windows": self._job.windows,
            "length": self._job.length,
            "epochs": self._job.epochs,
            "seed": self._job.seed,
            "loss": loss,
            "agreement": agreement,
        }
        return msgspec.structs.replace(self._bare, trained=trained)


def _frequent(tokens: torch.Tensor, n_vocab: int, most: int) -> torch.Tensor:
    """The ids of the windows, the most frequent `most` of them at most, in order."""
    counts = torch.bincount(tokens.flatten(), minlength=n_vocab)
    return counts.argsort(descending=True, stable=True)[: min(most, int((counts > 0).sum()))].sort().values


def _cross_entropy(made: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Of each position the cross entropy of the made distribution against the goal's."""
    return -(F.softmax(goal, dim=-1) * F.log_softmax(made, dim=-1)).sum(-1)


def _schedule(steps: int) -> Callable[[int], float]:
    """Up in a few steps, then down along a cosine."""
    return lambda step: min(1.0, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + float(np.cos(np.pi * step / steps)))
