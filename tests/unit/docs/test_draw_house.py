"""The picture of the rooms shows the imports as they are."""

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


def test_an_arrow_is_an_import_of_another_room(package, tmp_path):
    (tmp_path / "operations").mkdir()
    (tmp_path / "operations/step.py").write_text("import nodeready.cli\n")
    root = package(
        {
            "__main__.py": "",
            "shell.py": "import os\nfrom nodeready.operations import step\n",
            "policy/__init__.py": "",
            "policy/fields.py": "from nodeready import shell\n"
            "from nodeready.policy import kinds\n",
            "policy/kinds.py": "",
            "cli/main.py": "def f():\n    from nodeready.policy.fields import NAME\n"
            "if TYPE_CHECKING:\n    import nodeready.shell\n",
        }
    )
    # A link to the top level is no room.
    (root / "operations").symlink_to("../operations")
    rooms, graph = draw_house.read(root)
    assert {name: set(room.imports) for name, room in rooms.items()} == {
        "shell": set(),
        "policy": {"shell"},
        "cli": {"policy", "shell"},
    }
    assert rooms["policy"].modules == 3
    assert graph["policy.fields"] == {"shell", "policy.kinds"}
    # An import in a function or for types does not lift a module to a higher floor.
    assert graph["cli.main"] == set()


def test_an_import_of_a_lower_room_is_named_with_its_file(package):
    rooms, _ = draw_house.read(package({"a/x.py": "import nodeready.b.y\n", "b/y.py": ""}))
    assert draw_house.order_problems(rooms, ["b", "a"]) == []
    (line,) = draw_house.order_problems(rooms, ["a", "b"])
    assert line == "nodeready/a/x.py: nodeready.b.y: a imports b, which is below it"
    assert "a: not on the list" in draw_house.order_problems(rooms, ["b"])[0]


def test_a_floor_is_the_longest_way_down():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set(), "f": set()}
    assert draw_house.floors(graph) == {"a": 3, "b": 2, "c": 1, "d": 0, "f": 0}
    assert draw_house.cycle(graph) == []


def test_a_circle_is_named_with_its_nodes():
    assert set(draw_house.cycle({"c": {"d"}, "d": {"e"}, "e": {"d"}})) == {"d", "e"}


def test_the_picture_has_every_room_and_no_arrow_that_a_longer_way_implies(package):
    imports = {"a": "", "b": "a", "c": "b a", "d": "c z", "z": ""}
    modules = {
        f"{name}.py": "".join(f"import nodeready.{other}\n" for other in others.split())
        for name, others in imports.items()
    }
    rooms, order = draw_house.read(package(modules))[0], ["a", "z", "b", "c", "d"]
    drawn = ElementTree.fromstring(draw_house.picture(rooms, {"a": "<the & first>"}, order))
    texts = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {*order, "<the & first>"} <= texts
    # b-a, c-b, d-c and d-z: c reaches a through b.
    assert len(drawn.findall("{http://www.w3.org/2000/svg}path")) == 4
