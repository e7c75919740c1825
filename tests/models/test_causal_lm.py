"""CausalLM: labels, logits, caches, embeddings, checkpointing, compilation, copies."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from ligerzoo.generate import generate
from ligerzoo.models import CausalLMOutput, Llama, LlamaConfig
from ligerzoo.text.padding import BatchEncoding
from tests.covering import every_backend
from tests.models.zoo import CHECKPOINTS

VOCAB = 70

IDS = torch.arange(6)[None]


@pytest.fixture
def model(device: str) -> Llama:
    return llama().to(device)


def llama(device: str | None = None, **changes: Any) -> Llama:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    return Llama(LlamaConfig(**sizes | changes), device=device)


def tokens_and_labels(batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (batch, length), device=device)
    return tokens, tokens.masked_fill(torch.rand(tokens.shape, device=device) < 0.3, -100)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert expected
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert (got[name] - gradient).abs().max().item() <= 1e-5 * scale, name


# Labels


def test_labels_are_shifted_and_ignored_if_negative(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 40, device)
    logits = model(tokens).logits
    assert (logits.shape, logits.dtype) == ((2, 40, VOCAB), torch.float32)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    out = model(tokens, labels=labels)
    assert (out.loss.shape, out.loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=0)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(model(tokens, shift_labels=shifted).loss, out.loss)
    assert torch.equal(model(tokens, labels=tokens, shift_labels=shifted).loss, out.loss)


def test_labels_without_logits(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 40, device)
    out = model(tokens, labels=labels)
    assert out.logits is None
    assert out["loss"] is out[0] is out.loss
    assert out[0:] == (out.loss,)
    plain = model(tokens)
    assert plain.loss is None
    assert plain[0] is plain.logits


def test_the_largest_tensor_of_a_training_step_is_not_the_logits(device: str) -> None:
    model = llama(vocab_size=5000).to(device)
    model.lm_head.logits_budget = 1
    tokens, labels = tokens_and_labels(2, 200, device)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    with Watch():
        model(tokens, labels=labels).loss.backward()
    assert max(sizes) < tokens.numel() * 5000 / 2


@pytest.mark.parametrize("as_tensor", [False, True])
def test_accumulated_micro_batches_are_one_batch(model: Llama, device: str, as_tensor: bool) -> None:
    tokens, labels = tokens_and_labels(4, 40, device)
    model(tokens, labels=labels).loss.backward()
    expected = gradients(model)

    model.zero_grad()
    items: int | Tensor = (labels[:, 1:] != -100).sum()
    items = items if as_tensor else int(items)
    losses = [model(tokens[rows], labels=labels[rows], num_items_in_batch=items).loss for rows in ([0], [1, 2], [3])]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(sum(losses), model(tokens, labels=labels).loss)
    assert_same_gradients(gradients(model), expected)


def test_no_valid_label_gives_zero(model: Llama, device: str) -> None:
    tokens, _ = tokens_and_labels(2, 40, device)
    loss = model(tokens, labels=torch.full_like(tokens, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_a_label_outside_the_vocabulary(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 40, device)
    labels[1, 5] = VOCAB
    if device == "cpu":
        message = rf"label outside the vocabulary; got {VOCAB}; expected 0 to {VOCAB - 1}, or -100"
        with pytest.raises(LigerzooError, match=rf"^labels\[1, 5\]: {message}"):
            model(tokens, labels=labels)
        with pytest.raises(LigerzooError, match=rf"^shift_labels\[1, 5\]: {message}"):
            model(tokens, shift_labels=labels)
    else:
        assert model(tokens, labels=labels).loss.isnan()


# Inputs that cannot be right


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**40])
def test_a_token_outside_the_vocabulary(model: Llama, device: str, wrong: int) -> None:
    tokens, _ = tokens_and_labels(2, 10, device)
    tokens[1, 3] = wrong
    message = rf"input_ids: token ids outside the vocabulary; got \[{wrong}\]; expected 0 to {VOCAB - 1}"
    with pytest.raises(LigerzooError, match=message):
        model.generate(tokens, max_new_tokens=1)
    with pytest.raises(LigerzooError, match=message):
        model.check_inputs(tokens)
    if device == "cpu":  # on a GPU only with LIGERZOO_DEBUG=1
        with pytest.raises(LigerzooError, match=message):
            model(tokens)


@pytest.mark.parametrize(
    "input_ids, named, remedy",
    [
        ([[1, 2]], "list", "Convert it with torch.tensor"),
        (torch.ones(1, 2), "torch.float32", "Pass embeddings as inputs_embeds"),
        ("text", "str", "Encode text first: model"),
        (["text"], "list", "Encode text first: model"),
        (BatchEncoding(input_ids=[1, 2]), "BatchEncoding", "Pass the output of a tokenizer as model"),
    ],
    ids=str,
)
def test_input_ids_must_be_integers(model: Llama, input_ids: Any, named: str, remedy: str) -> None:
    message = rf"^input_ids: got {named}; expected a \(B, T\) tensor of integers\. {remedy}"
    with pytest.raises(TypeError, match=message):
        model(input_ids)


@pytest.mark.parametrize(
    "inputs, error, message",
    [
        ({"input_ids": IDS[0]}, ValueError, r"input_ids: got shape \(6,\); expected \(B, T\)\. Use input_ids\[None\]"),
        ({"input_ids": IDS[None]}, ValueError, r"input_ids: got shape \(1, 1, 6\); expected \(B, T\)$"),
        ({"inputs_embeds": IDS}, TypeError, r"inputs_embeds: got a tensor of shape \(1, 6\) and dtype torch.int64; ex"),
        ({"inputs_embeds": torch.ones(1, 6)}, ValueError, r"inputs_embeds: got shape \(1, 6\); expected \(B, T, H\)"),
        ({"input_ids": IDS, "use_cache": "yes"}, LigerzooError, "use_cache: not a flag; got 'yes'; expected True"),
        ({"input_ids": IDS, "logits_to_keep": 1.5}, TypeError, "logits_to_keep=1.5; expected an integer, 0 or more"),
        ({"input_ids": IDS, "logits_to_keep": -1}, ValueError, "logits_to_keep=-1; expected an integer, 0 or more"),
        ({"input_ids": IDS, "labels": IDS.tolist()}, TypeError, "labels is a list; expected .* Convert it with torch"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, ValueError, "labels has shape .*the model shifts them itself"),
        ({"input_ids": IDS, "shift_labels": IDS[:, 1:]}, ValueError, "shift_labels has shape .*the label that each"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_inputs_of_another_type_or_shape(
    model: Llama, inputs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model(**{name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in inputs.items()})


def test_input_values_are_checked_on_a_cpu_or_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(device="meta"), torch.zeros(1, 3, dtype=torch.int64, device="meta")
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(Llama, "check_inputs", lambda _, ids, *more, **modalities: calls.append(tuple(ids.shape)))
    model(ids)
    assert calls == []
    monkeypatch.setattr("ligerzoo.models.language_model.DEBUG", True)
    model(ids)
    assert calls == [(1, 3)]


@pytest.mark.parametrize("name", ["images", "pixel_values", "attention_masks"])
def test_unknown_inputs_are_refused(model: Llama, device: str, name: str) -> None:
    tokens, _ = tokens_and_labels(2, 10, device)
    remedy = r"\. Did you mean 'attention_mask'" if name == "attention_masks" else "; expected text inputs only"
    with pytest.raises(LigerzooError, match=f"{name}: not an input of Llama{remedy}"):
        model(tokens, **{name: torch.zeros(2, 3)})
    with pytest.raises(LigerzooError, match=f"{name}: not an option of generate or input of Llama"):
        model.generate(tokens, max_new_tokens=1, **{name: torch.zeros(2, 3)})


def test_a_misspelt_input_is_answered_with_the_nearest(model: Llama, device: str) -> None:
    tokens, _ = tokens_and_labels(2, 10, device)
    with pytest.raises(LigerzooError, match=r"^lables: not an input of Llama\. Did you mean 'labels'\?$"):
        model(tokens, lables=tokens)


def test_modalities() -> None:
    class Louder(Llama):
        def embed(self, x: Tensor, context: Any, volume: float = 1.0, **more: Any) -> Tensor:
            return self.model.embed_tokens(x) * volume

    class Brighter(Louder):
        def embed(self, x: Tensor, context: Any, *, light: float = 0.0, **more: Any) -> Tensor:
            return super().embed(x, context, **more) + light

    assert (Llama.modalities, Brighter.modalities) == ((), ("light", "volume"))
    model, ids = Brighter(llama().config), torch.arange(9)[None]
    assert not torch.equal(model(ids, volume=0.5, light=1.0).logits, model(ids).logits)


# Logits


def test_logits_to_keep(model: Llama, device: str) -> None:
    tokens, _ = tokens_and_labels(2, 40, device)
    logits = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=1).logits, logits[:, -1:])
    torch.testing.assert_close(model(tokens, logits_to_keep=7).logits, logits[:, -7:])
    indices = torch.tensor([3, 0, 39], device=device)
    torch.testing.assert_close(model(tokens, logits_to_keep=indices).logits, logits[:, indices])


def test_inputs_embeds(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 40, device)
    embeddings = model.model.embed_tokens(tokens).detach().requires_grad_()
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(tokens).logits)
    model(inputs_embeds=embeddings, labels=labels).loss.backward()
    assert embeddings.grad is not None
    assert embeddings.grad.abs().sum(-1).gt(0).any()
    for wrong in ({}, {"input_ids": tokens, "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="expected exactly one of input_ids and inputs_embeds; got"):
            model(**wrong)


def test_masks_of_either_shape(model: Llama, device: str) -> None:
    tokens, _ = tokens_and_labels(2, 10, device)
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1, -2:] = 0, 0
    visible = torch.ones(10, 10, dtype=torch.bool, device=device).tril() & mask.bool()[:, None, None, :]
    if device == "cuda":  # a query without visible keys sees itself
        visible[0, 0, :3, :3] = torch.eye(3, dtype=torch.bool)
    expected = model(tokens, attention_mask=mask).logits
    assert torch.equal(model(tokens, attention_mask=visible).logits, expected)
    alone = model(tokens[:1, 3:]).logits
    torch.testing.assert_close(expected[:1, 3:], alone, rtol=0, atol=2e-5)


def test_positions_are_relative(model: Llama, device: str) -> None:
    tokens, _ = tokens_and_labels(2, 40, device)
    positions, expected = torch.arange(40, device=device)[None], model(tokens).logits
    assert torch.equal(model(tokens, position_ids=positions).logits, expected)
    torch.testing.assert_close(model(tokens, position_ids=positions + 100).logits, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(model(tokens, position_ids=positions * 2).logits, expected, atol=1e-2)


# Caches


@pytest.mark.parametrize("chunks", [[40], [39, 1], [1] * 40, [7, 1, 1, 13, 18], [3] * 13 + [1]])
@pytest.mark.parametrize("padded", [False, True])
def test_cache_does_not_change_the_logits(model: Llama, device: str, chunks: list[int], padded: bool) -> None:
    tokens, _ = tokens_and_labels(3, 40, device)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :5], mask[2, :1] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, position_ids=positions).logits
        cache, parts, start = None, [], 0
        for end in torch.tensor(chunks).cumsum(0).tolist():
            out = model(
                tokens[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            cache, start = out.past_key_values, end
            assert cache.get_seq_length() == end
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask == 1], expected[mask == 1], rtol=0, atol=2e-5)


def test_cache_is_created_or_extended(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 8, device)
    assert model(tokens).past_key_values is None
    cache = model.new_cache()
    assert model(tokens, past_key_values=cache).past_key_values is cache
    out = model(tokens, past_key_values=cache, labels=labels)
    assert cache.length == 16
    assert out[1] is cache
    with pytest.raises(ValueError, match=r"\(2, 8\); expected \(2, 24\)"):
        model(tokens, past_key_values=cache, attention_mask=torch.ones_like(tokens))


# Training


def test_gradient_checkpointing_recomputes_blocks(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 40, device)
    calls: list[int] = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    model(tokens, labels=labels).loss.backward()
    expected = gradients(model)
    assert len(calls) == 1

    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=labels).loss.backward()
    assert len(calls) == 3
    assert_same_gradients(gradients(model), expected)
    with torch.no_grad():
        model(tokens)
    assert len(calls) == 4
    cache = model.new_cache()  # recomputation would extend it twice
    model(tokens, labels=labels, past_key_values=cache).loss.backward()
    assert (len(calls), cache.length) == (5, 40)
    model.gradient_checkpointing_disable()
    model(tokens, labels=labels).loss.backward()
    assert len(calls) == 6


def test_training_on_padding_matches_transformers(model: Llama, device: str) -> None:
    """Right padding with labels equal to the ids, as in many scripts."""
    config = transformers.LlamaConfig(**vars(model.config) | {"pad_token_id": None, "rope_scaling": None})
    theirs = transformers.LlamaForCausalLM(config).to(device)
    theirs.load_state_dict(model.state_dict())
    tokens, _ = tokens_and_labels(4, 40, device)
    mask = (torch.arange(40, device=device) < torch.tensor([[40], [33], [12], [1]], device=device)).long()
    losses: list[list[float]] = []
    for trained in (model, theirs):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        losses.append([])
        for _ in range(4):
            loss = trained(tokens, attention_mask=mask, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if device == "cpu" else 1e-3)
    assert losses[0][-1] < losses[0][0] - 0.2


def test_a_step_under_autocast(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 40, device)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    labels[0, :6] = -100
    expected = model(tokens, attention_mask=mask, labels=labels).loss
    with torch.autocast(device, torch.bfloat16):
        assert model(tokens).logits.dtype == torch.bfloat16
        loss = model(tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients(model).values())


def test_loss_can_be_differentiated_once(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 8, device)
    loss = model(tokens, labels=labels).loss
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)


def test_frozen_weights_get_no_gradient(model: Llama, device: str) -> None:
    tokens, labels = tokens_and_labels(2, 40, device)
    model(tokens, labels=labels).loss.backward()
    expected = {name: gradient for name, gradient in gradients(model).items() if "layers.0.mlp" in name}
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.mlp" in name)
    model(tokens, labels=labels).loss.backward()
    assert_same_gradients(gradients(model), expected)


# Compilation


def assert_compiled_is_eager(model: Llama, backend: Any, sizes: list[tuple[int, int]], padded: bool) -> None:
    """Compares loss and gradients of the full graph for batches of these sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for batch, length in sizes:
        tokens, labels = tokens_and_labels(batch, length, str(model.device))
        mask = torch.ones_like(tokens).index_fill(1, torch.arange(5, device=model.device), 0) if padded else None
        expected = model(tokens, attention_mask=mask, labels=labels).loss
        expected.backward()
        required = gradients(model)
        model.zero_grad()
        loss = compiled(tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        assert_same_gradients(gradients(model), required)
        model.zero_grad()


@every_backend
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_model_matches_eager_and_compiles_at_most_twice(device: str, padded: bool, backend: str) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = llama(num_hidden_layers=1, rope_scaling=scaling, max_position_embeddings=30).to(device)
    counter = CompileCounterWithBackend(backend)
    assert_compiled_is_eager(model, counter, [(3, 24), (4, 17), (5, 40)], padded)
    assert counter.frame_count <= 2  # for the first sizes, then for dynamic ones


@pytest.mark.thorough  # compiles 20 C++ files; tests/kernels/test_ops.py compiles the loss head only
@pytest.mark.inductor
def test_compiled_by_inductor(device: str) -> None:
    assert_compiled_is_eager(llama(num_hidden_layers=1).to(device), "inductor", [(2, 24)], padded=True)


@every_backend
@pytest.mark.parametrize("capacity", [None, pytest.param(64, marks=pytest.mark.thorough)])
def test_compiled_model_fills_a_cache(device: str, capacity: int | None, backend: str) -> None:
    """A cache that was passed, or one that the model creates."""
    model = llama(num_hidden_layers=1).to(device)
    tokens, _ = tokens_and_labels(2, 12, device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected = model(tokens).logits
        cache = None if capacity is None else model.new_cache(capacity)
        parts = []
        for part in tokens.split([9, 1, 1, 1], 1):
            out = compiled(part, past_key_values=cache, use_cache=True)
            assert cache in (None, out.past_key_values)
            cache = out.past_key_values
            parts.append(out.logits)
    assert cache is not None
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@every_backend
def test_generate_with_the_result_of_torch_compile(device: str, backend: str) -> None:
    """Compiles for the prompt, the first token and all other tokens."""
    model = llama(num_hidden_layers=1).to(device)
    tokens, _ = tokens_and_labels(2, 10, device)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = model.generate(tokens, mask, max_new_tokens=20)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter)
    assert torch.equal(generate(compiled, tokens, mask, max_new_tokens=20), expected)
    assert 0 < counter.frame_count <= 3


SIZES = [
    ((3, 6, False), (2, 12, True)), ((2, 40, False), (4, 41, True)), ((2, 30, True), (1, 5, False)),
    ((3, 6, True), (3, 8, True)), ((5, 7, True), (2, 70, False)),
]  # fmt: skip
"""Batches to train on and to generate from: their numbers of texts and of tokens, and whether they are padded."""


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("llama", SIZES[:1]),
        *(pytest.param(name, SIZES, marks=pytest.mark.thorough) for name in ("llama", "mistral", "gemma2")),
    ],
    ids=["llama", "llama-more", "mistral", "gemma2"],
)
def test_training_and_generation_after_compile(device: str, tmp_path: Path, name: str, sizes: Any) -> None:
    """Generation of any lengths neither fails nor takes graphs from training, of which torch allows 8 per function."""
    row = next(row for row in CHECKPOINTS if row.config["model_type"] == name)
    row.write(tmp_path)
    eager, compiled = (AutoModel.from_pretrained(tmp_path, device=device) for _ in range(2))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled.compile(backend=counter, fullgraph=True)

    def tokens_and_mask(batch: int, length: int, padded: bool) -> tuple[Tensor, Tensor | None]:
        tokens, _ = tokens_and_labels(batch, length, device)
        return tokens, torch.ones_like(tokens).index_fill_(1, torch.arange(3, device=device), 0) if padded else None

    for train, generated in sizes:
        tokens, mask = tokens_and_mask(*train)
        losses = []
        for model in (eager, compiled):
            model.zero_grad()
            loss = model(tokens, mask, labels=tokens).loss
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        assert_same_gradients(gradients(compiled), gradients(eager))
        tokens, mask = tokens_and_mask(*generated)
        options = {"max_new_tokens": 20, "eos_token_id": []}
        assert torch.equal(compiled.generate(tokens, mask, **options), eager.generate(tokens, mask, **options))
    assert counter.frame_count <= 4  # static and dynamic sizes, without and with padding


