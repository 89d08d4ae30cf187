"""Tables for the terminal, built with rich: the tuner's verdict, a replay, a critical path.

Every function returns a renderable and prints nothing; :func:`to_text` turns any of them into the
plain text of ``report.txt``. Knows no graph: it is given numbers in ms and words. Rich is imported
when a table is built, so that importing this module costs nothing inside a training job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from dpro.report.diff import OpChange
    from dpro.report.summary import LinkRow

#: Colour of a verdict or finding; any other word is shown in the terminal's own colour.
STYLES = {
    "KEPT": "bold green",
    "ROLLED BACK": "bold yellow",
    "NO BETTER PLAN": "bold cyan",
    "SUGGESTED": "bold cyan",
    "OBSERVED": "bold cyan",
    "STEPPED ASIDE": "bold red",
    "ok": "green",
    "note": "cyan",
    "warn": "yellow",
}


@dataclass(frozen=True)
class ArmRow:
    """One way of running the job (the baseline, the plan, …). Times in ms per step.

    ``spread_ms`` is the noise of ``measured_ms`` (shown as ±), ``ratio`` the speed against the
    baseline (1.1 = a tenth faster), ``mark`` a short word such as "in force".
    """

    name: str
    predicted_ms: float | None = None
    measured_ms: float | None = None
    spread_ms: float | None = None
    ratio: float | None = None
    mark: str = ""


def verdict_table(rows: Sequence[ArmRow], verdict: str, notes: Sequence[str] = ()) -> Table:
    """The one table a tuned job prints: an arm per row, the verdict as title, notes below."""
    from rich.text import Text

    best = max((row.ratio for row in rows if row.ratio is not None), default=None)
    word = verdict.replace("_", " ")
    title = Text.assemble("dpro  ", (word, STYLES.get(word, "bold")))
    # A column that nobody filled says nothing.
    columns = {
        "predicted": [_ms(row.predicted_ms) for row in rows],
        "measured": [_ms(row.measured_ms) for row in rows],
        "": ["" if row.spread_ms is None else f"± {row.spread_ms:.{_digits(row.measured_ms)}f}" for row in rows],
        "speed": ["" if row.ratio is None else f"{row.ratio:.3f}×" for row in rows],
        " ": [plain(row.mark) for row in rows],
    }
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    table = _table("ms/step", *columns, title=title)
    for row, *cells in zip(rows, *columns.values(), strict=True):
        leads = len(rows) > 1 and row.ratio is not None and row.ratio == best
        table.add_row(plain(row.name), *cells, style="bold" if leads else "")
    if notes:
        # Notes may be wider than the table: they are not folded to its width.
        table.caption = Text("\n".join(notes), style="dim", no_wrap=True, overflow="ignore")
        table.caption_justify = "left"
    return table


def numbers_table(rows: Sequence[tuple[str, str, str]], title: str = "") -> Table:
    """Label, value and remark, one per row; labels left, values right."""
    table = _table("", "", "", title=title)
    table.show_header = False
    table.columns[2].style, table.columns[2].justify, table.columns[2].no_wrap = "dim", "left", False
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def clocks_table(ranks: Sequence[Mapping[str, Any]], title: str = "", note: str = "") -> Table:
    """What `dpro align` finds, a rank per row; µs and ppm. None, not known, is shown as a dash."""
    from rich.text import Text

    table = _table("rank", "host", "offset us", "drift ppm", "± us", "by", title=title)
    for rank in ranks:
        sure = rank["uncertainty_us"]
        cells = [f"{rank['offset_us']:,.1f}", f"{rank['drift_ppm']:.1f}", "—" if sure is None else f"{sure:.1f}"]
        table.add_row(str(rank["rank"]), plain(rank["host"]), *cells, plain(rank["source"]))
    if note:
        table.caption, table.caption_justify = Text(note, style="dim"), "left"
    return table


def breakdown_bar(breakdown_ms: Mapping[str, float], width: int = 60) -> RenderableType:
    """The critical path as one coloured bar with its legend: where a step's time goes."""
    from rich.text import Text

    # Shades as well as colours: plain text and colour-blind readers see the parts too.
    looks = {"compute": ("█", "blue"), "communication": ("▓", "magenta"), "wait": ("▒", "yellow")}
    total = sum(breakdown_ms.values()) or 1.0
    bar, legend = Text(" "), Text()
    edge, done = 0.0, 0
    for index, (key, value) in enumerate(breakdown_ms.items()):
        edge += value / total * width
        cells, done = round(edge) - done, round(edge)
        glyph, colour = looks.get(key, ("░", "bright_black"))
        bar.append(glyph * cells, style=colour)
        share = f"{key} {_ms(value)} ms ({100 * value / total:.0f} %)"
        legend.append("  " if index % 2 else "\n ")
        legend.append(glyph, style=colour)
        legend.append(f" {share:<34}".rstrip() if index % 2 else f" {share:<34}")
    return Text.assemble(bar, legend)


