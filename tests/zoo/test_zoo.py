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
TINY: dict[str, Any] = {"vocab_size": 32, "context": 64, "layers": 1, "heads": 2, "width": 32}


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def size(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def test_gpt_never_looks_ahead() -> None:
    """Changing a token leaves all earlier logits as they were and changes the later ones. Dropout is for training."""
    model = GPT(**TINY | {"layers": 3}, dropout=0.2)
    ids = torch.randint(32, (2, 20))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
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
    """A row begins with the last token of the one before it; a file moves to no other split when files are added."""
    data = python_source(context=50, max_bytes=10_000)
    assert len(data) == 9_999 // 50
    assert data[0]["input_ids"][-1] == data[1]["input_ids"][0]
    with pytest.raises(IndexError):
        data[len(data)]

    def names(split: str) -> set[str]:
        data = python_source(split, context=1)
        rows = [data[index]["input_ids"][:1] for index in range(len(data))]
        return set(bytes(torch.cat(rows).tolist()).decode().split())

    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "x.py").write_text("foreign\n")
    for i in range(60):
        (tmp_path / f"{i}.py").write_text(f"word{i}\n")
    train, held_out = names("train"), names("eval")
    assert train | held_out == {f"word{i}" for i in range(60)}
    assert not train & held_out
    assert 0 < len(held_out) < 20
    for i in range(60, 120):
        (tmp_path / f"{i}.py").write_text(f"word{i}\n")
    assert train < names("train")
    assert held_out < names("eval")


