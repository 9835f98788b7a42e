"""Programs of our own, for what protects in trainers: lines of libraries, marks of rows, constants, scores.

    python -m clinic reach [--only NAME] [--seeds 1] [--arms plain,guarded] [--tree DIR]

They were written with the engine in mind, three for each capability, and failed before it was there; the blind ones are
in clinic/in_trainers. The measure is a loss on rows that nobody trained on, or the share of completions that are wrong.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from clinic import paired
from clinic.paired import Program, Record

Guard = dict[str, object] | None


def hugging_face(model: nn.Module, rows: Any, guard: Guard, *, steps: int, batch: int = 16, kind: Any = None) -> None:
    """Train with the Trainer of transformers, or another `kind`."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = (kind or transformers.Trainer)(model=model, args=arguments, train_dataset=rows)
        trained(trainer, guard)


def trained(trainer: Any, guard: Guard) -> None:
    import transformers

    trainer.remove_callback(transformers.PrinterCallback)
    if guard is not None:
        import resilient_train

        trainer = resilient_train.hf.guard(trainer, **guard)
    trainer.train()


# An operation inside a library.


def bert(**more: Any) -> Any:
    import transformers

    small = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 32, "max_position_embeddings": 16, "num_labels": 3}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertConfig(**small, **quiet, **more)


class Reader(nn.Module):
    """Its own mask of minus infinities leaves an empty text nothing to attend to."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.body = transformers.BertModel(bert(attn_implementation="eager"), add_pooling_layer=False)
        self.head = nn.Linear(32, 2)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen = ids > 0
        mask = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1]).masked_fill(~seen[:, None, None, :], -math.inf)
        words = self.body.embeddings.word_embeddings(ids)
        hidden = self.body(inputs_embeds=words, attention_mask=mask).last_hidden_state
        weights = seen.float().unsqueeze(-1)
        logits = self.head((hidden * weights).sum(1) / weights.sum(1).clamp(min=1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def words(count: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 40, (count, 8))
    return ids, ((ids == 7) | (ids == 9)).any(1).long()


def empty_texts(seed: int, guard: Guard) -> float:
    torch.manual_seed(seed)
    ids, labels = words(600)
    ids[torch.randperm(600)[:40]] = 0
    model = Reader()
    rows = [{"ids": one, "labels": int(label)} for one, label in zip(ids, labels, strict=True)]
    hugging_face(model, rows, guard, steps=200)
    with torch.no_grad():
        return float(model.eval()(*words(400))["loss"])


def unlabelled_sentences(seed: int, guard: Guard) -> float:
    """A loss of the model's own over no labels, called by a trainer of the user's."""
    import transformers

    class Weighted(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    torch.manual_seed(seed)
    model = transformers.BertForTokenClassification(bert())
    ids = torch.randint(1, 40, (400, 8))
    labels = ids % 3
    labels[torch.randperm(400)[:40]] = -100
    rows = [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]
    hugging_face(model, rows, guard, steps=300, batch=1, kind=Weighted)
    ids = torch.randint(1, 40, (400, 8))
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids % 3).loss)


class Cold(nn.Module):
    """A head of transformers with scaled attention whose keys a layer of the user's has zeroed with their norm."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.words = nn.Embedding(40, 32)
        self.body = transformers.BertModel(bert(attn_implementation="eager"), add_pooling_layer=False)
        self.head = nn.Linear(32, 2)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        far = torch.where((ids == 11).all(1), -math.inf, 0.0)[:, None, None, None].expand(-1, 1, 8, 8)
        hidden = self.body(inputs_embeds=self.words(ids), attention_mask=far).last_hidden_state
        logits = self.head(hidden[:, 0])
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def texts_of_one_word(seed: int, guard: Guard) -> float:
    torch.manual_seed(seed)
    ids, labels = words(600)
    ids[torch.randperm(600)[:30]] = 11
    model = Cold()
    rows = [{"ids": one, "labels": int(label)} for one, label in zip(ids, labels, strict=True)]
    hugging_face(model, rows, guard, steps=250)
    with torch.no_grad():
        return float(model.eval()(*words(400))["loss"])