def ops_table(rows: Sequence[tuple[str, str, int, float, float]], title: str = "") -> Table:
    """Rows are (name, kind, count, ms, share of the whole in 0..1)."""
    table = _table("op", "kind", "count", "ms", "share", title=title)
    table.columns[1].justify, table.columns[1].style = "left", "dim"
    for name, kind, count, ms, share in rows:
        table.add_row(plain(_short(name, 40)), kind.lower(), count_text(count), _ms(ms), f"{100 * share:.1f} %")
    return table


def links_table(rows: Sequence[LinkRow], title: str = "") -> Table:
    """One link direction per row, see :class:`~dpro.report.summary.LinkRow`."""
    table = _table("link", "messages", "MB", "busy", "Mbit/s", "queued µs", "sender late", title=title)
    for row in rows:
        table.add_row(
            row.link,
            count_text(row.messages),
            f"{row.nbytes / 1e6:.1f}",
            f"{100 * row.busy_share:.0f} %",
            "" if row.mbit_s is None else f"{row.mbit_s:,.0f}",
            f"{row.queue_us:,.0f}",
            f"{100 * row.late_share:.0f} %",
        )
    return table


def diff_table(rows: Sequence[OpChange], a: str, b: str, title: str = "") -> Table:
    """Rows of :func:`dpro.report.diff.compare`: name, ms in A and in B, change, counts."""
    table = _table("op", a, b, "change", "%", "count", title=title)
    for row in rows:
        before, after, change = row["a_ms"], row["b_ms"], row["change_ms"]
        counts = (count_text(row["a_count"]), count_text(row["b_count"]))
        table.add_row(
            plain(_short(row["name"], 32)),
            _ms(before),
            _ms(after),
            f"{change:+.3f}",
            f"{100 * change / before:+.1f}" if before else "new",
            counts[0] if counts[0] == counts[1] else " → ".join(counts),
            style="red" if change > 0 else "green" if change < 0 else "",
        )
    return table


def findings_table(rows: Sequence[tuple[str, str, str, str]], title: str = "") -> Table:
    """Rows are (status word, what, found, what to do)."""
    from rich.text import Text

    table = _table("", "", "found", "what to do", title=title)
    for column in table.columns:
        column.justify, column.overflow, column.no_wrap = "left", "fold", False
    for status, what, found, todo in rows:
        table.add_row(Text(status, style=STYLES.get(status, "")), what, plain(found), plain(todo))
    return table


def plain(text: str) -> str:
    """Text from a file, made safe to print: no control characters, no rich markup."""
    from rich.markup import escape

    return escape(printable(text))


def printable(text: str) -> str:
    """Without control characters: each becomes U+FFFD."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def count_text(count: float) -> str:
    """1,234 where it is whole, else one decimal."""
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def to_text(renderable: RenderableType, width: int = 100) -> str:
    """The same table as plain text: no colour, no escape codes, no trailing blanks."""
    import io

    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(*headers: str, title: str | Text = "") -> Table:
    from rich import box
    from rich.table import Table

    shown = (plain(title) or None) if isinstance(title, str) else title
    table = Table(box=box.SIMPLE_HEAD, title=shown, title_justify="left", title_style="bold", pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(plain(header), justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table


def _short(name: str, limit: int) -> str:
    """Names of kernels are hundreds of characters long; the whole one is in the JSON and the HTML."""
    name = name.removeprefix("void ")
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _digits(value_ms: float | None) -> int:
    """Decimals that leave four figures or so: 1234 ms, 123.4, 12.34, 1.234."""
    size = abs(value_ms or 0.0)
    return 1 if size >= 100 else 2 if size >= 10 else 3


def _ms(value_ms: float | None) -> str:
    return "" if value_ms is None else f"{value_ms:.{_digits(value_ms)}f}"
