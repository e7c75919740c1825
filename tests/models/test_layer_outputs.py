"""Hidden states, attention probabilities and router logits against transformers'."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedModel

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from ligerzoo.integrations.transformers.versions import CACHE
from ligerzoo.layers import Attention, LatentAttention
from ligerzoo.models import CausalLM, CausalLMOutput, Llama, LlamaConfig, Mixtral, MixtralConfig
from tests.covering import every_backend
from tests.models import prompts, tiny_mllama
from tests.models.comparing import assert_close, gradients, load_both
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS, TEXT_CHECKPOINTS

GRANITE_SWASH = "granite_swa", "granitemoe_swa"
ALL = {"output_hidden_states": True, "output_attentions": True}

pytestmark = [
    pytest.mark.every_layer,
    # transformers 5.17 uses a deprecated name of a tower.
    pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning"),
]


def of_every_kind(rows: list[Tiny]) -> Iterator[Tiny]:
    """Yields one checkpoint per architecture and, where it has both, per kind of attention."""
    taken = set()
    for row in rows:
        window = row.config.get("sliding_window")
        kind = (
            row.config["model_type"],
            window is not None and window < row.tokens and row.config.get("use_sliding_window", True),
            row.config.get("attn_logit_softcapping"),
            row.config.get("use_bidirectional_attention"),
        )
        is_misleading = "unknown entries" in row.name  # transformers' caches read entries that the model ignores
        if kind not in taken and not row.rotation_depends_on_length and not is_misleading:
            taken.add(kind)
            yield row


@pytest.fixture(scope="module", params=list(of_every_kind(TEXT_CHECKPOINTS)), ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    row: Tiny = request.param
    return row


@pytest.fixture(scope="module")
def models(directory: Path, device: str) -> tuple[CausalLM, PreTrainedModel]:
    return load_both(directory, torch.float32, device, AutoModelForCausalLM)


def tokens_for(tiny: Tiny, device: str) -> Tensor:
    return torch.randint(tiny.config["vocab_size"], (2, tiny.tokens), device=device)


def options_for(theirs: PreTrainedModel) -> dict[str, bool]:
    has_router = "num_experts_per_tok" in theirs.config.to_dict()
    return {**ALL, "output_router_logits": True} if has_router else ALL


def without_shares_of_sinks(tiny: Tiny, outputs: CausalLMOutput) -> CausalLMOutput:
    """The sum of attention weights is 1 in transformers' Granite Swash; in ours, as in gpt-oss, sinks have a share."""
    if tiny.config["model_type"] not in GRANITE_SWASH:
        return outputs
    return replace(outputs, attentions=tuple(x / x.sum(-1, keepdim=True) for x in outputs.attentions or ()))


def assert_same_outputs(ours: CausalLMOutput, theirs: Any, rows: Tensor | None = None) -> None:
    """Compares each tensor of each list; of hidden states and attentions only the `rows`, (B, T) bool, if given."""
    for name in ("hidden_states", "attentions", "router_logits"):
        got, expected = ours.get(name), theirs.get(name)
        if name == "router_logits" and expected is None and Version(transformers.__version__) < Version("5.23"):
            continue  # it returns them only with a load-balancing loss
        assert (got is None) == (expected is None), name
        assert got is None or isinstance(got, tuple)
        assert len(got or ()) == len(expected or ()), name
        for i, (mine, other) in enumerate(zip(got or (), expected or (), strict=True)):
            if name == "attentions" and (dropped := mine.shape[-1] - other.shape[-1]) > 0:  # by caches of chunks
                assert not mine[..., :dropped].any()
                mine = mine[..., dropped:]
            assert mine.shape == other.shape, f"{name} {i}"
            if rows is not None and name != "router_logits":
                mine, other = (x[rows] if x.ndim == 3 else x.transpose(1, 2)[rows] for x in (mine, other))
            if rows is not None and name == "router_logits":
                mine, other = mine[rows.flatten()], other[rows.flatten()]
            assert_close(mine, other, f"{name} {i}")


@pytest.mark.parametrize("padded", [False, True])
def test_outputs_are_those_of_transformers(
    tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str, padded: bool
) -> None:
    ours, theirs = models
    tokens, options = tokens_for(tiny, device), options_for(theirs)
    mask = torch.ones_like(tokens)
    if padded and tiny.config["model_type"] != "llama4_text":  # whose queries count padding in transformers
        mask[1, :7] = 0
    with torch.no_grad():
        got = ours(tokens, attention_mask=mask, **options)
        expected = theirs(tokens, attention_mask=mask, **tiny.positions(mask), **options)
    # On a GPU, our padding on the left attends to itself; with sinks, to nothing.
    all_rows = device == "cpu" and tiny.config["model_type"] not in GRANITE_SWASH
    assert_same_outputs(without_shares_of_sinks(tiny, got), expected, None if all_rows else mask.bool())
    assert_close(got.logits[mask == 1], expected.logits[mask == 1], "logits")
    layers = ours.config.num_hidden_layers
    attentions = sum(isinstance(module, Attention | LatentAttention) for module in ours.modules())
    assert (len(got.hidden_states), len(got.attentions)) == (layers + 1, attentions)
    heads, size = ours.config.num_attention_heads, tokens.shape[1]
    assert {tuple(x.shape) for x in got.attentions} == {(2, heads, size, size)}
    plain = ours(tokens, attention_mask=mask)
    assert_close(got.logits[mask == 1], plain.logits[mask == 1], "logits of the fused kernels")
    assert (plain.hidden_states, plain.attentions) == (None, None)


