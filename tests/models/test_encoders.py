"""Every tiny encoder against transformers: hidden states, logits, loss, gradients, padding, packing, saving."""

import copy
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForMaskedLM as TheirMaskedLM
from transformers import PreTrainedModel
from transformers.utils import logging

from ligerzoo import AutoModel, AutoModelForMaskedLM, cli, models
from ligerzoo.convert import architecture_for, architecture_of
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.info import describe
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory import apply_activation_plan, plan_activations
from ligerzoo.models import Bert, BertConfig, MaskedLM, ModernBert, ModernBertConfig, Roberta, RobertaConfig
from ligerzoo.models.registry import ENCODERS, module_of
from tests.models.comparing import (
    assert_close,
    assert_errors_as_small,
    gradients,
    raw_bytes,
    stored_tensors,
    under_their_names,
)
from tests.models.tiny import Tiny
from tests.train.tiny_run import write_tokenizer

logging.disable_progress_bar()
logging.set_verbosity_error()

ROWS = [row for name in ENCODERS for row in import_module(f"tests.models.tiny_{module_of(name)}").CHECKPOINTS]


@pytest.fixture(scope="module", params=ROWS, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


def load(directory: Path, device: str, dtype: torch.dtype = torch.float32) -> tuple[MaskedLM, PreTrainedModel]:
    theirs = TheirMaskedLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return AutoModelForMaskedLM.from_pretrained(directory, dtype=dtype, device=device), theirs.to(device).eval()


@pytest.fixture(scope="module")
def both(directory: Path, device: str) -> tuple[MaskedLM, PreTrainedModel]:
    return load(directory, device)


@pytest.fixture
def tokens(tiny: Tiny, device: str) -> Tensor:
    return random_tokens(tiny, 2, device)


def random_tokens(tiny: Tiny, rows: int, device: str) -> Tensor:
    """Draws tokens other than padding, whose embedding has no gradient in transformers, and no position in RoBERTa."""
    tokens = torch.randint(tiny.config["vocab_size"], (rows, tiny.tokens), device=device)
    pad = architecture_of(tiny.config["model_type"]).config_from_hf(tiny.config).pad_token_id
    return tokens if pad is None else tokens.masked_fill(tokens == pad, 7)


@pytest.fixture
def types(tiny: Tiny, tokens: Tensor) -> dict[str, Tensor]:
    """Token types, where the model has some."""
    config = architecture_of(tiny.config["model_type"]).config_from_hf(tiny.config)
    number = getattr(config, "type_vocab_size", 0)
    return {"token_type_ids": torch.randint_like(tokens, number)} if number else {}


@pytest.fixture
def labels(tokens: Tensor) -> Tensor:
    """The tokens, of which three of ten have labels."""
    return tokens.masked_fill(torch.rand(tokens.shape, device=tokens.device) > 0.3, -100)


def loss_and_gradients(model: Any, inputs: Tensor, **options: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(inputs, **options).loss
    loss.backward()
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients(model).items()}


Training = tuple[Tensor, dict[str, Tensor]]


def assert_same(ours: MaskedLM, got: Training, theirs: PreTrainedModel, expected: Training) -> None:
    """Compares losses and gradients, those of tied weights under the embedding's name."""
    assert_close(got[0], expected[0], "loss")
    names = {p: name for name, p in theirs.named_parameters(remove_duplicate=False) if "decoder" not in name}
    named = {names.get(theirs.get_parameter(name), name): gradient for name, gradient in expected[1].items()}
    own = under_their_names(ours, got[1], named)
    dead = {"cls.predictions.bias", "lm_head.bias"} - named.keys()  # of heads that are not tied
    assert own.keys() == named.keys()
    assert len(named) == len(dict(theirs.named_parameters()).keys() - dead)
    largest = max(gradient.abs().max().item() for gradient in named.values())
    for name, gradient in named.items():  # keys' biases change no probability, so that their gradients are 0
        assert_close(own[name], gradient, f"gradient of {name}", max(gradient.abs().max().item(), 1e-3 * largest))


def assert_same_training(ours: MaskedLM, theirs: PreTrainedModel, inputs: Tensor, **options: Tensor) -> None:
    assert_same(
        ours, loss_and_gradients(ours, inputs, **options), theirs, loss_and_gradients(theirs, inputs, **options)
    )


@pytest.mark.every_checkpoint
def test_logits_loss_and_gradients(
    both: tuple[MaskedLM, PreTrainedModel], tokens: Tensor, labels: Tensor, types: dict[str, Tensor]
) -> None:
    ours, theirs = both
    options = {"output_hidden_states": True, "output_attentions": True}
    assert_close(ours(tokens).logits, theirs(tokens).logits, "logits without types")
    got, expected = (model(tokens, **types, **options) for model in both)
    assert_close(got.logits, expected.logits, "logits")
    for name in ("hidden_states", "attentions"):
        for one, other in zip(got[name], expected[name], strict=True):
            assert_close(one, other, name)
    assert_same_training(ours, theirs, tokens, labels=labels, **types)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(
    tiny: Tiny,
    both: tuple[MaskedLM, PreTrainedModel],
    tokens: Tensor,
    labels: Tensor,
    types: dict[str, Tensor],
    side: str,
) -> None:
    """Padding is not computed: blocks get one row of all tokens. Results are those of the texts alone."""
    ours, theirs = both
    mask = torch.ones_like(tokens)
    mask[1, slice(None, 13) if side == "left" else slice(-13, None)] = 0
    positions = tiny.positions(mask)
    shapes = []
    handle = ours.model.layers[0].register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    got = ours(tokens, mask, **types, output_hidden_states=True)
    handle.remove()
    assert shapes == [(1, mask.sum(), ours.config.hidden_size)]
    is_token = mask == 1
    expected = theirs(tokens, attention_mask=mask, **positions, **types)
    assert_close(got.logits[is_token], expected.logits[is_token], "logits")
    computed = ours(
        tokens, mask, positions.get("position_ids", torch.arange(tokens.shape[1], device=tokens.device)[None]), **types
    )
    assert_close(computed.logits[is_token], got.logits[is_token], "logits where padding is computed")
    text = {name: kinds[1:, is_token[1]] for name, kinds in types.items()}
    alone = ours(tokens[1:, is_token[1]], **text, output_hidden_states=True)
    assert_close(got.logits[1:, is_token[1]], alone.logits, "logits of a text alone")
    for one, other in zip(got.hidden_states, alone.hidden_states, strict=True):
        assert_close(one[1:, is_token[1]], other, "hidden states of a text alone")
        assert not one[~is_token].any()
    seen = labels.masked_fill(~is_token, -100)
    expected = loss_and_gradients(theirs, tokens, attention_mask=mask, labels=seen, **positions, **types)
    assert_same(ours, loss_and_gradients(ours, tokens, attention_mask=mask, labels=labels, **types), theirs, expected)


def test_packed(
    both: tuple[MaskedLM, PreTrainedModel], tiny: Tiny, tokens: Tensor, labels: Tensor, types: dict[str, Tensor]
) -> None:
    """Texts A and B of [A | B | padding] have the logits, loss and gradients of separate texts."""
    model, _ = both
    bounds = torch.tensor([0, 17, 33], device=tokens.device)
    row, labels = tokens[:1], labels[:1].clone()
    types = {name: kinds[:1] for name, kinds in types.items()}
    labels[:, 33:] = -100
    parts = [
        (row[:, i:j], labels[:, i:j], {name: kinds[:, i:j] for name, kinds in types.items()})
        for i, j in ((0, 17), (17, 33))
    ]
    logits = model(row, cu_seqlens=bounds, **types).logits
    assert_close(logits[:, :33], torch.cat([model(text, **kinds).logits for text, _, kinds in parts], 1), "logits")
    positions = torch.cat([torch.arange(17), torch.arange(16), torch.arange(row.shape[1] - 33)])[None]
    positions = positions.to(row.device) + tiny.first_position
    assert_close(model(row, position_ids=positions, **types).logits[:, :33], logits[:, :33], "by position_ids")
    found = []
    for calls in ([(row, labels, {"cu_seqlens": bounds, **types})], parts):
        model.zero_grad()
        count = (labels != -100).sum()
        loss = sum(model(x, labels=y, num_items_in_batch=count, **options).loss for x, y, options in calls)
        loss.backward()
        found.append((loss.detach(), {name: gradient.clone() for name, gradient in gradients(model).items()}))
    (loss, got), (alone, expected) = found
    assert_close(loss, alone, "loss")
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert_close(got[name], gradient, name, max(gradient.abs().max().item(), 1e-3 * largest))


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta"])
@torch.no_grad()
def test_padding_tokens_within_texts(model_type: str, tmp_path: Path, device: str) -> None:
    """Without a mask they are attended to; RoBERTa's positions do not count them, as in transformers."""
    row = next(row for row in ROWS if row.config["model_type"] == model_type)
    row.write(tmp_path)
    ours, theirs = load(tmp_path, device)
    tokens, pad = random_tokens(row, 2, device), row.config["pad_token_id"]
    tokens[0, 5:8] = tokens[1, :3] = tokens[1, 30:] = pad
    assert_close(ours(tokens).logits, theirs(tokens).logits, "logits")
    mask = torch.ones_like(tokens)
    mask[1, 30:] = 0
    expected = theirs(tokens, attention_mask=mask).logits
    computed = ours(tokens, mask, output_attentions=True).logits
    for got, what in ((ours(tokens, mask).logits, "packed"), (computed, "padding computed")):
        assert_close(got[mask == 1], expected[mask == 1], what)
    bounds = torch.tensor([0, 30, 40], device=device)
    parts = [ours(tokens[1:, i:j]).logits for i, j in ((0, 30), (30, 40))]
    assert_close(ours(tokens[1:], cu_seqlens=bounds).logits, torch.cat(parts, 1), "two texts")
    if model_type != "bert":  # padding beyond the table of positions
        long = F.pad(tokens, (0, 200), value=pad)
        assert_close(ours(long).logits, theirs(long).logits, "more tokens than positions")


def test_bf16_logits(tiny: Tiny, directory: Path, device: str) -> None:
    ours, theirs = load(directory, device, torch.bfloat16)
    exact = copy.deepcopy(theirs).float()

    @torch.no_grad()
    def draw() -> tuple[Tensor, Tensor, Tensor]:
        tokens = random_tokens(tiny, 16, device)
        return ours(tokens).logits, theirs(tokens).logits, exact(tokens).logits

    assert_errors_as_small(draw, device)


def test_saving_writes_what_was_loaded(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(directory)
    original, config = stored_tensors(directory), json.loads((directory / "config.json").read_text())
    size = sum(tensor.nbytes for tensor in original.values())
    model.save_pretrained(tmp_path, max_shard_size=size // tiny.shards + 1)
    assert raw_bytes(stored_tensors(tmp_path)) == raw_bytes(original)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    again, report = TheirMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    theirs, expected = TheirMaskedLM.from_pretrained(directory, output_loading_info=True)
    assert report == expected
    assert {name.rpartition(".")[2] for name in report["missing_keys"]} <= {"bias"}, "of heads that are not tied"
    assert not report["mismatched_keys"]
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_new_models_are_read_by_transformers(tiny: Tiny, directory: Path, tmp_path: Path) -> None:
    config = AutoModelForMaskedLM.from_pretrained(directory).config
    model = AutoModelForMaskedLM.from_config(config, dtype="float32")
    assert type(model) is architecture_of(tiny.config["model_type"]).model_class
    model.save_pretrained(tmp_path)
    ours, theirs = load(tmp_path, "cpu")
    assert ours.config == config
    tokens = random_tokens(tiny, 2, "cpu")
    assert_close(ours(tokens).logits, theirs(tokens).logits, "logits")
    assert_close(ours(tokens).logits, model(tokens).logits, "logits of the new model")


SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
CONFIG = ModernBertConfig(**SIZES, num_attention_heads=4, sliding_window=6)
TOKENS = torch.arange(40).view(2, 20)


@pytest.mark.parametrize("model_class", [ModernBert, Roberta])
def test_checkpointing_and_compiled_code_give_the_same(model_class: type[MaskedLM]) -> None:
    config = CONFIG if model_class is ModernBert else RobertaConfig(**SIZES, num_attention_heads=4)
    model, mask = model_class(config), torch.ones_like(TOKENS)
    mask[0, 15:] = 0
    labels = TOKENS.masked_fill(mask == 0, -100)

    def run(call: Any) -> list[Tensor]:
        model.zero_grad()
        loss = call(TOKENS, mask, labels=labels).loss
        loss.backward()
        return [loss.detach(), *gradients(model).values()]

    expected = run(model)
    model.gradient_checkpointing_enable()
    for got, one in zip(run(model), expected, strict=True):
        torch.testing.assert_close(got, one, rtol=0, atol=0)
    model.gradient_checkpointing_disable()
    for got, one in zip(run(torch.compile(model, backend="eager", fullgraph=True)), expected, strict=True):
        assert_close(got, one, "compiled", max(one.abs().max().item(), 1e-3))


@pytest.mark.parametrize("level", list(Recompute))
@pytest.mark.parametrize("model_class", [ModernBert, Roberta])
def test_activation_plans_give_the_same(model_class: type[MaskedLM], level: Recompute) -> None:
    config = CONFIG if model_class is ModernBert else RobertaConfig(**SIZES, num_attention_heads=4)
    model, found = model_class(config), []
    for plan in ((), (level, level)):
        model.model.activation_plan = plan
        found.append(loss_and_gradients(model, TOKENS, labels=TOKENS))
    (loss, expected), (again, got) = found
    assert torch.equal(again, loss)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


def test_the_memory_of_a_step_is_predicted() -> None:
    model = Bert(BertConfig(**SIZES, num_attention_heads=4))
    plan = plan_activations(model, batch_size=4, seq_length=64, budget=1.0)
    apply_activation_plan(model, plan)
    assert len(model.model.activation_plan) == 2


def test_a_loss_of_no_labels_is_zero() -> None:
    model = ModernBert(CONFIG)
    loss = model(TOKENS, labels=torch.full_like(TOKENS, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_encoders_are_exported_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--architectures"]) == 0
    out = capsys.readouterr().out
    for model_type, name in ENCODERS.items():
        architecture = architecture_of(model_type)
        assert architecture_for(getattr(models, name)) is architecture
        assert issubclass(architecture.model_class, MaskedLM)
        assert f"{name} ({model_type})" in out


@pytest.mark.parametrize("name", ["past_key_values", "use_cache", "exact", "objective", "output_router_logits"])
def test_inputs_of_decoders_are_refused(name: str) -> None:
    with pytest.raises(LigerzooError, match=f"^{name}: not an input of ModernBert"):
        ModernBert(CONFIG)(TOKENS, **{name: True})


def test_what_only_decoders_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ModernBert(CONFIG)
    for call in (model.generate, model.generate_many, model.new_cache):
        with pytest.raises(LigerzooError, match="ModernBert: an encoder, whose tokens attend to later ones, has no"):
            call(TOKENS)
    with pytest.raises(TypeError, match="attention_mask"):
        model(TOKENS, [[1] * 20] * 2)
    with pytest.raises(LigerzooError, match=r"labels\[0, 0\]: label outside the vocabulary; got 50"):
        model(TOKENS, labels=TOKENS + 50)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"another architecture.*AutoModelForMaskedLM.from_pretrained"):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"another kind of model than CausalLM.*AutoModelForMaskedLM.from_config"):
        AutoModel.from_config(CONFIG)
    with pytest.raises(ConfigError, match=r"another kind of model than MaskedLM.*AutoModel.from_config"):
        AutoModelForMaskedLM.from_config(models.LlamaConfig())
    write_tokenizer(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("Two ligers. " * 50)
    for command, remedy in (
        (["generate", "--prompt", "Hi"], "AutoModelForMaskedLM"),
        (["serve"], "AutoModelForMaskedLM"),
        (["train", "--data", str(text), "--output", str(tmp_path / "run")], "Train it with --method mlm."),
    ):
        assert cli.main([command[0], str(tmp_path), *command[1:]]) != 0
        assert remedy in capsys.readouterr().err
    assert "per token of context" not in describe(tmp_path)


def test_encoders_are_described(tmp_path: Path) -> None:
    Bert(BertConfig(**SIZES, num_attention_heads=4)).save_pretrained(tmp_path)
    text = describe(tmp_path)
    assert "Bert (BertForMaskedLM)" in text
    assert "512 tokens, learned positions" in text
    assert "inference     " in text
    assert "other  " not in text


@pytest.mark.parametrize(
    ("model_type", "entry", "value"),
    [
        ("modernbert", "hidden_activation", "silu"),
        ("modernbert", "classifier_activation", "relu"),
        ("modernbert", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("modernbert", "sparse_pred_ignore_index", 0),
        ("bert", "hidden_act", "relu"),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "add_cross_attention", True),
        ("bert", "pruned_heads", {"0": [1]}),
    ],
)
def test_entries_that_would_change_the_model_are_refused(model_type: str, entry: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{entry}: not supported"):
        architecture_of(model_type).config_from_hf({"model_type": model_type, entry: value})


@pytest.mark.parametrize("values", [{"rope_theta": 5.0}, {"head_dim": 8}, {"num_key_value_heads": 2}], ids=str)
def test_bert_has_no_fields_of_decoders(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no entry: heads divide hidden_size, positions are learned"):
        BertConfig(**SIZES, num_attention_heads=4, **values)


@pytest.mark.parametrize("pad", [None, -1, 511])
def test_positions_of_roberta_follow_the_padding_token(pad: int | None) -> None:
    with pytest.raises(ConfigError, match=r"pad_token_id: invalid value.*an id below 511"):
        RobertaConfig(**SIZES, num_attention_heads=4, pad_token_id=pad)


def test_texts_have_learned_positions() -> None:
    """Texts have as many tokens as the table has positions; a packed row has more."""
    model = Bert(BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=15))
    with pytest.raises(LigerzooError, match=r"input_ids: a text is longer than the table.*got 20; expected at most 15"):
        model(TOKENS)
    bounds = torch.tensor([0, 3, 10])
    packed = model(TOKENS.view(1, -1), cu_seqlens=bounds).logits  # 30 tokens of padding
    torch.testing.assert_close(packed[:, 3:10], model(TOKENS[:1, 3:10]).logits)
    with pytest.raises(LigerzooError, match=r"input_ids: a text is longer than the table.*got 16; expected at most 15"):
        model(TOKENS.view(1, -1), cu_seqlens=torch.tensor([0, 3, 19]))
    model(TOKENS, position_ids=torch.arange(20)[None] % 15)
    with pytest.raises(LigerzooError, match="position_ids: a position has no embedding; got 19; expected 0 to 14"):
        model(TOKENS, position_ids=torch.arange(20)[None])


def test_token_types_are_checked() -> None:
    bert, modern = Bert(BertConfig(**SIZES, num_attention_heads=4)), ModernBert(CONFIG)
    with pytest.raises(LigerzooError, match="token_type_ids: no such token type; got 2; expected 0 to 1"):
        bert(TOKENS, token_type_ids=torch.full_like(TOKENS, 2))
    with pytest.raises(LigerzooError, match=r"token_type_ids has shape \(1, 20\); expected \(2, 20\)"):
        bert(TOKENS, token_type_ids=TOKENS[:1])
    with pytest.raises(LigerzooError, match="token_type_ids: ModernBert has no token types"):
        modern(TOKENS, token_type_ids=TOKENS)


def test_a_null_theta_of_local_attention_is_the_global_one() -> None:
    config = architecture_of("modernbert").config_from_hf({"global_rope_theta": 500.0, "local_rope_theta": None})
    assert (config.rope_theta, config.rope_local_base_freq) == (500.0, 500.0)


def test_masks_with_holes_are_not_packed() -> None:
    """The neighbours of a hole keep their distance, as in transformers."""
    model, mask = ModernBert(CONFIG), torch.ones_like(TOKENS)
    model.init_weights(0.5)
    mask[0, 4:6] = 0
    logits = model(TOKENS, mask).logits
    torch.testing.assert_close(logits, model(TOKENS, mask, position_ids=torch.arange(20)[None]).logits)
    assert not torch.allclose(logits[0, 0], model(TOKENS[:1, [0, 1, 2, 3, *range(6, 20)]]).logits[0, 0], atol=1e-4)
