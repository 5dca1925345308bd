"""`quantlab doctor`: what runs here, or why not and what to do."""

from __future__ import annotations

import typer

from quantlab.cli.console import say
from quantlab.cli.show import write_out


def doctor(as_json: bool = typer.Option(False, "--json", help="Print the checks as JSON.")) -> None:
    """Show hardware, driver, package versions, and for each method and backend whether it runs here."""
    from quantlab.lab.doctor import examine

    report = examine()
    if as_json:
        import msgspec

        write_out(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
        return
    for name, value in report.machine.items():
        say(f"{name:<20} {value}")
    say()
    for check in report.checks:
        say(f"{'runs' if check.runs else 'no':<5} {check.name:<20} {check.reason}")
        if check.hint:
            say(f"{'':<26} hint: {check.hint}")
