"""The inputs of `attacks.py` about what leaves a run: words with secrets in them, and what goes to MLflow."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from attacks_inputs import DAMAGES, Attack
from attacks_place import Place, Said, text_of

# ------------------------------------------------------------------------------------------------------------- secrets


def said_aloud(secret: str, said: str = "%s", **environment: Any) -> Attack:
    """Rows and the objective raise errors that hold a secret: neither file nor terminal shows it, nor do the verbs."""

    def attack(place: Place) -> None:
        place.secrets.append(secret)
        words = ["data.train._target_=attacks_programs.OddRows", "~data.train.token", "+data.train.what=says"]
        text = said.replace("%s", secret)
        said_so = place.train(
            *words, "objective=custom", "objective._target_=attacks_programs.says", ATTACK_SAYS=text, **environment
        )
        if said_so.code != 1 or not said_so.errors:
            place.fails(f"the run was to fail with its own words: {said_so.code} {said_so.last}")
        place.asked()

    return attack


def in_the_code(place: Place) -> None:
    """A line of code holds a key, and is patched."""
    place.secrets.append("Pq8-canary-Zx3Wv6")
    said = place.train("objective=custom", "objective._target_=attacks_programs.rooted", "run.steps=60")
    if '"remedy": "armor"' not in text_of(place.run_dir / "incidents.jsonl"):
        place.fails(f"the line was not patched: {said.code} {said.last}")
    place.asked()


HEX = "0123456789abcdefABCDEFGHIJKLMNOPQRSTUVWXYZghijklmnopqrstuvwxyz"


def made(prefix: str, length: int, letters: str = HEX) -> str:
    """Something that looks like a token."""
    return prefix + "".join(random.Random(prefix + str(length)).choices(letters, k=length))


BY_NAME = {
    "HF_TOKEN": made("hf_", 34),
    "AWS_SECRET_ACCESS_KEY": made("", 40),
    "DB_PASSWORD": "trustnoone",
    "PIN_PASSWORD": "20240131",
    "MY_PASSPHRASE": "correct horse battery",
    "WANDB_API_KEY": made("", 40, "0123456789abcdef"),
    "OPENAI_API_KEY": made("sk-proj-", 40),
    "SERVICE_SECRET": "p$\\w'\"<&>+/=\u00fc",
    "GH_PASSWD": "opensesame",
}
BY_LOOK = {
    "user and password in an address": (made("", 12), "postgresql://writer:%s@db.example/losses"),
    "a token in an address": (made("", 20), "https://%s@git.example/x.git"),
    "a query": (made("", 16), "https://s3.example/rows?X-Amz-Signature=%s&part=3"),
    "password=": (made("", 12), "host=db user=me password=%s dbname=x"),
    "AccountKey=": (made("", 44) + "==", "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=%s;Suffix=x"),
    "aws_secret_access_key=": (made("", 40), "aws_secret_access_key=%s"),
    "api_key=''": (made("", 24), "Client(api_key='%s', retries=3)"),
    "JSON": (made("", 24), '{"client_secret": "%s", "n": 3}'),
}
SECRETS: dict[str, Attack] = {name: said_aloud(value, **{name: value}) for name, value in BY_NAME.items()}
SECRETS |= {what: said_aloud(secret, said) for what, (secret, said) in BY_LOOK.items()}
SECRETS |= {"a key in a line that is patched": in_the_code}


# ------------------------------------------------------------------------------------------------------------ delivery


class Server:
    """Answers on this machine: with what it is told, and keeps what was sent along."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.heard: list[str] = []
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                own.heard.append(str(self.headers))
                with contextlib.suppress(OSError):
                    answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}"


@contextlib.contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
        thread.join()


def answers(code: int, content: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def synced(place: Place, *words: str, run: str = "run", **environment: Any) -> Said:
    """Deliver: it takes MLflow some seconds to be imported, and a refused address some more."""
    around = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "3", **environment}
    return place.verb("sync", run, *words, limit_s=150.0, **around)


def rows_in(database: Path) -> dict[str, list[tuple[Any, ...]]]:
    with contextlib.closing(sqlite3.connect(database)) as opened:
        found: dict[str, list[tuple[Any, ...]]] = {}
        for run, *row in opened.execute("select run_uuid, key, step, value from metrics order by key, step"):
            found.setdefault(run, []).append(tuple(row))
        return found


def database(place: Place) -> None:
    """A database that holds the run already: to make one takes MLflow longer than all the rest."""
    kept = place.prepared / "mlflow.db"
    if not kept.exists():
        place.copy("first", of="mlflow")
        synced(place, "--uri=sqlite:///mlflow.db", run="first")
        (place.path / "mlflow.db").rename(kept)
    shutil.copy(kept, place.path / "mlflow.db")


