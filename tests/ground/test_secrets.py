"""Passwords and tokens: written down, printed and sent nowhere, while ordinary text stays as it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import command

from resilient_train.command import incidents, status, sync
from resilient_train.command.config.compose import load
from resilient_train.ground.secrets import MASK, masked, masked_tree

MINE = ["model=custom", "model._target_=user_programs.Plain", "data=custom", "data.train._target_=user_programs.Leaky"]
MINE += ["objective=custom", "objective._target_=user_programs.mse", "accelerate.cpu=true", "data.batch_size=8"]


HIDDEN = [
    ("http://user:s3cr3t@host:5000/x", "http://user:***@host:5000/x"),
    ("https://t0ken@host https://t0ken:@github.com", "https://***@host https://***@github.com"),
    ("redis://:s3cr3t@host", "redis://:***@host"),
    ("postgresql+psycopg://me:p/w@db/mlflow", "postgresql+psycopg://me:***@db/mlflow"),
    ("http://me:p@ss@host/a@b", "http://me:***@host/a@b"),
    ("http://me:12345@host", "http://me:***@host"),
    ("http://a:b@c and http://d:e@f", "http://a:***@c and http://d:***@f"),
    ("http://host/?token=abc&row=3", "http://host/?token=***&row=3"),
    ("https://s3/x?X-Amz-Signature=abc&X-Amz-Expires=3", "https://s3/x?X-Amz-Signature=***&X-Amz-Expires=3"),
    ("host=db user=me password=a,b(c dbname=x", "host=db user=me password=*** dbname=x"),
    ('{"api_key": "k3y4me2c", "n": 3}', '{"api_key": "***", "n": 3}'),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "aws_secret_access_key = ***"),
    (f"AccountName=a;AccountKey={'aB3+' * 21}aA==;B=c", "AccountName=a;AccountKey=***;B=c"),
    ("{'Authorization': 'Basic YTpi'}", "{'Authorization': 'Basic ***'}"),
    ("['+data.train.token=hf_abcdefgh'] token: hf_abcdefgh", "['+data.train.token=***'] token: ***"),
]


@pytest.mark.parametrize(("text", "shown"), HIDDEN, ids=lambda text: text[:40])
def test_secrets_are_hidden(text: str, shown: str) -> None:
    """And what is around them stays."""
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "step 10/300  loss 2.8281  grad 0.795  lr 1.41e-03  6.4 steps/s  26 s left",
        "n_tokens=512 max_tokens=7 key_dim=64 num_key_value_heads=8 tokenizer=gpt2 pad_token=<pad> eos_token=[EOS]",
        "loss_per_token=0.31 token=5 key=value sort_key=name primary_key=id",
        "attention(query, key=embedding, token=embedding.log())",
        "http://host:5000/me@there http://127.0.0.1:5000, mail me@there",
        "git+ssh://git@github.com/me/it.git abfss://container@account.dfs.core.windows.net/path",
        "sqlite:////home/me/mlflow.db file:///x hf://datasets/me/it@main pkg://mine",
        "hf_causal_lm hf_transformerstokenizer sk-learn-and-others ghp_short eyJhbGci",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    """Metrics, code, addresses without secrets, and words that only sound like one."""
    assert masked(text) == text


@pytest.mark.parametrize("hostile", ["://a:", "@://:", "https://a", "?a=&", "password=", "sk-ant-", "eyJ-"])
@pytest.mark.timeout(20)
def test_no_text_takes_long(hostile: str) -> None:
    """Nor does one of a hundred thousand characters that somebody made for it."""
    masked(hostile * 20_000 + "@")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((name, "abc", True) for name in ("password", "dbPassword", "client_secret", "api_key", "x.APIKEY")),
        *((name, "hf_abcdefgh", True) for name in ("token", "hub_token", "accessToken")),
        *((name, "hf_abcdefgh", False) for name in ("tokenizer", "tokens", "key", "sort_key", "password_file")),
        *(("pad_token", value, False) for value in (True, None, 50256, "50256", 0.123456789, "<|endoftext|>", "[CLS]")),
        *(("password", value, False) for value in (None, True)),
        ("password", 12345, True),
    ],
)
def test_settings_are_secret_by_their_names(name: str, value: Any, expected: bool) -> None:
    """A token also by what it looks like: those of a vocabulary are none."""
    assert masked_tree({name: value}) == {name: MASK if expected else value}


def test_the_log_hides_them_from_all_who_listen(info: pytest.LogCaptureFixture) -> None:
    """In the message, its arguments and the traceback, for handlers of a user's own as well."""
    log = logging.getLogger("resilient_train")
    try:
        raise ValueError("http://me:s3cr3tpass@host")
    except ValueError:
        log.exception("it was %s", {"password": "s3cr3tpass"})
    log.info("%d of %s", 3, "http://me:s3cr3tpass@host")
    assert "s3cr3tpass" not in info.text
    assert "ValueError: http://me:***@host" in info.text
    assert "3 of http://me:***@host" in info.text


