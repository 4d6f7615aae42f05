"""The page: a report as one HTML file that opens without a network, by plotly.js inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib import resources

from das.analysis.report.parts import Figure, Headline, Report, Section, Table

_PLOTTING = "plotly-basic.min.js"  # of plotly.js-basic-dist-min 4.1.1 on npm, unchanged; MIT (plotly-LICENSE.txt)
# Nothing may be loaded from anywhere, so a browser reports it as an error if something tries to.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page_of(report: Report) -> str:
    """Return the HTML of a report: the same text for the same report. All its texts are escaped.

    Never raises. Complexity: O(report), and 1.2 MB of plotly.js.
    """
    figures = [figure for section in report.sections for figure in section.figures]
    plots = {f.name: {"choices": [asdict(choice) for choice in f.choices], "layout": f.layout} for f in figures}
    links = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in report.sections)
    partial = (
        '<p class="partial" role="alert">PARTIAL: stopped before the end of the log.</p>' if report.is_partial else ""
    )
    body = "".join(map(_section, report.sections))
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>{_resource("report.css")}</style>
</head>
<body>
<a class="skip" href="#answer">Skip to the answer</a>
<header>
<div><h1>{escape(report.title)}</h1><p>{escape(report.subtitle)}</p></div>
<button type="button" id="theme" aria-pressed="false">Dark</button>
</header>
<main>
{partial}{_headline(report.headline)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
{body}
<section><h2>How this was made</h2><ul>{notes}</ul></section>
</main>
<span id="probe" hidden></span>
<script type="application/json" id="plots">{_json(plots)}</script>
<script type="text/plain" id="plotting">{_resource(_PLOTTING)}</script>
<script>{_resource("report.js")}</script>
</body>
</html>
"""


def _headline(headline: Headline) -> str:
    numbers = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> {escape(meaning)}</dd></div>"
        for name, value, meaning in headline.figures
    )
    assumptions = "".join(f"<li>{escape(assumption)}</li>" for assumption in headline.assumptions)
    kind = "gain" if headline.is_gain else "no-gain"
    return (
        f'<section id="answer" class="answer {kind}"><h2>{escape(headline.verdict)}</h2><p>{escape(headline.text)}</p>'
        f"<dl>{numbers}</dl><h3>What this assumes</h3><ul>{assumptions}</ul></section>"
    )


def _section(section: Section) -> str:
    figures = "".join(map(_figure, section.figures))
    tables = "".join(f"<h3>{escape(title)}</h3>{_table(table, title)}" for title, table in section.tables)
    return (
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>'
        f'<div class="figures">{figures}</div>{tables}{section.html}</section>'
    )


def _figure(figure: Figure) -> str:
    picker = ""
    if len(figure.choices) > 1:
        options = "".join(f'<option value="{n}">{escape(c.label)}</option>' for n, c in enumerate(figure.choices))
        picker = f'<p class="pick"><label>Show <select data-figure="{figure.name}">{options}</select></label></p>'
    return (
        f'<figure id="figure-{figure.name}"{" class=wide" if figure.is_wide else ""}>'
        f"<figcaption><h3>{escape(figure.title)}</h3><p>{escape(figure.summary)}</p></figcaption>{picker}"
        f'<div class="plot" data-plot="{figure.name}" role="img" aria-label="{escape(figure.summary)}"></div>'
        f"<details><summary>The numbers</summary>{_table(figure.table, figure.title)}</details></figure>"
    )


def _table(table: Table, label: str) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    rows = "".join(map(_row, table.rows))
    return (
        f'<div class="table" role="region" aria-label="{escape(label)}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(cells: Sequence[str]) -> str:
    first, *others = map(escape, cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'


def _json(value: object) -> str:
    """JSON that may stand in a script element, whatever its texts hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
