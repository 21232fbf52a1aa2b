"""Secrets are left out by their name and by their form; what helps to find a hang is kept."""

from __future__ import annotations

import pytest

from nodeready.text import LEFT_OUT, redact

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, f'"{SECRET}"')
            for name in ("password", "db_password", "dbPassword", "DB_PASSWD")
        ],
        *[(name, SECRET) for name in ("HF_TOKEN", "api_key", "apiKey", "x-api-key", "APIKEY")],
        *[(name, SECRET) for name in ("AWS_SECRET_ACCESS_KEY", "client_secret", "auth", "jwt")],
        ("credentials", "{'user': 'ada', 'x': 'hunter2hunter2'}"),
        ("PASSWORD", "1234567"),
        ("key", f"'{SECRET}'"),
        ("config", f'{{"api_key": "{SECRET}", "lr": 0.1}}'),
        ("config", f"{{'password': '{SECRET}"),
        ("headers", f"{{'Authorization': 'Bearer {SECRET}'}}"),
        ("url", f"postgres://ada:{SECRET}@db:5432/x"),
        ("argv", f"train.py --token {SECRET} --lr 1"),
        ("argv", f"train.py --wandb-api-key={SECRET}"),
        ("x", f"hf_{SECRET}abcdef"),
        ("x", f"ghp_{SECRET}abcdef"),
        ("x", "AKIA" + "HUNTER2HUNTER2"),
        ("x", "eyJhunter2hunter2.eyJx.y"),
        ("x", f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}"),
        ("x", "0123456789abcdefhunter2hunter2ABCDEF"),
        ("", f"wandb: password={SECRET} done"),
    ],
)
def test_a_secret_is_left_out(name, value):
    said = redact(name, value)
    assert LEFT_OUT in said
    assert "hunter2" not in said.lower()
    assert "1234567" not in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "1234"),
        ("key", "<Tensor at 0x7f0000>"),
        ("key_padding_mask", "None"),
        ("token_ids", "[1, 2, 3]"),
        ("max_tokens", "4096"),
        ("num_key_value_heads", "8"),
        ("tokenizer", '"meta-llama/Llama-3.1-8B"'),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("path", '"/data/shards/train-00017-of-01024.tar"'),
        ("run", '"llama_7b_pretrain_2026_11_22_lr_0003_final"'),
        ("batch", "{'input_ids': <Tensor at 0x7f>, 'step': 7}"),
        ("monkey", '"a"'),
        ("MASTER_ADDR", "10.0.0.1"),
        ("x", "step=7 loss=2.31 grad_norm=0.5"),
        ("", "[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88)"),
        ("url", "https://example.org/a?b=c"),
        ("nothing", ""),
    ],
)
def test_what_is_no_secret_is_kept(name, value):
    assert redact(name, value) == value


HOSTILE = ["a" * 50_000, "step=" * 30_000, "name: '" * 9_000, "--" * 50_000, "--x " * 50_000]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_long_text_without_a_secret_is_kept_whole(text):
    assert redact("x", text) == text
