"""What serves the loads of a spec, opened large enough for every part: a model, a simulation of it, or a server."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from quantlab.bench.batching import batch_sizes, notices
from quantlab.bench.batching.calibration import calibrate
from quantlab.bench.batching.load import BATCH_LENGTH, Lengths
from quantlab.bench.batching.spec import LEAST_REQUESTS, BatchingSpec
from quantlab.bench.batching.target import SimulatedTarget, Target, opened_engine
from quantlab.bench.roofline import roofline
from quantlab.core.artifact import model_info
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress
from quantlab.core.result import ModelInfo, Notice
from quantlab.runtime.step_model import StepTime


def opened(
    spec: BatchingSpec, drawn: Lengths, info: ModelInfo, stack: contextlib.ExitStack, progress: Progress
) -> tuple[Target, list[Notice]]:
    """What serves the loads, and what must be said of it in every row."""
    if len(drawn.prompt) < LEAST_REQUESTS:
        raise UsageError(
            f"the trace has {len(drawn.prompt)} requests: the first and the last tenth are not measured",
            f"give a trace of {LEAST_REQUESTS} or more",
        )
    n_ctx, n_seq = needed_context(spec, drawn), needed_sequences(spec)
    longest = longest_request(spec, drawn)
    # The last token is handed out, not fed back.
    if spec.kv_budget_tokens is not None and longest - 1 > spec.kv_budget_tokens:
        raise UsageError(
            f"requests of up to {longest} tokens, the KV budget is {spec.kv_budget_tokens} in all",
            "raise `--kv-budget-tokens`, or lower `--prompt-tokens` or `--new-tokens`",
        )
    progress("loading", 0, 1)
    if spec.endpoint:
        from quantlab.bench.batching.server_target import opened_server

        return stack.enter_context(opened_server(spec, n_ctx)), []
    if not spec.simulate:
        return stack.enter_context(opened_engine(spec, n_ctx, n_seq)), []
    own = _step_time(spec, spec.model, info, drawn, progress)
    small = None
    if spec.fallback is not None:
        small = _step_time(spec, spec.fallback, model_info(spec.fallback), drawn, progress)
    target = SimulatedTarget(
        own.steps,
        n_ctx,
        n_seq,
        swap_token_s=own.swap_token_s,
        fallback=small.steps if small else None,
        fallback_swap_token_s=small.swap_token_s if small else 0.0,
    )
    # A roofline is of one device: that is said once.
    return target, list({notice.message: notice for notice in own.said + (small.said if small else [])}.values())


class _Steps(NamedTuple):
    """What a simulation knows of one model, and what must be said of it."""

    steps: StepTime
    swap_token_s: float
    said: list[Notice]


def _step_time(spec: BatchingSpec, model: ModelFile, info: ModelInfo, drawn: Lengths, progress: Progress) -> _Steps:
    """From the roofline of the spec, or fitted to a short run of the model."""
    if spec.bandwidth_bytes_per_s is not None and spec.flops_per_s is not None:
        steps = roofline(Path(model.path), info, spec.bandwidth_bytes_per_s, spec.flops_per_s)
        return _Steps(steps, 0.0, [notices.of_roofline(steps)])
    alone = msgspec.structs.replace(spec, model=model, fallback=None)
    with opened_engine(alone, needed_context(spec, drawn), needed_sequences(spec)) as engine:
        found = calibrate(alone, drawn, engine, progress)
        return _Steps(found.model, found.swap_token_s, [notices.of_calibration(found, model.label), *engine.notices()])


def longest_request(spec: BatchingSpec, drawn: Lengths) -> int:
    """Tokens of the longest request of any load."""
    factor = BATCH_LENGTH if "mixed" in spec.chosen() else 1
    return max(prompt + factor * new for prompt, new in zip(drawn.prompt, drawn.new, strict=True))


def needed_context(spec: BatchingSpec, drawn: Lengths) -> int:
    """Tokens of the longest request of any part."""
    of_batches = "batch" in spec.chosen() or spec.simulate
    return max(longest_request(spec, drawn), spec.prompt_tokens + batch_sizes.new_tokens(spec) if of_batches else 0)


def needed_sequences(spec: BatchingSpec) -> int:
    """Sequences at once in any part."""
    return max(spec.max_num_seqs, *(spec.batch if "batch" in spec.chosen() else [1]))
