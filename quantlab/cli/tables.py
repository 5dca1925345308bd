"""A table of report on the terminal: nothing is cut off; what does not fit the width goes into blocks below."""

from __future__ import annotations

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quantlab.report.table import Entry, Table

_STYLES = {"good": "green", "bad": "red", "": ""}
# One space on either side of a column and the line between columns.
_GAP = 3
_NARROWEST_KEY = 12


def render_terminal(table: Table, console: Console) -> None:
    """Print the table, its verdicts and its notes.

    A change stands beside its value where all columns fit the console so, else below it; columns that do not fit
    even then follow in further blocks under the same row names.
    """
    widest_key = max(_NARROWEST_KEY, console.width // 3)
    widths = _widths(table, widest_key, stacked=False)
    if stacked := sum(widths) > console.width:
        widths = _widths(table, widest_key, stacked=True)
    for columns in _blocks(widths, table.keys, console.width):
        console.print(_block(table, columns, stacked=stacked))
        console.print()
    for name, said in table.verdicts:
        console.print(Text.assemble((name, "bold"), ": ", said))
    if table.verdicts:
        console.print()
    for note in table.notes:
        console.print(Text(f"- {note}"), style="dim")


def _widths(table: Table, widest_key: int, *, stacked: bool) -> list[int]:
    """The width of each column with the gap after it; a long row name is folded."""
    widths = []
    for column, head in enumerate(table.heads):
        lines = [head.title, *(line for row in table.rows for line in _lines(row[column], stacked=stacked))]
        width = max(map(cell_len, lines))
        widths.append(_GAP + (min(width, widest_key) if column < table.keys else width))
    return widths


def _lines(entry: Entry, *, stacked: bool) -> list[str]:
    return [entry.text, entry.change] if stacked else [str(entry)]


def _blocks(widths: list[int], keys: int, console_width: int) -> list[list[int]]:
    """The columns of each block: the key columns and as many others as fit, at least one."""
    names = list(range(keys))
    blocks = [names]
    for column in range(keys, len(widths)):
        if len(blocks[-1]) > keys and sum(widths[i] for i in [*blocks[-1], column]) > console_width:
            blocks.append(names)
        blocks[-1] = [*blocks[-1], column]
    return blocks


def _block(table: Table, columns: list[int], *, stacked: bool) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        head = table.heads[column]
        drawn.add_column(Text(head.title), justify=head.justify, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(_cell(row[column], stacked=stacked) for column in columns))
    return drawn


def _cell(entry: Entry, *, stacked: bool) -> Text:
    if not entry.change:
        return Text(entry.text)
    change = (entry.change, _STYLES[entry.tone])
    return Text.assemble(entry.text, "\n", change) if stacked else Text.assemble(entry.text, " (", change, ")")
