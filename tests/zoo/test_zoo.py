"""The zoo: models that learn, data that stays the same, objectives that refuse what they cannot mean."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader

from resilient_train.ground import files
from resilient_train.zoo.data import digits, python_source, synthetic
from resilient_train.zoo.hf import hf_causal_lm, hf_dataset
from resilient_train.zoo.models import GPT, ResNet
from resilient_train.zoo.objectives import classification, language_model, model_loss, regression

CONF = files.conf()


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def gpt() -> GPT:
    return GPT(vocab_size=32, context=64, layers=2, heads=2, width=32)


def test_gpt_never_looks_ahead() -> None:
    """Changing a token leaves all earlier logits as they were and changes the later ones."""
    model, ids = gpt(), torch.randint(32, (2, 20))
    changed = ids.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 32
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert (before[:, 12:] != after[:, 12:]).any(-1).all()


def test_digits_are_split_without_overlap_or_loss() -> None:
    """The two splits together are the 1,797 digits, each once; a row is (float image in 0..1, label)."""
    image, label = digits()[7]
    assert (image.shape, image.dtype, label.dtype) == ((1, 8, 8), torch.float32, torch.long)
    assert 0 <= image.min() < image.max() <= 1
    splits = [digits(split).tensors[0] for split in ("train", "eval")]
    assert [len(split) for split in splits] == [1438, 359]
    assert len(torch.cat(splits).unique(dim=0)) == 1797  # type: ignore[no-untyped-call]


def test_python_source_predicts_every_token_once_and_splits_share_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row begins with the last token of the one before it."""
    data = python_source(context=50, max_bytes=10_000)
    assert len(data) == 9_999 // 50
    assert data[0][0][-1] == data[1][0][0]
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for i in range(60):
        (tmp_path / f"{i}.py").write_text(f"word{i}\n")

    def names(split: str) -> set[str]:
        data = python_source(split, context=1)
        return set(bytes(data.tensors[0][:, 0].tolist()).decode().split())

    train, held_out = names("train"), names("eval")
    assert train | held_out == {f"word{i}" for i in range(60)}
    assert not train & held_out


def test_synthetic_rows_depend_on_seed_split_and_index_alone() -> None:
    def rows(**changed: Any) -> str:
        data = synthetic(**{"rows": 20} | changed)
        return str([data[index] for index in range(20)])

    assert rows() == rows(rows=1000)
    assert len({rows(), rows(split="eval"), rows(seed=1)}) == 3


@pytest.mark.parametrize("targets", [("pixel_values", "labels"), ("inputs", "label"), ("x", "y"), ("image", "target")])
def test_classification_and_regression_read_pairs_and_mappings(targets: tuple[str, str]) -> None:
    """(x, y), and any of the usual names, give the same loss; [batch] and [batch, 1] are the same."""
    net, x = nn.Linear(3, 4), torch.rand(5, 3)
    labels = torch.randint(4, (5,))
    loss, metrics = classification(net, (x, labels))
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(net(x), labels).item())
    assert metrics["accuracy"].item() == (net(x).argmax(1) == labels).float().mean().item()
    assert classification(net, dict(zip(targets, (x, labels), strict=True)))[0] == loss
    assert classification(lambda x: SimpleNamespace(logits=net(x)), [x, labels])[0] == loss
    assert classification(net, (x, labels), label_smoothing=0.1)[0] != loss
    line, y = nn.Linear(3, 1), torch.rand(5)
    loss, metrics = regression(line, (x, y))
    assert loss.item() == pytest.approx((line(x)[:, 0] - y).square().mean().item())
    assert metrics["mae"].item() == pytest.approx((line(x)[:, 0] - y).abs().mean().item())
    assert regression(line, dict(zip(targets, (x, y[:, None]), strict=True)))[0] == loss


def test_language_model_predicts_the_next_token() -> None:
    """Ids alone, in a tuple or in a mapping, mean the same; masked positions are no targets, nor need there be any."""
    model, ids = gpt(), torch.randint(32, (3, 10))
    by_hand = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
    for batch in (ids, (ids,), {"input_ids": ids}, {"input_ids": ids, "labels": ids}):
        assert language_model(model, batch)[0].item() == pytest.approx(by_hand.mean().item(), rel=1e-5)
    mask = (torch.arange(10) < 6).long().expand_as(ids)
    for more in ({"attention_mask": mask}, {"labels": ids.masked_fill(mask == 0, -100)}):
        loss, _ = language_model(model, {"input_ids": ids, **more})
        assert loss.item() == pytest.approx(by_hand[:, :5].mean().item(), rel=1e-5)
    assert language_model(model, {"input_ids": ids, "labels": torch.full_like(ids, -100)})[0] == 0


LOSS = torch.tensor(2.0)