# A model as an object


@pytest.mark.parametrize("tied", [False, True])
def test_copies_and_pickles(device: str, tied: bool) -> None:
    model = llama(tie_word_embeddings=tied).to(device)
    tokens, _ = tokens_and_labels(2, 10, device)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(twin(tokens).logits, model(tokens).logits)
        assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == tied
        nn.init.zeros_(twin.model.norm.weight)
    assert model(tokens).logits.abs().max() > 0


def test_meta_model_can_be_initialized(device: str) -> None:
    with torch.device("meta"):
        model = llama(tie_word_embeddings=True)
    assert model.device.type == "meta"
    out = model(torch.empty(2, 10, dtype=torch.int64, device="meta"))
    assert out.logits.shape == (2, 10, VOCAB)
    model.to_empty(device=device)
    model.tie_weights()
    model.init_weights()
    reference = llama(tie_word_embeddings=True).to(device)
    reference.load_state_dict(model.state_dict())
    tokens, _ = tokens_and_labels(2, 10, device)
    assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_initializer_range() -> None:
    model = llama(hidden_size=64, vocab_size=500, attention_bias=True, mlp_bias=True, initializer_range=0.1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == ("norm" in name)).all(), name
        else:
            assert abs(parameter.std().item() - 0.1) < 0.01, name
            assert abs(parameter.mean().item()) < 0.01, name


def test_device_and_dtype() -> None:
    config = llama().config
    model = Llama(config, device="meta", dtype=torch.bfloat16)
    assert (model.device, model.dtype) == (torch.device("meta"), torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert dict(model.named_buffers()) == {}


def test_casting_the_model_keeps_rotary_angles(device: str) -> None:
    model = llama().to(device)
    positions = torch.arange(5000, 5040, device=device)[None]
    before = model.model.layers[0].self_attn.rotary(positions, torch.float32)
    after = model.to(torch.bfloat16).model.layers[0].self_attn.rotary(positions, torch.float32)
    assert all(map(torch.equal, before, after))
    assert model(torch.arange(40, device=device)[None]).logits.dtype == torch.bfloat16


def test_an_output_is_a_pytree() -> None:
    doubled = torch.utils._pytree.tree_map_only(Tensor, lambda t: 2 * t, CausalLMOutput(loss=torch.ones(())))
    assert doubled.loss == 2
    assert doubled.logits is None
