"""The run that the step model of `--simulate` is fitted to."""

from __future__ import annotations

import msgspec

from quantlab.bench.batching import batch_sizes, open_loop
from quantlab.bench.batching.load import Asked, Lengths
from quantlab.bench.batching.serve import Calibrated, Cell
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.target import EngineTarget
from quantlab.core.progress import Progress

# Requests of the saturated load, beside batches that decode.
_CALIBRATION_REQUESTS = 24
# Kernels take rows by fours or eights: up to here each batch has a cost of its own.
_EVERY_BATCH = 16


def calibrate(spec: BatchingSpec, drawn: Lengths, engine: EngineTarget, progress: Progress) -> Calibrated:
    """The step model of a short run: batches up to `max_num_seqs` alone (every one up to 16), and a saturated load."""
    n = _CALIBRATION_REQUESTS
    few = open_loop.saturate(spec, Lengths(drawn.prompt[:n], drawn.new[:n], drawn.gaps[:n]))
    # The first load warms up, and its steps are not counted.
    cells = [msgspec.structs.replace(few, requests=few.requests[:2]), few]
    cells += [
        Cell([Asked(spec.prompt_tokens, batch_sizes.new_tokens(spec), 0.0)] * batch, batch, spec.max_num_batched_tokens)
        for _ in range(spec.repeats)
        for batch in _batches(spec.max_num_seqs)
    ]
    for done, one in enumerate(cells):
        engine.run(one)
        progress("fitting the step model", done + 1, len(cells))
    return engine.calibrated()


def _batches(most: int) -> list[int]:
    doubled = {2**i for i in range(most.bit_length())}
    return sorted(batch for batch in {*range(1, _EVERY_BATCH + 1), *doubled, most} if batch <= most)
