"""A run as a picture: nodes from left to right, each behind all that it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

MAX_EDGES = 5000

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 168, 46, 56, 18, 16
_NUM_SWEEPS = 4
_MAX_CHARS = 22
_FILL = {
    "pending": "#eeeeee",
    "running": "#cfe3ff",
    "waiting": "#ffe9b8",
    "completed": "#cdeccf",
    "failed": "#f8c9c4",
    "skipped": "#f7f7f7",
    "cancelled": "#dddddd",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureNode:
    """dependencies: ids of other nodes. label, status: shown. title: shown on hovering."""

    dependencies: Sequence[str]
    label: str
    status: str
    title: str


def picture(nodes: Mapping[str, PictureNode]) -> str:
    """The graph as SVG. nodes: in topological order. Of more than MAX_EDGES edges it draws so many.

    Columns are longest paths from the start; within them nodes stand near the mean place of their
    neighbours (the barycentre method of Sugiyama et al., 1981).
    """
    columns = _ordered(nodes, _columns(nodes))
    places = {
        name: (_MARGIN + x * (_WIDTH + _GAP_X), _MARGIN + y * (_HEIGHT + _GAP_Y))
        for x, column in enumerate(columns)
        for y, name in enumerate(column)
    }
    width = 2 * _MARGIN + len(columns) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + max(map(len, columns)) * (_HEIGHT + _GAP_Y) - _GAP_Y
    edges = [(parent, name) for name, node in nodes.items() for parent in node.dependencies]
    left_out = max(0, len(edges) - MAX_EDGES)
    note = f"<desc>{left_out} edges are not drawn</desc>" if left_out else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">{note}'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
        '<g fill="none" stroke="#888888">'
        + "".join(_edge(places[parent], places[name]) for parent, name in edges[:MAX_EDGES])
        + "</g>"
        + "".join(_box(name, node, places[name]) for name, node in nodes.items())
        + "</svg>\n"
    )


def _columns(nodes: Mapping[str, PictureNode]) -> list[list[str]]:
    depth: dict[str, int] = {}
    columns: list[list[str]] = []
    for name, node in nodes.items():
        depth[name] = max((depth[parent] + 1 for parent in node.dependencies), default=0)
        while len(columns) <= depth[name]:
            columns.append([])
        columns[depth[name]].append(name)
    return columns


def _ordered(nodes: Mapping[str, PictureNode], columns: list[list[str]]) -> list[list[str]]:
    """The columns, each sorted by where the neighbours in the columns before and behind stand."""
    parents = {name: list(node.dependencies) for name, node in nodes.items()}
    children: dict[str, list[str]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        for parent in node.dependencies:
            children[parent].append(name)
    place = {name: float(y) for column in columns for y, name in enumerate(column)}
    for sweep in range(_NUM_SWEEPS):
        neighbours = children if sweep % 2 else parents
        for column in reversed(columns) if sweep % 2 else columns:
            mean = {
                name: sum(place[one] for one in near) / len(near)
                if (near := neighbours[name])
                else place[name]
                for name in column
            }
            column.sort(key=mean.__getitem__)
            place.update((name, float(y)) for y, name in enumerate(column))
    return columns


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x0, y0 = start[0] + _WIDTH, start[1] + _HEIGHT // 2
    x1, y1 = end[0], end[1] + _HEIGHT // 2
    middle = (x0 + x1) // 2
    return f'<path d="M{x0} {y0}C{middle} {y0} {middle} {y1} {x1} {y1}"/>'


def _box(name: str, node: PictureNode, place: tuple[int, int]) -> str:
    x, y = place
    shown = name if len(name) <= _MAX_CHARS else name[: _MAX_CHARS - 1] + "…"
    label = node.label if len(node.label) <= _MAX_CHARS else node.label[: _MAX_CHARS - 1] + "…"
    fill = quoteattr(_FILL.get(node.status, "#ffffff"))
    return (
        f'<g><title>{escape(node.title)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" rx="6" fill={fill} stroke="#555555"/>'
        f'<text x="{x + 9}" y="{y + 19}" font-weight="bold">{escape(shown)}</text>'
        f'<text x="{x + 9}" y="{y + 36}" fill="#444444">{escape(label)}</text></g>'
    )
