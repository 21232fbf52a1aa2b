"""The disk of a lab node after its reset."""


def test_a_reset_leaves_nothing_of_the_old_disk(fresh_nodes):
    (node,) = fresh_nodes(1)
    node.enter(["sh", "-c", "echo old >/etc/old"])
    node.reset()
    home = node.lab.directory / "fs" / "nodes" / node.name
    assert not list(home.glob("g*/upper*/etc/old"))
    assert len(list(home.glob("g*"))) == 1
