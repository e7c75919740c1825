"""Access to the embeddings, and resizing them, as in transformers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from ligerzoo.models import CausalLM, LlamaConfig
from tests.models.comparing import assert_close, load_both
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS


def one_of_each() -> Iterator[Tiny]:
    """Yields the first checkpoint of each architecture, tied and untied, with and without biases where it has both.

    Except Llama 3.2 Vision.
    """
    taken = set()
    for row in CHECKPOINTS:
        key = row.config["model_type"], bool(row.config.get("tie_word_embeddings")), "biases" in row.name
        if key not in taken and row.config["model_type"] != "mllama" and not row.corrected:
            taken.add(key)
            yield row


def transformers_class(row: Tiny) -> Any:
    return AutoModelForImageTextToText if "vision_config" in row.config else AutoModelForCausalLM


def written(row: Tiny, directory: Path) -> CausalLM:
    row.write(directory)
    return AutoModel.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.every_layer
@pytest.mark.parametrize("row", list(one_of_each()), ids=str)
@torch.no_grad()
def test_resizing_round_trips(row: Tiny, tmp_path: Path, device: str) -> None:
    row.write(tmp_path / "old")
    ours, theirs = load_both(tmp_path / "old", torch.float32, device, transformers_class(row))
    rows = ours.config.vocab_size
    tokens = torch.randint(3, 80, (2, 12), device=device)
    before = ours(tokens).logits
    embedding = ours.resize_token_embeddings(rows + 5, pad_to_multiple_of=8)
    theirs.resize_token_embeddings(rows + 5, pad_to_multiple_of=8)
    size = -(-(rows + 5) // 8) * 8
    assert embedding is ours.get_input_embeddings()
    assert (embedding.num_embeddings, ours.config.vocab_size, ours.input_vocab_size) == (size, size, size)
    assert ours.lm_head.weight.shape == embedding.weight.shape == theirs.get_input_embeddings().weight.shape
    assert (ours.lm_head.weight is embedding.weight) == ours.config.tie_word_embeddings
    assert torch.equal(ours(tokens).logits[..., :rows], before)

    for module in ("get_input_embeddings", "get_output_embeddings"):
        for got, expected in zip(*(getattr(model, module)().parameters() for model in (ours, theirs)), strict=True):
            if expected.dim() == 1 and ours.config.tie_word_embeddings:
                # transformers gives the bias of a tied head zeros, and that of an untied one the mean, as ours.
                assert torch.equal(got[:rows], expected[:rows])
                torch.testing.assert_close(got[rows:], got[:rows].mean().expand(size - rows))
                continue
            # transformers samples new rows with a billionth of the covariance.
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-4 * expected.std(0).max().item())

    new = torch.tensor([[rows, 5, size - 1, 7, rows + 3, 9]], device=device)
    ours.save_pretrained(tmp_path / "new")
    loaded, theirs = load_both(tmp_path / "new", torch.float32, device, transformers_class(row))
    expected = ours(new).logits
    assert loaded.config == replace(ours.config, head_dim=loaded.config.head_dim)  # a None is saved as its value
    assert loaded.config.head_size == ours.config.head_size
    assert all(map(torch.equal, loaded.state_dict().values(), ours.state_dict().values()))
    assert_close(loaded(new).logits, expected, "loaded logits")
    assert_close(expected, theirs(new).logits, "logits")


@pytest.mark.parametrize("tied", [False, True])
def test_shrinking_and_training(tmp_path: Path, tied: bool) -> None:
    name = "llama 3, tied, transformers 4 spelling" if tied else "llama plain"
    model = written(next(row for row in CHECKPOINTS if row.name == name), tmp_path / "old")
    embedding = model.get_input_embeddings()
    weight, old = embedding.weight, embedding.weight.detach().clone()
    head = model.lm_head.weight.detach().clone()
    tokens = torch.randint(50, (2, 12))
    model(tokens, labels=tokens).loss.backward()

    assert model.resize_token_embeddings(60) is embedding
    assert embedding.weight is weight
    assert weight.grad is None
    assert torch.equal(weight, old[:60])
    assert torch.equal(model.lm_head.weight, head[:60])
    optimizer = torch.optim.AdamW(model.parameters())
    for size in (60, 71):
        model.resize_token_embeddings(size)
        optimizer = torch.optim.AdamW(model.parameters())
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(model.lm_head.weight) == 71
    assert model.resize_token_embeddings(None, pad_to_multiple_of=16).weight.shape[0] == 80
    assert model.resize_token_embeddings() is embedding


def test_new_rows_are_the_mean() -> None:
    model = AutoModel.from_config(tiny_config(), dtype=torch.bfloat16)
    head = model.get_output_embeddings()
    weights = [model.get_input_embeddings().weight, head.weight]
    means = [weight.detach().float().mean(0).bfloat16() for weight in weights]
    model.resize_token_embeddings(53)
    for weight, mean in zip(weights, means, strict=True):
        assert torch.equal(weight[50:], mean.expand(3, -1))
    with torch.device("meta"):
        on_meta = AutoModel.from_config(tiny_config())
    assert on_meta.resize_token_embeddings(53).weight.shape == (53, 16)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "new_num_tokens: not a number of tokens; got 0"),
        ((True,), "new_num_tokens: not a number of tokens; got True"),
        ((60, -8), "pad_to_multiple_of: not a number of tokens; got -8"),
    ],
)
def test_sizes_that_cannot_be(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        AutoModel.from_config(tiny_config()).resize_token_embeddings(*arguments)


@pytest.mark.parametrize(
    "model_type, size, message",
    [
        ("mllama", 200, "rows of image tokens follow"),
        ("qwen2_vl", 91, "fewer rows than the placeholder .* at least 92"),
    ],
)
def test_image_tokens_keep_their_rows(tmp_path: Path, model_type: str, size: int, message: str) -> None:
    model = written(next(row for row in CHECKPOINTS if row.config["model_type"] == model_type), tmp_path)
    config = model.config
    with pytest.raises(LigerzooError, match=message):
        model.resize_token_embeddings(size)
    assert model.config is config
    assert model.resize_token_embeddings(config.vocab_size) is model.get_input_embeddings()


def test_replacing_embeddings() -> None:
    model = AutoModel.from_config(tiny_config(tie_word_embeddings=True))
    assert model.base_model is model.model
    new = nn.Embedding(50, 16)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert model.get_output_embeddings().weight is new.weight
    tokens: Tensor = torch.randint(50, (1, 5))
    torch.testing.assert_close(model(tokens).logits, model(inputs_embeds=new(tokens)).logits, rtol=0, atol=0)


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaConfig(**sizes, num_attention_heads=4, **changes)