@pytest.mark.parametrize("output", [SimpleNamespace(loss=LOSS), {"loss": LOSS}, (LOSS, "more"), LOSS])
def test_model_loss_takes_the_loss_in_any_form(output: Any) -> None:
    """An attribute, a key, the first of a tuple, a bare tensor; a mapping is spread over the model's arguments."""
    assert model_loss(lambda *, x: output, {"x": 1})[0] == 2
    assert model_loss(lambda x, y: output, (1, 2))[0] == 2


IDS, X = torch.zeros(2, 4).long(), torch.rand(2, 3)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: ResNet(depth=19), r"depth must be 6n\+2 .*, got 19"),
        (lambda: digits("test"), "split must be train or eval, got 'test'"),
        (lambda: language_model(gpt(), X), "needs integer token ids .*, got torch.float32 of shape .2, 3."),
        (lambda: language_model(gpt(), {"text": "a"}), "needs a batch with input_ids, got text"),
        (
            lambda: language_model(gpt(), {"input_ids": IDS, "labels": IDS[:, 1:]}),
            r"ids' shape \[2, 4\], got .* \[2, 3\]",
        ),
        (lambda: classification(gpt(), (X, torch.rand(2))), "integer class labels, got torch.float32 of shape"),
        (lambda: classification(gpt(), X), "needs a batch \\(inputs, targets\\) or a mapping, got torch.float32"),
        (lambda: classification(lambda x: (x,), (X, IDS[:, 0])), "from the model, got a tuple"),
        (
            lambda: regression(nn.Linear(3, 2), (X, torch.rand(2))),
            r"targets' shape \[2\], got torch.float32 .* \[2, 2\]",
        ),
        (lambda: model_loss(lambda **_: {"logits": 1}, {"input_ids": 1}), "one loss from .* got a dict"),
        (lambda: hf_causal_lm("gpt2", n_layrs=2), "model type gpt2 has no field n_layrs"),
    ],
)
def test_each_says_what_is_wrong(build: Callable[[], Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        build()


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network and no cache outside the test's folder, whether or not the packages are loaded already."""
    for variable in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def test_hf_causal_lm_builds_saves_and_loads(offline: Path) -> None:
    """Random weights by model type; the same architecture, or the same weights too, from a saved folder."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    model = hf_causal_lm("llama", **sizes, intermediate_size=64, num_key_value_heads=1)
    model.to(torch.bfloat16).save_pretrained(offline / "saved")  # type: ignore[operator]
    folder = str(offline / "saved")
    fresh, loaded = hf_causal_lm(folder), hf_causal_lm(folder, pretrained=True)
    assert loaded.training
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    saved = model.float().state_dict()
    assert all(torch.equal(weight, saved[name]) for name, weight in loaded.state_dict().items())
    assert not torch.equal(next(fresh.parameters()), next(loaded.parameters()))


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": [2 * value for value in row["x"]]}


def test_hf_dataset_reads_local_files(offline: Path) -> None:
    """Rows come as tensors, with the columns asked for, after the transform; also as a stream."""
    rows = [{"x": [float(i), 0.5], "y": i % 3, "note": f"row {i}"} for i in range(10)]
    (offline / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source: dict[str, Any] = {"path": "json", "data_files": str(offline / "rows.jsonl")}
    chosen = hf_dataset(["twice", "y"], f"{__name__}.double", **source, split="train[:4]")
    [batch] = DataLoader(chosen, batch_size=4)
    assert batch["twice"].tolist() == [[2.0 * i, 1.0] for i in range(4)]
    assert batch.keys() == {"twice", "y"}
    stream = hf_dataset(["y", "twice"], double, **source, split="train", streaming=True)
    assert [row["twice"][0].item() / 2 for row in stream] == list(range(10))
    with pytest.raises(ValueError, match=r"has the splits train: pass split=\.\.\. to choose one"):
        hf_dataset(**source)


@pytest.mark.parametrize(
    ("model", "data", "objective", "parameters"),
    [
        ("mlp", "digits", "classification", 26_122),
        ("mlp", "synthetic", "classification", 26_122),
        ("resnet", "digits", "classification", 272_186),
        ("gpt", "python_source", "language_model", 858_880),
    ],
)
def test_the_options_fit_together(model: str, data: str, objective: str, parameters: int) -> None:
    groups = {"model": model, "data": data, "objective": objective}
    config = OmegaConf.create({group: OmegaConf.load(CONF / group / f"{name}.yaml") for group, name in groups.items()})
    net = instantiate(config.model, _convert_="all")
    assert sum(weight.numel() for weight in net.parameters()) == parameters
    for split in (config.data.train, config.data.eval):
        batch = next(iter(DataLoader(instantiate(split, _convert_="all"), config.data.batch_size)))
        loss, _ = instantiate(config.objective, _convert_="all")(net, batch)
        loss.backward()
        assert loss.item() > 0
