"""From the options of `quantlab prefix-cache` to its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantlab.bench.batching.spec import parse_numbers
from quantlab.bench.prefix_cache.lint.run import LintSpec
from quantlab.bench.prefix_cache.spec import PrefixCacheSpec, parse_bytes
from quantlab.core.errors import UsageError
from quantlab.core.files import sha256_file, user_path
from quantlab.core.model import ModelFile
from quantlab.lab.execute import Step, make_spec
from quantlab.lab.runtimes import asked

Options = dict[str, Any]


def lint_step(log: str, block_tokens: int | None) -> Step:
    """The step that reads a log of requests."""
    path = user_path(log)
    file = ModelFile(str(path), path.stem, log, sha256_file(path))
    return Step("prefix-cache", LintSpec(file) if block_tokens is None else LintSpec(file, block_tokens))


def prefix_cache_step(model: ModelFile, options: Options) -> Step:
    """A prefix-cache step. `scenario` may be a comma list, `budget` a text such as `64MB`."""
    options = {name: value for name, value in options.items() if value is not None}
    given = list(options)
    if isinstance(options.get("scenario"), str):
        options["scenario"] = [name.strip() for name in options["scenario"].split(",")]
    if "budget" in options:
        options["budget_bytes"] = parse_bytes(options.pop("budget"), "--budget")
    for name, of_spec in (("bandwidth", "bandwidth_bytes_per_s"), ("flops", "flops_per_s")):
        if name in options:
            # YAML takes 1e12 for a text.
            (options[of_spec],) = parse_numbers(str(options.pop(name)), f"--{name}")
    runtime = asked(options)
    # A GGUF file's types are its own; of an endpoint the spec refuses them.
    dropped = {"runtime", "dtype"} if Path(model.path).is_file() else {"runtime"}
    spec = make_spec(PrefixCacheSpec, {"model": model, **{n: v for n, v in options.items() if n not in dropped}})
    spec.check_heeded(given)
    if spec.endpoint and runtime not in ("auto", "server"):
        raise UsageError(
            f"`--runtime {runtime}` changes nothing at an endpoint: its server has its own", "leave it out"
        )
    return Step("prefix-cache", spec)
