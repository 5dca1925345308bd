"""An option that was given and that nothing heeds is wrong use; one that something heeds is not."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from quantlab.bench.batching.heeded import _RULES
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.cli.batching import batching
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.lab.steps import batching_step

FILE = ModelFile("m.gguf", "m", "m.gguf", "0")
URL = ModelFile("http://127.0.0.1:1/v1", "m", "http://127.0.0.1:1/v1", "0")
ROOFLINE: dict[str, Any] = {"simulate": True, "bandwidth": 1e12, "flops": 1e14}


@pytest.mark.parametrize(
    ("model", "options", "ignored"),
    [
        (FILE, {"parts": "batch", "rate": "1,2"}, "rate"),
        (FILE, {"parts": "sla,mixed", "rate": "1,2"}, "rate"),
        (FILE, {"parts": "sla", "utilization": "0.5"}, "utilization"),
        (FILE, {"rate": "1", "utilization": "0.5,0.7,0.8,0.9"}, "utilization"),
        (FILE, {"parts": "batch", "trace": "t.csv"}, "trace"),
        (FILE, {"parts": "batch", "requests": 100}, "requests"),
        (FILE, {"parts": "batch", "ttft_slo": "1s"}, "ttft-slo"),
        (FILE, {"parts": "batch", "tpot_slo": "1s"}, "tpot-slo"),
        (FILE, {"parts": "batch", "burstiness": 0.5}, "burstiness"),
        (FILE, {"trace": "t.csv", "burstiness": 0.5}, "burstiness"),
        (FILE, {"trace": "t.csv", "random_range_ratio": 0.1}, "random-range-ratio"),
        (FILE, {"parts": "load", "trace": "t.csv", "length_scale": 0.1, "prompt_tokens": 9}, "prompt-tokens"),
        (FILE, {"parts": "load", "trace": "t.csv", "length_scale": 0.1, "new_tokens": 9}, "new-tokens"),
        (FILE, {"parts": "mixed", "policy": "admission"}, "policy"),
        (FILE, {"parts": "load", "mixed_utilization": 0.9}, "mixed-utilization"),
        (FILE, {"parts": "load", "ageing": "2s"}, "ageing"),
        (FILE, {"parts": "batch", "trace": "t", "prefix_cache_tokens": 9, **ROOFLINE}, "trace"),
        (FILE, {"parts": "batch", "prefix_cache_tokens": 9, "trace": "t", **ROOFLINE}, "prefix-cache-tokens"),
        (FILE, {"parts": "load", "batch": "1,2"}, "batch"),
        (FILE, {"parts": "load", "warmup": 2}, "warmup"),
        (FILE, {"parts": "load", "repeats": 5}, "repeats"),
        (FILE, {"parts": "load", "repeats": 5, **ROOFLINE}, "repeats"),
        (FILE, {"parts": "batch", "max_num_seqs": 4}, "max-num-seqs"),
        (FILE, {"parts": "batch", "max_num_batched_tokens": 64}, "max-num-batched-tokens"),
        (FILE, {"parts": "batch", "kv_budget_tokens": 900}, "kv-budget-tokens"),
        (FILE, {"parts": "batch", "replicas": 4, **ROOFLINE}, "replicas"),
        (FILE, {"router": "round-robin", **ROOFLINE}, "router"),
        (FILE, {"threads": 2, **ROOFLINE}, "threads"),
        (FILE, {"device": "cpu", **ROOFLINE}, "device"),
        (URL, {"threads": 2}, "threads"),
        (URL, {"device": "cpu"}, "device"),
        (URL, {"runtime": "torch"}, "runtime"),
        (URL, {"max_num_batched_tokens": 64}, "max-num-batched-tokens"),
        (URL, {"kv_budget_tokens": 900}, "kv-budget-tokens"),
        (URL, {"ageing": "2s"}, "ageing"),
        (URL, {"batch": "1,2"}, "batch"),
    ],
)
def test_what_nothing_heeds_is_refused(model: ModelFile, options: dict[str, Any], ignored: str) -> None:
    with pytest.raises(UsageError, match=f"`--{ignored}` changes nothing here"):
        batching_step(model, options)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (FILE, {"parts": "load,mixed", "rate": "1", "mixed_utilization": 0.9, "ageing": "2s"}),
        (FILE, {"parts": "sla,mixed", "policy": "admission", "ageing": "2s"}),
        (FILE, {"parts": "batch", "prompt_tokens": 9, "new_tokens": 64, "repeats": 5, "warmup": 0, "threads": 1}),
        # A fit runs batches, with these.
        (FILE, {"parts": "load", "simulate": True, "repeats": 5, "threads": 1, "max_num_seqs": 4}),
        (FILE, {"parts": "batch,load", "trace": "t.csv", "length_scale": 0.1, "prompt_tokens": 9}),
        (FILE, {"parts": "load", "trace": "t.csv", "prompt_tokens": 9, "new_tokens": 9}),
        (URL, {"max_num_seqs": 4, "served_model": "m", "rate": "1", "runtime": "server", "device": "auto"}),
    ],
)
def test_what_something_heeds_is_taken(model: ModelFile, options: dict[str, Any]) -> None:
    batching_step(model, options)


def _options() -> dict[str, tuple[Any, Any]]:
    """Each option of the command: its default and typer's description of it."""
    hints = typing.get_type_hints(batching, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(batching).parameters.items():
        (info,) = (i for i in hints[name].__metadata__ if isinstance(i, typer.models.ParameterInfo))
        found[name] = parameter.default, info
    return found


def test_the_command_gives_no_default_of_its_own_and_every_option_has_a_rule() -> None:
    """What is not given must be seen as not given; defaults are those of the spec, and the help says them."""
    fields = {f.name: f for f in msgspec.structs.fields(BatchingSpec)}
    for name, (default, info) in _options().items():
        field = fields.get(name) or fields.get(f"{name}_s")
        if field is None or name in ("model", "simulate", "seed", "device", "dtype", "served_model", "parts"):
            continue
        assert name in _RULES, name
        assert default is None, name
        shown = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        if shown is not None:
            listed = shown if isinstance(shown, list) else [shown]
            words = [f"{value:g}" if isinstance(value, (int, float)) else value for value in listed]
            seconds = (
                [f"{value:g}s" if value >= 1 else f"{1000 * value:g}ms" for value in listed]
                if (name not in fields)
                else words
            )
            assert f"[default: {','.join(seconds)}]" in info.help, name


def test_a_recipe_that_gives_what_nothing_heeds_stops_before_its_first_step(tmp_path: Path) -> None:
    from quantlab.lab.execute import Lab
    from quantlab.lab.recipe import read_recipe, run_recipe

    (tmp_path / "r.yaml").write_text("name: r\nmodels: [none.gguf]\nbatching:\n  - {parts: [batch], rate: 1.0}\n")
    with pytest.raises(UsageError, match="`--rate` changes nothing here"):
        run_recipe(read_recipe(tmp_path / "r.yaml"), Lab(None))
