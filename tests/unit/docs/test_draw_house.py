"""The picture of the rooms shows the imports as they are."""

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


def test_a_circle_is_named_with_its_nodes():
    assert set(draw_house.cycle({"c": {"d"}, "d": {"e"}, "e": {"d"}})) == {"d", "e"}