@pytest.mark.parametrize("kind", ["classification", "regression", "tokens"])
def test_synthetic_rows_depend_on_seed_split_and_index_alone(kind: str) -> None:
    def rows(**changed: Any) -> str:
        data = synthetic(kind, **{"rows": 20} | changed)
        return str([data[index] for index in range(20)])

    assert rows() == rows(rows=1000)
    assert len({rows(), rows(split="eval"), rows(seed=1)}) == 3


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: GPT(width=100, heads=3), "width must be a multiple of heads, got width=100 and heads=3"),
        (lambda: ResNet(depth=19), r"depth must be 6n\+2 .*, got 19"),
        (lambda: digits("test"), "split must be train or eval, got 'test'"),
        (lambda: python_source(max_bytes=100), "100 tokens of train text hold no row of 129: raise max_bytes"),
        (lambda: synthetic("images"), "kind must be classification, regression or tokens, got 'images'"),
    ],
)
def test_models_and_data_say_what_is_wrong(build: Callable[[], Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        build()


def test_classification_reads_pairs_and_mappings() -> None:
    """(x, y), and any of the usual names, give the same loss; the accuracy is a detached tensor."""
    model = nn.Linear(3, 4)
    x, y = torch.rand(5, 3), torch.randint(4, (5,))
    loss, metrics = classification(model, (x, y))
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(model(x), y).item())
    assert metrics["accuracy"].item() == (model(x).argmax(1) == y).float().mean().item()
    assert not metrics["accuracy"].requires_grad
    for inputs, labels in (("pixel_values", "labels"), ("inputs", "label"), ("x", "y"), ("image", "label")):
        assert classification(model, {inputs: x, labels: y})[0] == loss
    assert classification(lambda x: SimpleNamespace(logits=model(x)), [x, y])[0] == loss
    assert classification(model, (x, y), label_smoothing=0.1)[0] != loss


def test_regression_does_not_broadcast() -> None:
    """[batch] and [batch, 1] are the same; a shape that would broadcast to [batch, batch] is refused."""
    x, y = torch.rand(5, 3), torch.rand(5)
    model = nn.Linear(3, 1)
    loss, metrics = regression(model, (x, y))
    assert loss.item() == pytest.approx((model(x)[:, 0] - y).square().mean().item())
    assert metrics["mae"].item() == pytest.approx((model(x)[:, 0] - y).abs().mean().item())
    assert regression(model, {"x": x, "y": y[:, None]})[0] == loss
    with pytest.raises(ValueError, match=r"targets' shape \[5\], got torch.float32 of shape \[5, 2\]"):
        regression(nn.Linear(3, 2), (x, y))


def test_language_model_predicts_the_next_token() -> None:
    """Ids alone, in a tuple or in a mapping, mean the same; masked positions are no targets, nor need there be any."""
    model = GPT(**TINY)
    ids = torch.randint(32, (3, 10))
    loss, _ = language_model(model, ids)
    by_hand = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
    assert loss.item() == pytest.approx(by_hand.mean().item(), rel=1e-5)
    assert language_model(model, (ids,))[0] == language_model(model, {"input_ids": ids})[0] == loss
    assert language_model(model, {"input_ids": ids, "labels": ids})[0] == loss

    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    masked = language_model(model, {"input_ids": ids, "attention_mask": mask})[0]
    assert masked.item() == pytest.approx(by_hand[:, :5].mean().item(), rel=1e-5)
    assert language_model(model, {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)})[0] == masked

    nothing, _ = language_model(model, {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    nothing.backward()  # type: ignore[no-untyped-call]
    assert nothing.item() == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


LOSS = torch.tensor(2.0)


@pytest.mark.parametrize("output", [SimpleNamespace(loss=LOSS), {"loss": LOSS}, (LOSS, "more"), LOSS])
def test_model_loss_takes_the_loss_in_any_form(output: Any) -> None:
    """An attribute, a key, the first of a tuple, a bare tensor; a mapping is spread over the model's arguments."""
    assert model_loss(lambda *, x: output, {"x": 1})[0] == 2
    assert model_loss(lambda x, y: output, (1, 2))[0] == 2


IDS = torch.zeros(2, 4).long()


@pytest.mark.parametrize(
    ("objective", "model", "batch", "error"),
    [
        (language_model, None, torch.rand(2, 8), "needs integer token ids .*, got torch.float32 of shape .2, 8."),
        (language_model, None, {"text": "a"}, "needs a batch with input_ids, got text"),
        (language_model, None, {"input_ids": IDS, "labels": IDS[:, 1:]}, r"ids' shape \[2, 4\], got .* \[2, 3\]"),
        (classification, None, (torch.rand(2, 3), torch.rand(2)), "integer class labels, got torch.float32 of shape"),
        (classification, None, torch.rand(2, 3), "needs a batch \\(inputs, targets\\) or a mapping, got torch.float32"),
        (classification, lambda x: (x,), (torch.rand(2, 3), IDS[:, 0]), "from the model, got a tuple"),
        (model_loss, lambda **_: {"logits": 1}, {"input_ids": 1}, "one loss from .* got a dict"),
    ],
)
def test_objectives_say_what_is_wrong(objective: Any, model: Any, batch: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        objective(model, batch)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network and no cache outside the test's folder, whether or not the packages are loaded already."""
    for variable in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def test_hf_causal_lm_builds_saves_and_loads(offline: Path) -> None:
    """Random weights by model type; the same architecture, or the same weights too, from a saved folder."""
    ids = torch.randint(64, (2, 12))
    batch = {"input_ids": ids, "labels": ids}
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    model = hf_causal_lm("llama", **sizes, intermediate_size=64, num_key_value_heads=1)
    assert size(model) < 50_000
    model.eval()
    loss, _ = model_loss(model, batch)
    assert loss.item() == pytest.approx(language_model(model, batch)[0].item(), rel=1e-4)

    model.to(torch.bfloat16).save_pretrained(offline / "saved")  # type: ignore[operator]
    folder = str(offline / "saved")
    fresh, loaded = hf_causal_lm(folder), hf_causal_lm(folder, pretrained=True)
    assert loaded.training
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    saved = model.float().state_dict()
    assert all(torch.equal(weight, saved[name]) for name, weight in loaded.state_dict().items())
    assert [w.shape for w in fresh.parameters()] == [w.shape for w in loaded.parameters()]
    assert not torch.equal(next(fresh.parameters()), next(loaded.parameters()))
    with pytest.raises(ValueError, match="model type gpt2 has no field n_layrs; did you mean n_layer"):
        hf_causal_lm("gpt2", n_layrs=2)


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": [2 * value for value in row["x"]]}


def test_hf_dataset_reads_local_files(offline: Path) -> None:
    """Rows come as tensors, with the columns asked for, after the transform; a stream resumes where it stopped."""
    rows = [{"x": [float(i), 0.5], "y": i % 3, "note": f"row {i}"} for i in range(10)]
    (offline / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source: dict[str, Any] = {"path": "json", "data_files": str(offline / "rows.jsonl")}
    data = hf_dataset(**source, split="train")
    assert len(data) == 10
    assert data[3]["x"].tolist() == rows[3]["x"]
    assert data[3]["note"] == "row 3"

    chosen = hf_dataset(["twice", "y"], f"{__name__}.double", **source, split="train[:4]")
    [batch] = DataLoader(chosen, batch_size=4)
    assert batch["twice"].tolist() == [[2.0 * i, 1.0] for i in range(4)]
    assert batch["y"].tolist() == [0, 1, 2, 0]
    assert batch.keys() == {"twice", "y"}

    def stream() -> Any:
        return hf_dataset(["y", "twice"], double, **source, split="train", streaming=True)

    first, second = stream(), stream()
    walk = iter(first)
    seen = [next(walk) for _ in range(4)]
    second.load_state_dict(first.state_dict())
    assert [row["twice"][0].item() / 2 for row in [*seen, *second]] == list(range(10))

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
    assert size(net) == parameters
    for split in (config.data.train, config.data.eval):
        batch = next(iter(DataLoader(instantiate(split, _convert_="all"), config.data.batch_size)))
        loss, _ = instantiate(config.objective, _convert_="all")(net, batch)
        loss.backward()
        assert loss.item() > 0


def test_every_key_is_explained() -> None:
    options = [path for group in ("model", "data", "objective") for path in (CONF / group).glob("*.yaml")]
    lines = [line for path in options for line in path.read_text().splitlines()]
    assert len(options) > 10
    for line in lines:
        assert "#" in line or line.rstrip().endswith(":") or line.strip().startswith("_target_"), line
