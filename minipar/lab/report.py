"""The findings of `minipar overlap` as one HTML file that stands alone: tables and the picture."""

import base64
from html import escape

from matplotlib.figure import Figure

from minipar.lab.draw import pen
from minipar.observe.timeline import Timeline
from minipar.text import printable
from minipar.tools.overlap import Breakdown, cells

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<title>Communication, hidden or not</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#1f2430}
img{width:100%} table{border-collapse:collapse;margin:1em 0 2em} li{color:#6f7688}
td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #e9ebf1}
td:first-child,th:first-child{text-align:left;word-break:break-word}
.bar{background:linear-gradient(90deg,#f2b8b2 var(--p),transparent var(--p))}</style>"""
_COLUMNS = ("ms", "comm ms", "exposed ms", "hidden", "calls", "MB sent")


def page(timeline: Timeline, parts: Breakdown, figure: Figure, finding: str) -> str:
    """Return the report; every name in it, which may be a stranger's, is escaped."""

    def say(text: object) -> str:
        return escape(printable(text))

    image = base64.b64encode(pen.png(figure)).decode()
    html = [_HEAD, f"<h1>{say(finding)}</h1><p>{say(parts.verdict())}</p>"]
    html.append(f'<img alt="who computes, who talks" src="data:image/png;base64,{image}">')
    for kind, rows in parts.parts.items():
        if not rows:
            continue
        most = max(row.exposed for row in rows) or 1.0
        head = "".join(f"<th>{say(name)}</th>" for name in (kind, *_COLUMNS))
        html.append(f"<h2>By {say(kind)}</h2><p>A rank, in the mean.</p><table><tr>{head}</tr>")
        for row in rows[:200]:
            bar = f' class="bar" style="--p:{100 * row.exposed / most:.0f}%"'
            numbers = [
                f"<td{bar if i == 2 else ''}>{say(cell)}</td>" for i, cell in enumerate(cells(row))
            ]
            html.append(f"<tr><td>{say(row.name)}</td>{''.join(numbers)}</tr>")
        html.append("</table>")
    html.append(f"<h2>By rank and group</h2><pre>{escape(timeline.table())}</pre><ul>")
    html += [f"<li>{say(note)}</li>" for note in timeline.notes]
    return "\n".join([*html, "</ul></html>\n"])
