"""The attackers are what the attacks take them for: ordinary users without a right of root's."""


def test_mallory_is_nobody_special(fresh_node, mallory, bob):
    assert mallory.run("id").stdout == "uid=4001(mallory) gid=4001(mallory) groups=4001(mallory)\n"
    assert mallory.run("cat /etc/shadow", check=False).returncode
    assert mallory.run("kill -0 1 2>&1", check=False).returncode
    secret = f"{bob.home}/secret"
    bob.run("umask 077; echo s3cr3t >secret")
    assert mallory.run('cat "$1"', secret, check=False).returncode
    hers = mallory.start("sleep", "600")
    assert hers.poll() is None
    mallory.run('echo "$HOME" >own')
    file = fresh_node.testinfra().file(f"{mallory.home}/own")
    assert (file.content_string, file.user) == ("/home/mallory\n", "mallory")