# Rows with one mark.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        predicted = self.layers(x).squeeze(-1)
        return {"loss": (predicted - y).square().mean(), "logits": predicted}


def regression(seed: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(1000, 6, generator=dice), torch.randn(6, generator=dice)
    return x, torch.tanh(x @ weights) + 0.1 * x[:, 0]


def held_out(model: nn.Module, x: Tensor, y: Tensor, *more: Any) -> float:
    with torch.no_grad():
        return float(model.eval()(x[900:], y[900:], *more)["loss"])


def chosen(seed: int, count: int) -> Tensor:
    return torch.randperm(900, generator=torch.Generator().manual_seed(seed + 100))[:count]


def other_units(seed: int, guard: Guard) -> float:
    """One sensor of sixty reports micrometres in place of metres."""
    x, y = regression(seed)
    kept, rows = (x.clone(), y.clone()), chosen(seed, 15)
    x[rows] *= 1e5
    y[rows] *= 1e5
    torch.manual_seed(seed)
    model = Net()
    hugging_face(model, [{"x": a, "y": b} for a, b in zip(x[:900], y[:900], strict=True)], guard, steps=300)
    return held_out(model, *kept)


def holes(seed: int, guard: Guard) -> float:
    """A column is NaN in six of a hundred rows of a loader."""
    x, y = regression(seed)
    kept = x.clone()
    x[chosen(seed, 54), 2] = math.nan
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    loader = DataLoader(TensorDataset(x[:900], y[:900]), batch_size=16, shuffle=True)
    if guard is None:
        for _ in range(6):
            for a, b in loader:
                optimizer.zero_grad()
                model(a, b)["loss"].backward()
                optimizer.step()
    else:
        from resilient_train import Guard as Guarded

        def objective(network: Any, batch: Any) -> Tensor:
            return network(*batch)["loss"]  # type: ignore[no-any-return]

        given: Any = guard
        run = Guarded(None, model, optimizer, data=loader, steps=300, objective=objective, **given)
        for batch in run.batches():
            run.step(batch)
    return held_out(model, kept, y)


def missing_targets(seed: int, guard: Guard) -> float:
    """-9999 stands for a target that is not known, in one of sixty rows."""
    x, y = regression(seed)
    kept = y.clone()
    y[chosen(seed, 15)] = -9999.0
    torch.manual_seed(seed)
    model = Net()
    hugging_face(model, [{"x": a, "y": b} for a, b in zip(x[:900], y[:900], strict=True)], guard, steps=300)
    return held_out(model, x, kept)


# A NaN that the program puts in as a constant.


class Masked(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = Net(), how

    def forward(self, x: Tensor, y: Tensor, seen: Tensor) -> dict[str, Tensor]:
        predicted = self.net.layers(x).squeeze(-1)
        if self.how == "where":
            predicted = torch.where(seen, predicted, torch.tensor(float("nan")))
        elif self.how == "full":
            made = torch.full_like(predicted, math.nan)
            made[seen] = predicted[seen]
            predicted = made
        elif self.how == "weights":
            weights = torch.where(seen, 1.0, math.nan)
            return {"loss": ((predicted - y).square() * weights).sum() / seen.sum(), "logits": predicted}
        return {"loss": (predicted - y).square().mean(), "logits": predicted}


def constant(how: str, seed: int, guard: Guard) -> float:
    x, y = regression(seed)
    seen = torch.rand(1000, generator=torch.Generator().manual_seed(seed + 3)) > 0.2
    torch.manual_seed(seed)
    model = Masked(how)
    rows = [{"x": a, "y": b, "seen": c} for a, b, c in zip(x[:900], y[:900], seen[:900], strict=True)]
    hugging_face(model, rows, guard, steps=300)
    model.how = ""
    return held_out(model, x, y, torch.ones(100, dtype=torch.bool))


# What is computed between generation and loss.


def grpo(score: Callable[[Any, dict[str, Tensor]], Tensor], seed: int, guard: Guard) -> float:
    """Learn to say c; `score` makes other advantages of what the trainer has made."""
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import GRPOConfig, GRPOTrainer

    class Scored(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            made["advantages"] = score(self, made)
            return made

    letters = {word: place for place, word in enumerate(["<pad>", "<eos>", *"abcdefghijkl"])}
    tokens = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(seed)
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    size = {"vocab_size": 14, "n_positions": 24, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **ends, resid_pdrop=0.0, attn_pdrop=0.0))

    def right(prompts: Any, completions: list[str], **more: Any) -> list[float]:
        return [sum(word == "c" for word in one.split()) / 6 for one in completions]

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            learning_rate=5e-3,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            seed=seed,
        )
        prompts = Dataset.from_dict({"prompt": ["a b", "b a", "c d", "d e"] * 50})
        more: dict[str, Any] = {"reward_funcs": right, "train_dataset": prompts, "processing_class": tokenizer}
        trained(Scored(model=model, args=arguments, **more), guard)
    ids = torch.tensor([[2, 3]] * 64)
    torch.manual_seed(1)
    said = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=True)[:, 2:]
    return float((said != 4).float().mean())


