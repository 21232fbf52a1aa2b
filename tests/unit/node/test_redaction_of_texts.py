"""What is kept or shown of a user's words has no secret in it, and is otherwise as it was."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest

from nodeready.text import LEFT_OUT, redact, redacted

S = "s3cr3tvalue"

#: Each holds a secret; what is left of it.
SECRETS = {
    f"HF_TOKEN={S}": "HF_TOKEN=(left out)",
    f"python train.py --password {S} --lr 3": "python train.py --password (left out) --lr 3",
    f"train --api-key={S} --epochs 2": "train --api-key=(left out) --epochs 2",
    f"train --hf-token {S}": "train --hf-token (left out)",
    f"https://bob:{S}@host/data?x=1": "https://(left out)@host/data?x=1",
    f"git clone https://{S}@github.com/a/b": "git clone https://(left out)@github.com/a/b",
    f"Authorization: Bearer {S}": "Authorization: Bearer (left out)",
    f"authorization: Basic {S}": "authorization: Basic (left out)",
    f"'api_key': '{S}', 'lr': 3": "'api_key': '(left out)', 'lr': 3",
    f'{{"password": "{S}", "n": 1}}': '{"password": "(left out)", "n": 1}',
    f"main: token = '{S}'": "main: token = '(left out)'",
    f"db.password={S}": "db.password=(left out)",
    f"PGPASSWORD={S} psql": "PGPASSWORD=(left out) psql",
    f"export DB_PASS='{S} and more'": "export DB_PASS='(left out)'",
    f"AWS_SECRET_ACCESS_KEY={S}": "AWS_SECRET_ACCESS_KEY=(left out)",
    f"AWS_SESSION_TOKEN={S}": "AWS_SESSION_TOKEN=(left out)",
    f"WANDB_API_KEY={S}": "WANDB_API_KEY=(left out)",
    f"KAGGLE_KEY={S}": "KAGGLE_KEY=(left out)",
    f"GITHUB_PAT={S}": "GITHUB_PAT=(left out)",
    f"s3://b/k?X-Amz-Signature={S}&x=1": "s3://b/k?X-Amz-Signature=(left out)&x=1",
    f"SENTRY_DSN=https://{S}.ingest.io/1": "SENTRY_DSN=(left out)",
    f"Cookie: {S}": "Cookie: (left out)",
    f"curl -H 'Authorization: token {S}'": "curl -H 'Authorization: token (left out)'",
    "loading with hf_abcdefghijABCDEFGHIJ01": "loading with (left out)",
    "AKIAIOSFODNN7EXAMPLE": "(left out)",
    "x ghp_16C7e42F292c6912E7710c838347Ae178B4a y": "x (left out) y",
    "github_pat_11ABCDEFG0abcdefghij": "(left out)",
    "glpat-abcdefghij0123456789": "(left out)",
    "xoxb-1234567890-abcdefghij": "(left out)",
    "sk-proj-abcdefghijklmnopqrst": "(left out)",
    "nvapi-abcdefghijklmnopqrst": "(left out)",
    "AIzaSyA-abcdefghijklmnopqrstuvw": "(left out)",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def": "(left out)",
    f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n-----END RSA PRIVATE KEY-----": "(left out)",
    f"-----BEGIN PRIVATE KEY-----\n{S}": "(left out)",
}

#: What training jobs, compilers and stacks say, which is no secret.
OTHERS = (
    "RANK=3 WORLD_SIZE=8 MASTER_PORT=29500 python train.py --lr 1e-3",
    "num_tokens=2048 tokens: 512 max_new_tokens=5 token_id=7",
    "hf_hub_download (huggingface_hub/file_download.py:3)",
    "get_token (auth.py:4)",
    "compute_keys pthread_key_create key: value",
    "KeyError: 'loss'",
    "step 100 passed: 3, passes=3, compass: 3",
    "author: bob, design: new, assign: 3",
    "basic block 3 of 4",
    "git@github.com:a/b.git",
    "/etc/ssh/ssh_host_key",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI",
    "attention_mask=None",
    "",
)


@pytest.mark.parametrize(("text", "left"), SECRETS.items())
def test_a_secret_is_known_by_its_name_its_form_or_its_place(text, left):
    assert redact("", text) == left
    assert redact("", left) == left


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_no_secret_stays(text):
    assert redact("", text) == text


@pytest.mark.parametrize(
    "text",
    [
        "a_" * 20_000 + "=x",
        "token " * 10_000,
        "https://" + "a" * 60_000,
        "-----BEGIN PRIVATE KEY-----" * 2000,
        "pass-" * 10_000,
        "'" * 60_000 + "token",
        "token='" + "\\" * 60_000,
        "eyJ" * 20_000,
    ],
    ids=lambda text: text[:12],
)
def test_no_text_makes_it_slow(text):
    """Each of these would take hours where one repetition is inside of another."""
    assert len(redact("", text)) < 100_000


class Frame(NamedTuple):
    function: str
    line: int


@dataclasses.dataclass(frozen=True)
class Process:
    command: str
    frames: tuple[Frame, ...]
    told: dict[str, object]
    rank: int | None = None


def test_a_document_keeps_its_shape():
    found = redacted(
        Process(
            f"train --token {S}",
            (Frame(f"password={S}", 3),),
            {"api_key": S, "lr": 0.1, "env": [f"HF_TOKEN={S}", None, 7]},
            3,
        )
    )
    assert found == Process(
        "train --token (left out)",
        (Frame("password=(left out)", 3),),
        {"api_key": LEFT_OUT, "lr": 0.1, "env": ["HF_TOKEN=(left out)", None, 7]},
        3,
    )


def test_a_private_key_in_lines_of_its_own_has_no_line_left():
    lines = [
        "loading",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        S,
        f"{S}=",
        "-----END OPENSSH PRIVATE KEY-----",
        "step 1",
    ]
    assert redacted(lines) == ["loading", *[LEFT_OUT] * 4, "step 1"]


def test_a_text_grows_no_longer_than_a_trace_can_hold():
    assert len(redacted("a" * 4080 + " token=abc")) <= 4096