def test_a_token_makes_no_other_run(tmp_path: Path) -> None:
    """Nor does a new one: the name stays, nothing has changed, and neither is in config.yaml."""
    own = [
        "model=custom",
        "model._target_=user_programs.Plain",
        "+data.train.token={}",
        "tracking.uri=http://me:{}@host",
    ]
    one, other = (load([word.format(secret) for word in own]) for secret in ("hf_abcdefgh", "hf_ijklmnop"))
    assert one.config.data.train["token"] == "hf_abcdefgh"
    assert one.config.run.name == other.config.run.name
    (tmp_path / "config.yaml").write_text(one.yaml(tmp_path))
    assert "hf_" not in (tmp_path / "config.yaml").read_text()
    assert not other.changes(tmp_path / "config.yaml")


SECRETS = ("s3cr3tpass", "hf_inconfiguration", "sh0rt")


def found_in(place: Path, *said: str) -> list[str]:
    """Where any of them is to be read."""
    texts = {str(file): file.read_bytes() for file in place.rglob("*") if file.is_file()}
    texts |= {f"output {number}": text.encode() for number, text in enumerate(said)}
    assert len(texts) > 5
    return [f"{name}: {one}" for name, text in texts.items() for one in SECRETS if one.encode() in text]


def test_a_run_gives_no_secret_away(here: Path, run_command: command, capsys: pytest.CaptureFixture[str]) -> None:
    """In the address of MLflow, in the configuration, in what a data set says: grep finds none."""
    what = [*MINE, "+data.train.token=hf_inconfiguration", "tracking.uri=http://user:s3cr3tpass@127.0.0.1:1/"]
    what += ["tracking.drain_s=0.1", "run.name=leaky", "checkpoint.disk.every=10", "checkpoint.verify_after=2"]

    done = run_command([*what, "run.steps=30", "drill=nan_grad"])
    assert done.code == 0, done.stderr
    assert "s3://reader:***@bucket/rows?token=***" in done.stdout, "of the rows that cannot be fetched"
    assert "MLflow at http://user:***@127.0.0.1:1/" in done.stdout

    failed = run_command([*what, "run.steps=60", "tracking=none", "objective._target_=user_programs.leaks"])
    assert failed.code == 1
    assert "postgresql://writer:***@db/losses" in failed.stderr
    assert "cannot log in: password=***" in Path("runs/leaky/train.log").read_text()

    for door in (incidents, status, sync):
        door.main(["runs/leaky"])
    asked = capsys.readouterr()
    assert "row=3" in asked.out
    said = [one for outcome in (done, failed) for one in (outcome.stdout, outcome.stderr)]
    assert not found_in(here, *said, asked.out, asked.err)


def test_a_sweep_gives_no_secret_away(here: Path, run_command: command) -> None:
    """Neither on the terminal nor in the file that Hydra writes about it."""
    own = [*MINE, "tracking=none", "tracking.uri=http://user:sh0rt@host", "+data.train.token=hf_inconfiguration"]
    outcome = run_command(["--multirun", *own, "run.steps=1", "run.seed=0", "data.train._target_=user_programs.Given"])
    assert outcome.code == 0, outcome.stderr
    (file,) = (here / "runs/sweeps").glob("*/multirun.yaml")
    told = yaml.safe_load(file.read_text())
    assert told["tracking"]["uri"] == "http://user:***@host"
    assert "+data.train.token=***" in told["hydra"]["overrides"]["task"]
    assert not found_in(here, outcome.stdout, outcome.stderr)


def test_a_mistake_is_not_answered_with_secrets(run_command: command) -> None:
    """Hydra would print all overrides as they are. (It does so where it is asked to, by `--cfg`.)"""
    secret = ["tracking.uri=http://user:s3cr3tpass@host", "+data.train.token=hf_inconfiguration"]
    outcome = run_command(["run.steps=${oc.env:NOPE}", *secret])
    assert outcome.code == 2
    assert "'NOPE' not found\" full_key: run.steps" in outcome.stdout + outcome.stderr
    assert not [one for one in SECRETS if one in outcome.stdout + outcome.stderr]
