"""The picture of the rooms tells the imports as they are."""

from __future__ import annotations

from xml.etree import ElementTree

import draw_house
import pytest


@pytest.fixture
def package(tmp_path):
    """A factory of packages `nodeready`: `package({"a/b.py": "import nodeready.c"})`."""

    def write(files):
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / "nodeready" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "nodeready"

    return write


def test_an_arrow_is_an_import_of_another_room_wherever_it_stands(package):
    rooms, graph = draw_house.read(
        package(
            {
                "shell.py": "import os\n",
                "policy/__init__.py": "",
                "policy/fields.py": "from nodeready import shell\n"
                "from nodeready.policy import kinds\n",
                "policy/kinds.py": "",
                "cli/main.py": "def f():\n    from nodeready.policy.fields import NAME\n"
                "if TYPE_CHECKING:\n    import nodeready.shell\n",
            }
        )
    )
    assert {name: set(room.imports) for name, room in rooms.items()} == {
        "shell": set(),
        "policy": {"shell"},
        "cli": {"policy", "shell"},
    }
    assert graph["policy.fields"] == {"shell", "policy.kinds"}
    # What is imported later, or for types, is no floor of a module.
    assert graph["cli.main"] == set()
    assert rooms["policy"].modules == 3


def test_links_to_the_top_level_are_no_rooms(package, tmp_path):
    (tmp_path / "operations").mkdir()
    (tmp_path / "operations/step.py").write_text("import nodeready.a\n")
    where = package({"a.py": "from nodeready.operations import step\n", "__main__.py": ""})
    (where / "operations").symlink_to("../operations")
    rooms, graph = draw_house.read(where)
    assert (set(rooms), graph) == ({"a"}, {"a": set()})


def test_an_import_of_a_room_further_down_is_named_with_its_file(package):
    rooms, _ = draw_house.read(package({"a/x.py": "import nodeready.b.y\n", "b/y.py": ""}))
    assert draw_house.against(rooms, ["b", "a"]) == []
    (line,) = draw_house.against(rooms, ["a", "b"])
    assert line == "nodeready/a/x.py: nodeready.b.y: a imports b, which is below it"
    assert "a: not on the list" in draw_house.against(rooms, ["b"])[0]


def test_a_floor_is_the_longest_way_down_and_a_circle_is_one_floor():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": {"e"}, "e": {"d"}, "f": set()}
    assert draw_house.floors(graph) == {"a": 3, "b": 2, "c": 1, "d": 0, "e": 0, "f": 0}


def test_an_arrow_that_a_longer_way_says_is_left_out():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert draw_house.plain(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_the_picture_has_every_room_and_is_the_same_every_time(package):
    rooms, _ = draw_house.read(
        package(
            {
                "a.py": "",
                "b.py": "import nodeready.a\n",
                "c.py": "import nodeready.b\nimport nodeready.a\n",
                "d.py": "import nodeready.c\nimport nodeready.z\n",
                "z.py": "",
            }
        )
    )
    order = ["a", "z", "b", "c", "d"]
    text = draw_house.picture(rooms, {"a": "<the & first>"}, order)
    assert text == draw_house.picture(rooms, {"a": "<the & first>"}, order)
    svg = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.fromstring(text)
    words = [element.text for element in drawn.iter(f"{svg}text")]
    assert {*order, "<the & first>"} <= set(words)
    # The page, and a box for each room; b-a, c-b, d-c and d-z: c-a goes by way of b.
    assert len(list(drawn.iter(f"{svg}rect"))) == 1 + len(order)
    assert len(drawn.findall(f"{svg}path")) == 4
    assert "| `c` | 2 | `a`, `b` |" in draw_house.table(rooms, order)


def test_the_floors_of_this_checkout_can_be_counted():
    rooms, graph = draw_house.read()
    text = draw_house.counted(rooms, graph)
    assert text.startswith(f"{len(rooms)} rooms on ")
    assert {"shell", "cli"} <= set(rooms)
    assert not {"operations", "templates"} & set(rooms)
