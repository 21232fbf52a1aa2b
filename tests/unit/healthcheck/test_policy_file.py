"""Where the node's policy comes from, and what a broken one costs: a line."""

from __future__ import annotations

import pytest

from nodeready.healthcheck import here
from nodeready.policy import Policy
from nodeready.policy.policy import PolicyError


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The site's file of this machine."""
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("\ud800", "is no JSON"),
        ("[]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ('{"gpu_count": "8"}', "gpu_count = '8': must be a whole number"),
        ('{"gpu_count": true}', "must be a whole number"),
        ('{"gpu_cuont": 8}', "unknown setting gpu_cuont: did you mean gpu_count?"),
        ('{"something": 8}', "unknown setting something: there is no such setting"),
        ('{"core_pattern": "/x/$(id)/../core"}', "must not contain"),
        ('{"pdshrc_activate": "a\\nb"}', "one line"),
        ('{"waivers": {"x": 1}}', "no check id"),
    ],
)
def test_what_is_no_policy_is_one_line_with_its_file(text, said, site):
    site.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(PolicyError) as caught:
        here.load()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{site}: ")
    assert said in problem
    assert "\n" not in problem


def test_a_given_file_has_to_be_there_and_to_be_a_file(site, tmp_path):
    for path, said in ((tmp_path / "no", "there is no such file"), (tmp_path, "Is a directory")):
        with pytest.raises(PolicyError, match=said):
            here.load(str(path))