def delivered(harm: Callable[[Place], object], *, before: bool = False) -> Attack:
    """After the harm, which may come when all is delivered, it is there once, or what is not is told."""

    def attack(place: Place) -> None:
        place.copy(of="mlflow")
        database(place)
        (rows,) = rows_in(place.path / "mlflow.db").values()
        words = ("--uri=sqlite:///mlflow.db", "--experiment=x")
        if before:
            synced(place, *words)
        harm(place)
        said = synced(place, *words)
        if said.code == 0 and "damaged" not in said.text and "left" not in said.text.partition("nothing was left")[2]:
            runs = list(rows_in(place.path / "mlflow.db").values())
            if len(runs) != 2 or any(sorted(one) != sorted(rows) for one in runs):
                place.fails(f"{len(runs) - 1} runs, with rows {[*map(len, runs)]}, and sync says nothing: {said.last}")
        if said.code and len(said.text.strip().splitlines()) > 3:
            place.fails(f"many lines: {said.last}")

    return attack


def harmed(name: str, how: str) -> Callable[[Place], object]:
    def harm(place: Place) -> None:
        DAMAGES[how](place.run_dir / name)

    return harm


def sent_to(answer: Callable[[BaseHTTPRequestHandler], None]) -> Attack:
    def attack(place: Place) -> None:
        place.copy(of="mlflow")
        with served(answer) as server:
            said = synced(place, f"--uri={server.uri}")
        if said.code == 0:
            place.fails(f"says that all is delivered: {said.last}")

    return attack


def credentials_of_mine(place: Place) -> None:
    """A stranger's directory names an address: nobody's credentials go there."""
    secrets = ("canary-user-5", "canary-word-7")
    (place.path / "home/.mlflow").mkdir()
    text = f"[mlflow]\nmlflow_tracking_username = {secrets[0]}\nmlflow_tracking_password = {secrets[1]}\n"
    (place.path / "home/.mlflow/credentials").write_text(text)
    with served(answers(500, b"{}")) as server:
        place.train(
            "tracking=mlflow", f"tracking.uri={server.uri}", "tracking.drain_s=0", "run.steps=10", HOME="/nonexistent"
        )
        server.heard.clear()
        synced(place)
        if "Authorization: Basic" in "".join(server.heard):
            place.fails("sends credentials to an address that only the directory names")


def copied(place: Place) -> None:
    """A copy of a run directory is a run of its own in MLflow."""
    place.copy(of="mlflow")
    database(place)
    said = [synced(place, "--uri=sqlite:///mlflow.db")]
    shutil.copytree(place.run_dir, place.path / "run-copy")
    uri = f"tracking.uri=sqlite:///{place.path}/mlflow.db"
    said.append(place.train("run.dir=run-copy", "tracking=mlflow", uri, "tracking.drain_s=60"))
    said.append(synced(place, "--uri=sqlite:///mlflow.db", run="run-copy"))
    ids = {json.loads((place.path / run / "mlflow.json").read_text())["run_id"] for run in ("run", "run-copy")}
    if any(one.code for one in said):
        place.fails(f"ended with {[one.code for one in said]}: {said[-1].last}")
    if len(ids) != 2:
        place.fails("a copied directory delivers into the run of the first")


def refused_address(uri: str) -> Attack:
    def attack(place: Place) -> None:
        place.copy(of="mlflow")
        said = synced(place, f"--uri={uri}")
        if said.code not in (1, 2) or len(said.text.strip().splitlines()) > 2:
            place.fails(f"ended with {said.code}: {said.last}")

    return attack


DELIVERY: dict[str, Attack] = {"nothing done to it": delivered(lambda place: None)}
DELIVERY |= {
    f"{name} {how}": delivered(harmed(name, how), before=name == "mlflow.json")
    for name in ("outbox.jsonl", "mlflow.json")
    for how in DAMAGES
    if "link" not in how and "another" not in how
}
DELIVERY |= {
    f"the address {uri}": refused_address(uri) for uri in ("gopher://x", "sqlite:////proc/x.db", "http://[::1")
}
DELIVERY |= {
    "a server that is not there": refused_address("http://127.0.0.1:9"),
    "a server that answers garbage": sent_to(answers(200, b"\x00<html>" + b"x" * 10_000)),
    "a server that answers 500": sent_to(answers(500, b"no")),
    "a server that never answers": sent_to(lambda handler: time.sleep(20)),
    "credentials of mine": credentials_of_mine,
    "a copied run directory": copied,
}
