"""Where the node's policy comes from; a broken file is reported in one line."""

import pytest

from nodeready.agent.gate import here
from nodeready.core.policy import Policy, PolicyError
from tests.cases import cases


@pytest.fixture
def site(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    monkeypatch.setattr(here, "PATH", str(path))
    return path


def test_a_given_file_then_the_site_then_the_bundle_then_the_defaults(site, tmp_path, monkeypatch):
    assert here.load() == Policy()
    embedded = b'{"gpu_count": 8, "swap": "off", "shm_min_mb": 1}'
    monkeypatch.setattr(here, "_embedded", lambda: embedded)
    site.write_text('{"swap": "any", "shm_min_mb": 2}')
    given = tmp_path / "given.json"
    given.write_text('{"shm_min_mb": 3}')
    assert here.load(str(given)) == Policy(gpu_count=8, swap="any", shm_min_mb=3)
    assert here.load() == Policy(gpu_count=8, swap="any", shm_min_mb=2)
    for path, why in ((tmp_path / "no", "there is no such file"), (tmp_path, "Is a directory")):
        with pytest.raises(PolicyError, match=why):
            here.load(str(path))


@pytest.mark.parametrize("case", cases(__file__, "data/policies.json"))
def test_a_broken_policy_is_one_line_with_its_file(case, site):
    site.write_bytes(case["text"].encode("utf-8", "surrogatepass"))
    with pytest.raises(PolicyError) as caught:
        here.load()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{site}: ")
    assert case["why"] in problem
    assert "\n" not in problem
