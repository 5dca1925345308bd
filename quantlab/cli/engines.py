"""`quantlab engines`: the libraries behind the torch methods, where each runs, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer

from quantlab.cli import options as opt
from quantlab.cli.console import progress_display, say
from quantlab.cli.interrupt import ending_in_order
from quantlab.cli.show import write_out

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def engines(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the engines of the torch methods: what each does, its tested versions, where it runs or what to do."""
    if context.invoked_subcommand is not None:
        return
    from quantlab.quantize.engines import DEFAULT_ENGINE, ENGINES
    from quantlab.quantize.engines.environment import state

    states = {name: state(engine) for name, engine in ENGINES.items()}
    if as_json:
        import msgspec

        rows = [{**msgspec.to_builtins(ENGINES[name]), **msgspec.to_builtins(states[name])} for name in ENGINES]
        write_out(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return
    for name, engine in ENGINES.items():
        found = states[name]
        methods = (f"{method}{' (default)' if DEFAULT_ENGINE[method] == name else ''}" for method in engine.methods)
        say(f"{name:<14} {found.where}{f': {found.reason}' if found.reason else ''}")
        say(f"  methods      {', '.join(methods)}; {engine.note}")
        say(f"  tested with  {', '.join(f'{pin} {version}' for pin, version in engine.pins.items())}")
        if found.python:
            say(f"  runs in      {found.python}")
        if found.hint:
            say(f"  hint         {found.hint}")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="The engine, as `quantlab engines` lists it.")],
    offline: opt.Offline = False,
    force: Annotated[bool, typer.Option("--force", help="Build again one that is there.")] = False,
) -> None:
    """Build an environment of its own for an engine, with pip as you have configured it."""
    from quantlab.core.errors import unknown_name
    from quantlab.quantize.engines import ENGINES, environment

    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    with ending_in_order("interrupted; nothing of it is kept"), progress_display() as progress:
        python = environment.add(ENGINES[name], offline=offline, force=force, progress=progress)
    say(f"{name} runs in {python}")