def test_gradients_through_hidden_states(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str) -> None:
    tokens = tokens_for(tiny, device)
    leaves = []
    for model in models:
        model.zero_grad()
        states = model(tokens, output_hidden_states=True).hidden_states
        sum(state.square().mean() * (i + 1) for i, state in enumerate(states)).backward()
        leaves.append(model.get_input_embeddings().weight.grad)
    assert_close(*leaves, "gradient of the embedding")
    first_layers = [model.model.layers[0] for model in models]
    assert all(any(p.grad is not None for p in layer.parameters()) for layer in first_layers)


@torch.no_grad()
def test_outputs_with_a_cache(tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str) -> None:
    """The prompt in two chunks, then single tokens."""
    ours, theirs = models
    if tiny.config.get("use_bidirectional_attention"):
        return  # transformers' caches are for causal attention
    tokens, options = tokens_for(tiny, device)[:1], options_for(theirs)
    # OLMoE ignores `sliding_window`, but caches made for its config do not.
    theirs_has_windows = tiny.config["model_type"] != "olmoe"
    cache, their_cache = ours.new_cache(), DynamicCache(config=theirs.config if theirs_has_windows else None)
    chunks = [20, 1, 1, 9, tiny.tokens - 31]
    for chunk in tokens.split(chunks, 1):
        positions = torch.arange(cache.length, cache.length + chunk.shape[1], device=device)[None]  # Bamba needs them
        got = ours(chunk, past_key_values=cache, **options)
        expected = theirs(chunk, **{CACHE: their_cache}, use_cache=True, position_ids=positions, **options)
        assert_same_outputs(without_shares_of_sinks(tiny, got), expected)


@torch.no_grad()
def test_packed_segments_have_the_outputs_of_each_alone(
    tiny: Tiny, models: tuple[CausalLM, PreTrainedModel], device: str
) -> None:
    model, _ = models
    tokens = tokens_for(tiny, device)[:1]
    bounds = [0, 17, tiny.tokens]
    packed = model(tokens, cu_seqlens=torch.tensor(bounds, device=device), **ALL)
    for first, last in pairwise(bounds):
        alone = model(tokens[:, first:last], **ALL)
        for got, expected in zip(packed.hidden_states, alone.hidden_states, strict=True):
            assert_close(got[:, first:last], expected, "hidden states")
        for got, expected in zip(packed.attentions, alone.attentions, strict=True):
            assert_close(got[..., first:last, first:last], expected, "attentions")
            assert not got[..., first:last, :first].any()


# Vision-language models: the outputs of the decoder


def first_of(model_type: str) -> Tiny:
    return next(row for row in CHECKPOINTS if row.config["model_type"] == model_type)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe"])
@torch.no_grad()
def test_outputs_of_qwen_with_images(model_type: str, tmp_path: Path, device: str) -> None:
    row = first_of(model_type)
    row.write(tmp_path)
    ours, theirs = load_both(tmp_path, torch.float32, device, AutoModelForImageTextToText)
    for rows in prompts.PROMPTS.values():
        p = prompts.prompt(rows, vars(ours.config.vision_config))
        vision = {name: tensor.to(device) for name, tensor in p.vision.items()}
        types = {"mm_token_type_ids": p.types.to(device)} if vision else {}
        ids, mask = p.ids.to(device), p.mask.to(device)
        expected = theirs(input_ids=ids, attention_mask=mask, **vision, **types, **ALL)
        assert_same_outputs(ours(ids, mask, **vision, **ALL), expected, mask.bool())


@pytest.mark.parametrize("layers", [None, [1]])
@torch.no_grad()
def test_outputs_of_mllama(tmp_path: Path, device: str, layers: list[int] | None) -> None:
    """Without images, cross-attention layers have no outputs. With `layers`, the last layer is one of them."""
    row = first_of("mllama")
    if layers is not None:
        text = {**row.config["text_config"], "num_hidden_layers": 2, "cross_attention_layers": layers}
        row = Tiny("mllama", {**row.config, "text_config": text}, row.tensors)
    row.write(tmp_path)
    ours, theirs = load_both(tmp_path, torch.float32, device, AutoModelForImageTextToText)
    for rows in tiny_mllama.PROMPTS.values():
        p = tiny_mllama.prompt(rows, vars(ours.config.vision_config))
        vision = {name: tensor.to(device) for name, tensor in p.vision.items()}
        ids, mask = p.ids.to(device), p.mask.to(device)
        expected = theirs(input_ids=ids, attention_mask=mask, **vision, **ALL)
        got = ours(ids, mask, **vision, **ALL)
        skipped = 0 if vision else len(ours.config.cross_attention_layers)
        assert len(got.attentions) == ours.config.num_hidden_layers - skipped
        assert_same_outputs(got, expected, mask.bool())


