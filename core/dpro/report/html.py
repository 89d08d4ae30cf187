"""The HTML report: one small file that needs no network, no script and no other file.

Shows a :class:`~dpro.report.summary.Summary` and, for a tuned job, the verdict's arms. Follows the
reader's light or dark setting. Everything that came from a trace is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from dpro import __version__
from dpro.report.summary import Summary
from dpro.report.table import ArmRow, count_text, printable

_STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf8;--card:#fff;--ink:#1d2126;--dim:#667080;--line:#e4e2dd;--good:#1a7f4b;
--bad:#b3372f;--compute:#3b6fd4;--communication:#c2408f;--wait:#dd9a1f;--gap:#9aa3af}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2026;--ink:#e8eaed;--dim:#98a2b0;--line:#2d333b;
--good:#56c98a;--bad:#f0857d;--compute:#6b9bf2;--communication:#e277ba;--wait:#eab752;--gap:#697380}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.25rem 3rem}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.2rem 1rem}
h1{margin:0;font-size:1.55rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:2.2rem 0 .7rem;font-size:1.05rem}
.dim{color:var(--dim)} .good{color:var(--good)} .bad{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.8rem;margin-top:1.4rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:.7rem;padding:.85rem 1rem}
.card b{display:block;white-space:nowrap;font-size:1.3rem;font-weight:650;
font-variant-numeric:tabular-nums;line-height:1.3}
.card span{color:var(--dim);font-size:.85rem}
.bar{display:flex;height:1.7rem;border-radius:.45rem;overflow:hidden;gap:2px;background:var(--line)}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.4rem;margin-top:.6rem;font-size:.9rem}
.key{display:inline-block;width:.75rem;height:.75rem;border-radius:.2rem;margin-right:.4rem;vertical-align:-.05rem}
.advice{border-left:3px solid var(--compute);padding:.1rem 0 .1rem .9rem;margin:1.2rem 0 0}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:.7rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:.45rem .9rem;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
th{color:var(--dim);font-weight:500} tr+tr td{border-top:1px solid var(--line)}
th:first-child,td:first-child{text-align:left} td.name{max-width:26rem;overflow:hidden;text-overflow:ellipsis}
td.share{min-width:7rem} .meter{display:block;height:.35rem;border-radius:.2rem;background:var(--compute);
margin-left:auto}
code{font:.86em ui-monospace,"SF Mono",Menlo,Consolas,monospace;background:var(--line);
border-radius:.3rem;padding:.1em .3em}
td code{background:none;padding:0} ul{padding-left:1.2rem;margin:0} li{overflow-wrap:anywhere}
footer{margin-top:2.6rem;font-size:.85rem}
@media print{body{background:#fff}}
"""


