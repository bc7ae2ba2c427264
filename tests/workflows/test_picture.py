from __future__ import annotations

from xml.etree import ElementTree

from workflows.picture import MAX_EDGES, PictureNode, picture

SVG = "{http://www.w3.org/2000/svg}"


def node(*dependencies: str, label: str = "echo", status: str = "completed") -> PictureNode:
    return PictureNode(dependencies=dependencies, label=label, status=status, title=label)


def boxes(svg: str) -> dict[str, tuple[int, int]]:
    """Where each node stands, by its name."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        if rect is not None and text is not None:
            found[str(text.text)] = (int(rect.attrib["x"]), int(rect.attrib["y"]))
    return found


def test_a_node_stands_behind_all_that_it_waits_for() -> None:
    svg = picture({"a": node(), "b": node("a"), "c": node("a", "b"), "d": node()})
    found = boxes(svg)
    assert found["a"][0] == found["d"][0] < found["b"][0] < found["c"][0]
    assert len(set(found.values())) == 4
    assert svg.count("<path") == 3


def test_nodes_stand_where_their_neighbours_do() -> None:
    """Two chains that were given crosswise do not cross."""
    found = boxes(picture({"a": node(), "b": node(), "d": node("b"), "c": node("a")}))
    assert (found["a"][1] < found["b"][1]) == (found["c"][1] < found["d"][1])


def test_whatever_stands_in_a_label_is_text() -> None:
    svg = picture({"a": node(label='<script x="1">&', status="?")})
    texts = [one.text for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts == ["a", '<script x="1">&']


def test_very_many_edges_are_not_all_drawn_and_that_is_said() -> None:
    names = [f"n{i}" for i in range(110)]
    nodes = {name: node(*names[:i]) for i, name in enumerate(names)}
    svg = picture(nodes)
    assert svg.count("<path") == MAX_EDGES
    assert f"{110 * 109 // 2 - MAX_EDGES} edges are not drawn" in svg