@torch.no_grad()
def test_outputs_of_gemma3_with_text(tmp_path: Path, device: str) -> None:
    first_of("gemma3").write(tmp_path)
    ours, theirs = load_both(tmp_path, torch.float32, device, AutoModelForImageTextToText)
    tokens = torch.randint(3, 80, (2, 30), device=device)
    assert_same_outputs(ours(tokens, **ALL), theirs(input_ids=tokens, **ALL))


# Modes


SIZES: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(params=["dense", "mixture"])
def model(request: pytest.FixtureRequest, device: str) -> CausalLM:
    small = Llama(LlamaConfig(**SIZES)) if request.param == "dense" else Mixtral(MixtralConfig(**SIZES, num_experts=4))
    return small.to(device)


def asked(model: CausalLM) -> dict[str, bool]:
    return {**ALL, "output_router_logits": True} if isinstance(model, Mixtral) else ALL


def loss_of_outputs(out: CausalLMOutput) -> Tensor:
    tensors = [*out.hidden_states, *out.attentions, *(out.router_logits or ())]
    loss: Tensor = out.loss + sum(tensor.square().sum() * 0.01 * (i + 1) for i, tensor in enumerate(tensors))
    return loss


def test_activation_checkpointing_changes_nothing(model: CausalLM, device: str) -> None:
    tokens = torch.randint(70, (2, 20), device=device)
    found = []
    for enabled in (False, True):
        model.zero_grad()
        (model.gradient_checkpointing_enable if enabled else model.gradient_checkpointing_disable)()
        out = model(tokens, labels=tokens, **asked(model))
        loss_of_outputs(out).backward()
        found.append((out, gradients(model)))
    (plain, expected), (checkpointed, got) = found
    for name in ("hidden_states", "attentions", "router_logits"):
        assert len(plain.get(name, ())) == len(checkpointed.get(name, ()))
        assert all(map(torch.equal, plain.get(name, ()), checkpointed.get(name, ())))
    assert got.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in expected.items():
        assert_close(got[name], gradient, name)


@every_backend
@pytest.mark.parametrize(
    "model, recompute",
    [
        ("dense", True),
        pytest.param("mixture", False, marks=pytest.mark.thorough),
        pytest.param("dense", False, marks=pytest.mark.thorough),
        pytest.param("mixture", True, marks=pytest.mark.thorough),
    ],
    indirect=["model"],
)
def test_compiled_into_one_graph(model: CausalLM, device: str, recompute: bool, backend: str) -> None:
    tokens = torch.randint(70, (2, 20), device=device)
    expected = model(tokens, labels=tokens, **asked(model))
    loss_of_outputs(expected).backward()
    required = gradients(model)
    model.zero_grad()
    if recompute:
        model.gradient_checkpointing_enable()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    got = torch.compile(model, backend=counter, fullgraph=True)(tokens, labels=tokens, **asked(model))
    assert counter.frame_count == 1
    assert list(got) == list(expected)
    assert (len(got.hidden_states), len(got.attentions)) == (3, 2)
    loss_of_outputs(got).backward()
    for name, gradient in gradients(model).items():
        assert_close(gradient, required[name], name)


def test_router_logits_override_the_config(device: str) -> None:
    tokens = torch.randint(70, (2, 20), device=device)
    for default in (False, True):
        config = MixtralConfig(**SIZES, num_experts=4, output_router_logits=default, router_aux_loss_coef=3.0)
        model = Mixtral(config).to(device)
        without, with_it = (model(tokens, labels=tokens, output_router_logits=flag) for flag in (False, True))
        assert (without.router_logits, without.aux_loss) == (None, None)
        assert [tuple(x.shape) for x in with_it.router_logits] == [(40, 4)] * 2
        assert torch.equal(with_it.loss, without.loss + 3 * with_it.aux_loss)
        assert torch.equal(model(tokens, labels=tokens).loss, (with_it if default else without).loss)


@pytest.mark.parametrize(
    "asked_for, message",
    [
        ({"output_router_logits": True}, "output_router_logits: no layer of Llama has router logits"),
        ({"output_hidden_states": 1}, "output_hidden_states: not a flag; got 1; expected True, False or None"),
        ({"output_attention": True}, "output_attention: not an input of Llama. Did you mean 'output_attentions'"),
    ],
)
def test_what_cannot_be_given_is_refused(asked_for: dict[str, Any], message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        Llama(LlamaConfig(**SIZES))(torch.arange(5)[None], **asked_for)


def test_attentions_of_layers_that_compute_none_are_refused() -> None:
    class Identity(torch.nn.Module):
        def forward(self, x: Tensor, context: Any, cache: Any = None) -> Tensor:
            return x

    model = AutoModel.from_config(LlamaConfig(**SIZES))
    model.model.layers = torch.nn.ModuleList([Identity()])
    with pytest.raises(LigerzooError, match="output_attentions: no layer of Llama has attentions"):
        model(torch.arange(5)[None], output_attentions=True)
