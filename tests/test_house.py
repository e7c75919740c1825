"""The drawing of the packages and their imports."""

import xml.etree.ElementTree as ET

from tools import house

GRAPH = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set(), "aside": {"bottom"}}


def test_arrows_leave_out_imports_that_follow_from_others() -> None:
    assert house.direct(GRAPH) == {"top": {"middle"}, "middle": {"bottom"}, "bottom": set(), "aside": {"bottom"}}


def test_a_package_is_above_all_that_it_imports() -> None:
    assert house.floors(GRAPH) == {"bottom": 0, "middle": 1, "aside": 1, "top": 2}


def test_boxes_do_not_overlap() -> None:
    names = dict.fromkeys(GRAPH, "") | {"files": ""}
    graph = GRAPH | {"files": set()}
    level = house.floors(graph)
    at = house.positions(house.routes(house.direct(graph), level), level)
    for one in names:
        for other in names:
            (x, y), (other_x, other_y) = at[one], at[other]
            assert one == other or y != other_y or abs(x - other_x) >= house.WIDTH


def test_the_drawing_is_that_of_the_imports() -> None:
    text = house.drawing()
    assert house.DRAWING.read_text() == text
    labels = [element.text for element in ET.fromstring(text).iter() if element.tag.endswith("text")]
    assert {"kernels", "layers", "models", "cli"} <= set(labels)