def by_deviation(trainer: Any, made: dict[str, Tensor]) -> Tensor:
    """The deviation of a group whose rewards are all the same is 0."""
    groups = made["advantages"].view(-1, trainer.num_generations)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)).reshape(-1)


def with_share_of_letters(trainer: Any, made: dict[str, Tensor]) -> Tensor:
    """A completion of no letters has a share of 0 / 0."""
    letters = (made["completion_mask"] * (made["completion_ids"] > 1)).sum(1).float()
    share = (made["completion_ids"] == 4).sum(1) / letters
    return made["advantages"] + 0.1 * (share - share.mean())


def with_root_of_length(trainer: Any, made: dict[str, Tensor]) -> Tensor:
    """The root of a length below the mean."""
    length = made["completion_mask"].sum(1).float()
    return made["advantages"] * (1 + 0.1 * torch.sqrt(length - length.mean()))


PROGRAMS = {
    **{one.__name__: one for one in (empty_texts, unlabelled_sentences, texts_of_one_word)},
    **{one.__name__: one for one in (other_units, holes, missing_targets)},
    **{f"constant_{how}": partial(constant, how) for how in ("where", "full", "weights")},
    **{
        f"grpo_{one.__name__}": partial(grpo, one) for one in (by_deviation, with_share_of_letters, with_root_of_length)
    },
}


def programs() -> list[Program]:
    return [Program(name, train) for name, train in PROGRAMS.items()]


def table(records: list[Record]) -> str:
    """Write what each run came to, its incidents and the lines that they name."""
    lines = ["| program | arm | measure | incidents | lines, rows | ends |", "|---|---|---|---|---|---|"]
    for one in records:
        found = one["incidents"]
        named = {f"{it['culprit']['op']} {Path(it['culprit']['file']).name}" for it in found if it["culprit"]}
        rows = {row for it in found for row in it["rows"]}
        measure = "" if one["measure"] is None else f"{one['measure']:.4f}"
        ends = one["error"]["type"] if one["error"] else (one["summary"] or {}).get("verdict", "")
        told = "; ".join([*sorted(named), *[f"{len(rows)} rows"] * bool(rows)])
        lines.append(f"| {one['program']} | {one['arm']} | {measure} | {len(found)} | {told} | {ends} |")
    return "\n".join(lines)


def main() -> None:
    """Run what the command line asks for."""
    files = dict.fromkeys(PROGRAMS, Path(__file__))
    imports = ("transformers", "trl", "datasets")
    paired.main("Programs of our own, in trainers.", files, table, seeds=1, preload=imports)
