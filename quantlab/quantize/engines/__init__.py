"""The libraries that hold the torch methods, as data: what each does and the versions it was tested with.

They patch each other and pin against each other, so each runs in a child process, and in an environment of its own
(environment.py) where this one does not hold its versions. A new engine is an entry here and a file beside this one:
`def work(spec, channel)`, from an EngineJob to an EngineDone (quantize/torch_work.py).
"""

from __future__ import annotations

import msgspec

from quantlab.core.errors import UsageError, unknown_name


class Engine(msgspec.Struct, frozen=True):
    """One library. `pins`: distribution -> the version it was tested with; another one is not used. `package`: what it
    is imported as.

    `alone`: its pins exclude those of the other engines, so that no extra of quantlab can hold it. `resumes`: it keeps
    finished layers in the folder `state` of its job, and continues from there.
    """

    name: str
    package: str
    methods: tuple[str, ...]
    pins: dict[str, str]
    note: str
    alone: bool = False
    resumes: bool = False

    @property
    def call(self) -> str:
        """The work that a child does, as runtime/worker.py takes it."""
        return f"quantlab.quantize.engines.{self.name}:work"

    @property
    def requirements(self) -> list[str]:
        """The requirements that pip takes: exactly the tested versions."""
        return [f"{name}=={version}" for name, version in self.pins.items()]


# gptqmodel 7.7 and llmcompressor 0.14 exclude each other's transformers; these versions live together.
_TORCH = {"torch": "2.13.0", "transformers": "5.17.0"}
_LAST_OF_AUTOAWQ = {"torch": "2.6.0", "transformers": "4.51.3"}

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "gptqmodel",
            "gptqmodel",
            ("gptq", "awq"),
            {**_TORCH, "gptqmodel": "7.6.0"},
            "the classic gptq and awq formats",
            resumes=True,
        ),
        Engine(
            "llmcompressor",
            "llmcompressor",
            ("fp8", "int8", "rtn", "awq", "gptq"),
            {**_TORCH, "llmcompressor": "0.14.0.1", "compressed-tensors": "0.19.0"},
            "the compressed-tensors format",
        ),
        Engine(
            "optimum",
            "optimum.gptq",
            ("gptq",),
            {**_TORCH, "optimum": "2.3.0", "gptqmodel": "7.6.0"},
            "gptq as transformers' GPTQConfig calls it",
        ),
        Engine(
            "autoawq",
            "awq",
            ("awq",),
            {**_LAST_OF_AUTOAWQ, "autoawq": "0.2.9"},
            "no longer maintained; saves bad models with a newer transformers",
            alone=True,
        ),
    )
}

# Of the engines that do a method, the one that is taken where the user names none.
DEFAULT_ENGINE = {
    "gptq": "gptqmodel", "awq": "gptqmodel", "fp8": "llmcompressor", "int8": "llmcompressor", "rtn": "llmcompressor",
}  # fmt: skip


def choose(method: str, name: str | None) -> Engine:
    """The engine that does `method`: the one called `name`, or the default one."""
    if name is None:
        return ENGINES[DEFAULT_ENGINE[method]]
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if method not in ENGINES[name].methods:
        able = ", ".join(f"`{engine.name}`" for engine in ENGINES.values() if method in engine.methods)
        raise UsageError(f"the engine `{name}` does not do `{method}`", f"`{method}` is done by {able}")
    return ENGINES[name]