def write(path: Path, summary: Summary, arms: Sequence[ArmRow] = (), verdict: str = "") -> None:
    """Write the page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(render(summary, arms, verdict), encoding="utf-8")


def render(summary: Summary, arms: Sequence[ArmRow] = (), verdict: str = "") -> str:
    """The page as text."""
    title = escape(printable(summary.title))
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>dpro · {title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
        f'<header><h1>{title}</h1><span class="dim">{summary.size}</span></header>',
        _arms(arms, verdict),
        _cards(summary),
        f'<p class="advice">{_code(escape(summary.advice))}</p>',
        _breakdown(summary),
        _top(summary),
        _links(summary),
        _warnings(summary),
        f'<footer class="dim">dpro {__version__}</footer>\n</main>\n</body>\n</html>\n',
    ]
    return "\n".join(part for part in parts if part)


def _cards(summary: Summary) -> str:
    error = summary.error_pct
    rows = [
        (f"{summary.measured_ms:.2f} ms", "step as measured"),
        (f"{summary.replayed_ms:.2f} ms", "step as replayed"),
        ("–" if error is None else f"{error:.1f} %", f"replay error (against {escape(summary.reference)})"),
        (f"{summary.daydream_ms:.2f} ms", "Daydream's estimate"),
    ]
    if summary.reference != "measured":
        rows.insert(1, (f"{summary.reference_ms:.2f} ms", "step without the profiler"))
    cards = "".join(f'<div class="card"><b>{value}</b><span>{label}</span></div>' for value, label in rows)
    return f'<div class="cards">{cards}</div>'


def _breakdown(summary: Summary) -> str:
    total = sum(summary.breakdown_ms.values())
    if total <= 0:
        return ""
    bar = legend = ""
    for key, value in summary.breakdown_ms.items():
        colour = f"background:var(--{escape(key)},var(--gap))"
        if value > 0:
            bar += f'<div style="width:{100 * value / total:.3f}%;{colour}" title="{escape(key)} {value:.2f} ms"></div>'
        legend += (
            f'<span><i class="key" style="{colour}"></i>{escape(key)} '
            f'<span class="dim">{value:.2f} ms, {100 * value / total:.0f} %</span></span>'
        )
    heading = "<h2>Where the step goes: its critical path</h2>"
    return f'{heading}\n<div class="bar">{bar}</div>\n<div class="legend">{legend}</div>'


def _top(summary: Summary) -> str:
    if not summary.top:
        return ""
    largest = summary.top[0][4] or 1.0
    rows = "".join(
        f'<tr><td class="name" title="{_text(name)}"><code>{_text(name)}</code></td>'
        f'<td class="dim">{escape(kind.lower())}</td><td>{count_text(count)}</td><td>{ms:.3f}</td>'
        f'<td class="share">{100 * share:.1f} %'
        f'<span class="meter" style="width:{100 * share / largest:.0f}%"></span></td>'
        "</tr>\n"
        for name, kind, count, ms, share in summary.top
    )
    head = "<tr><th>op</th><th>kind</th><th>count</th><th>ms</th><th>share of the step</th></tr>"
    return f'<h2>What is on it</h2>\n<div class="scroll"><table>\n{head}\n{rows}</table></div>'


def _links(summary: Summary) -> str:
    if not summary.links:
        return ""
    rows = "".join(
        f'<tr><td class="name">{_text(row.link)}</td><td>{count_text(row.messages)}</td><td>{row.nbytes / 1e6:.1f}</td>'
        f"<td>{100 * row.busy_share:.0f} %</td><td>{'' if row.mbit_s is None else f'{row.mbit_s:,.0f}'}</td>"
        f"<td>{row.queue_us:,.0f}</td><td>{100 * row.late_share:.0f} %</td></tr>\n"
        for row in summary.links
    )
    head = "".join(
        f"<th>{word}</th>" for word in ("link", "messages", "MB", "busy", "Mbit/s", "queued µs", "sender late")
    )
    return f'<h2>Links</h2>\n<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}</table></div>'


def _arms(arms: Sequence[ArmRow], verdict: str) -> str:
    if not verdict:
        return ""
    word = verdict.replace("_", " ")
    tone = {"KEPT": "good", "STEPPED ASIDE": "bad", "ROLLED BACK": "bad"}.get(word, "")
    heading = f'<h2>Verdict: <span class="{tone}">{escape(word)}</span></h2>'
    if not arms:
        return heading
    rows = "".join(
        f'<tr><td class="name">{_text(arm.name)}</td><td>{_ms(arm.predicted_ms)}</td><td>{_ms(arm.measured_ms)}</td>'
        f"<td>{'' if arm.spread_ms is None else f'± {arm.spread_ms:.2f}'}</td>"
        f"<td>{'' if arm.ratio is None else f'{arm.ratio:.3f}×'}</td><td>{_text(arm.mark)}</td></tr>\n"
        for arm in arms
    )
    head = "<tr><th>ms per step</th><th>predicted</th><th>measured</th><th></th><th>speed</th><th></th></tr>"
    return f'{heading}\n<div class="scroll"><table>\n{head}\n{rows}</table></div>'


def _warnings(summary: Summary) -> str:
    if not summary.warnings:
        return ""
    items = "".join(f"<li>{_text(warning)}</li>\n" for warning in summary.warnings)
    return f"<h2>Warnings</h2>\n<ul>\n{items}</ul>"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _text(text: str) -> str:
    return escape(printable(text))


def _code(text: str) -> str:
    """`words` between backticks as <code>; the number of backticks is even in dpro's own sentences."""
    pieces = text.split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
