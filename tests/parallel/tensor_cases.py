"""What each process of `test_tensor.py` does."""

import dataclasses
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ligerzoo import AutoModel
from ligerzoo.adapters import add_lora
from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers import (
    Context,
    Decoder,
    Embedding,
    GatedAttention,
    LayerNorm,
    Linear,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    UngatedMLP,
)
from ligerzoo.layers.cache import LayerCache
from ligerzoo.models import CausalLM, Llama, LlamaConfig, Mixtral, MixtralConfig
from ligerzoo.parallel import (
    accumulating,
    load_optimizer,
    load_sharded,
    make_mesh,
    parallelize,
    save_optimizer,
    unsharded,
)
from ligerzoo.train.optimizers import clip_grad_norm
from tests.parallel.fsdp_cases import compare, files, full, gradients, labels_of, tiny


def part_of_data(mesh: DeviceMesh) -> slice:
    """Returns which batches this process trains."""
    shards = mesh["shard"].size()
    first = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard")
    return slice(first, None, shards * mesh["replicate"].size())


def batches(vocabulary: int, count: int = 4) -> list[dict[str, Tensor]]:
    generator, found = torch.Generator().manual_seed(0), []
    for number in range(count):
        ids = torch.randint(3, vocabulary, (1, 20 + number), generator=generator)
        found.append({"input_ids": ids, "labels": ids})
    return found


def equal_one_process(name: str, model: CausalLM, whole: CausalLM, mesh: DeviceMesh) -> None:
    """Losses and gradients, summed over the processes, with and without checkpointing; and logits."""
    every = batches(min(60, whole.config.vocab_size))
    own = every[part_of_data(mesh)]
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        expected_loss, expected = trained_gradients(whole, every, labels_of(every))
        loss, actual = trained_gradients(model, own, labels_of(every) * len(own) / len(every))
        mean = torch.tensor(loss)
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), torch.tensor(expected_loss), rtol=1e-5, atol=0)
        compare(actual, expected, name)
        norms = [clip_grad_norm(one, 0.1) for one in (model, whole)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
    ids = every[0]["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-4, atol=2e-5)


def trained_gradients(model: CausalLM, every: list[dict[str, Tensor]], items: float) -> tuple[float, dict[str, Tensor]]:
    """`gradients` of the parameters that train and got one."""
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    model.zero_grad()
    for weight in model.parameters():
        weight.grad = None
    total = 0.0
    for batch in every:
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        total += loss.item()
    assert all(weight.grad is None for weight in frozen)
    return total, {name: full(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def architectures(rank: int, directory: Path, mesh: str, saves: bool = False, only: Collection[str] = ()) -> None:
    """Each process reads its part, computes as one process, and the same files are saved."""
    parts = make_mesh(mesh)
    for name in only or sorted(path.name for path in (directory / "loaded").iterdir()):
        whole = AutoModel.from_pretrained(directory / "loaded" / name, dtype="float32").train()
        try:
            model = load_sharded(directory / "loaded" / name, parts, dtype="float32").train()
        except LigerzooError as error:
            # Tiny models have few heads for two axes, and few experts.
            if "heads that cannot be divided" not in str(error) and "cannot share equally" not in str(error):
                raise
            continue
        equal_one_process(name, model, whole, parts)
        if saves:
            saved = directory / "saved" / name
            model.save_pretrained(saved)
            assert files(saved) == files(directory / "expected" / name), name
            dist.barrier()


def refusals(rank: int) -> None:
    """What cannot be divided is refused by name, in all processes, before anything changes."""
    parts = make_mesh("tensor=2")
    for changes, message in (
        (
            {"num_attention_heads": 3, "head_dim": 4},
            r"layers\.0\.self_attn: has 3 heads, which 2 .* with a smaller tensor, or",
        ),
        ({"intermediate_size": 37}, r"model\.layers\.0\.mlp: has 37 intermediate features"),
    ):
        with pytest.raises(ConfigError, match=message):
            parallelize(Llama(tiny(**{"num_key_value_heads": 1, "intermediate_size": 36, **changes})), parts)
    for options, message in (
        ({"dropout": 0.1}, r"drops inputs of an adapter, .* a mesh without"),
        ({"dora": True}, "DoRA's norms"),
    ):
        model = new_model()
        add_lora(model, 2, 4, **options)
        with pytest.raises(ConfigError, match=message):
            parallelize(model, parts)
    model = parallelize(new_model(), parts)
    with pytest.raises(LigerzooError, match="output_attentions: attention probabilities of own heads only"):
        model(torch.arange(5)[None], output_attentions=True)


def new_model(**changes: Any) -> Llama:
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 4, "intermediate_size": 36, "initializer_range": 0.3}
    return Llama(tiny(**{**sizes, **changes})).train()


class Means(Linear):
    """A layer without a plan in which tokens see others: means of the earlier tokens' features."""

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:  # type: ignore[override]
        counts = torch.arange(1, context.tokens + 1)[:, None]
        return super().forward(x.view(context.rows, context.tokens, -1).cumsum(1) / counts)


class Own(CausalLM):
    """A model of existing layers, with biases, in a combination that no architecture has; or with `Means`."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, has_plan: bool) -> None:
        size, rotary = config.hidden_size, RotaryEmbedding(4)
        attention = partial(GatedAttention, size, 4, 2, rotary=rotary, qkv_bias=True, output_bias=True)
        mixer = attention if has_plan else partial(Means, size, size)
        blocks = [
            PreNormBlock(LayerNorm(size), mixer(), RMSNorm(size), UngatedMLP(size, 36, bias=True)) for _ in range(2)
        ]
        super().__init__(config, Decoder(Embedding(config.vocab_size, size), blocks, RMSNorm(size)))


def own_model(rank: int) -> None:
    """A model of existing layers has a plan. Processes divide its tokens unless a layer without a plan mixes them."""
    parts = make_mesh("tensor=2")
    for has_plan in (True, False):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Own(tiny(initializer_range=0.3), has_plan).train())
            for name, weight in models[-1].named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(weight, std=0.3)
        model = parallelize(models[0], parts)
        assert model.model.layers[0].mlp.up_proj.weight.to_local().shape == (18, 16)
        assert model.residual_parts.count == (2 if has_plan else 1)
        equal_one_process("own", model, models[1], parts)


def kept_bytes(model: CausalLM, ids: Tensor, level: Recompute) -> int:
    """Returns what autograd keeps of the tokens, 40 in all, in a forward."""
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.numel() % (ids.numel() // 2) == 0:  # no weight has such a size
            kept[x.untyped_storage().data_ptr()] = x
        return x

    model.model.activation_plan = (level,) * len(model.model.layers)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(ids, labels=ids)
    model.model.activation_plan = ()
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def tokens_between_layers(rank: int) -> None:
    """Processes divide them, evenly or not, but not with a cache; outputs and gradients are those of all tokens."""
    model, whole = parallelize(new_model(), "tensor=2"), new_model()
    shapes: list[torch.Size] = []
    hooks = [block.register_forward_pre_hook(lambda _, x: shapes.append(x[0].shape)) for block in model.model.layers]
    rows = torch.arange(21).view(3, 7)
    outputs: Any = {"output_hidden_states": True}
    for has_cache, shape in ((False, (1, 11, 16)), (True, (3, 7, 16))):
        with torch.no_grad():
            found, expected = (one(rows, use_cache=has_cache, **outputs) for one in (model, whole))
        assert shapes == [shape] * 3
        shapes.clear()
        states = ((one.logits, *one.hidden_states) for one in (found, expected))
        torch.testing.assert_close(*states, rtol=1e-4, atol=2e-5)
    batch = [{"input_ids": rows, "labels": rows}]
    _, actual = gradients(model, batch, 9)
    compare(actual, gradients(whole, batch, 9)[1], "rows")
    assert sum("norm" in name for name in actual) == 7
    for hook in hooks:
        hook.remove()
    ids = torch.arange(40).view(2, 20) % 33
    for level, share in ((Recompute.NOTHING, 0.62), (Recompute.ELEMENTWISE, 0.57), (Recompute.MLP, 0.57)):
        assert kept_bytes(model, ids, level) < share * kept_bytes(whole, ids, level), level


def adapters(rank: int) -> None:
    """LoRA of all linear layers, of the embedding and of the head."""
    parts = make_mesh("tensor=2")
    models = []
    for tied in (False, True):
        for _ in range(2):
            model = new_model(tie_word_embeddings=tied)
            targets = None if tied else ("layers", "embed_tokens", "lm_head")
            add_lora(model, 2, 4, targets)
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(weight, std=0.1)
            models.append(model)
        model, whole = models[-2:]
        equal_one_process(f"lora, tied={tied}", parallelize(model, parts), whole, parts)
    model, whole = new_model(), new_model()
    for one in (model, whole):
        torch.manual_seed(1)
        add_lora(one, 2, 4, ("q_proj", "up_proj"), dora=True)
        for name, weight in one.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    equal_one_process("DoRA of layers with divided outputs", parallelize(model, parts), whole, parts)


def exact_model() -> Llama:
    """Returns `new_model` in fp64: in fp32, its gradients differ by up to 7e-6 from the exact ones on some CPUs."""
    return new_model().double()


def accumulation_and_optimizer(rank: int, directory: Path) -> None:
    """Gradients accumulate; an optimizer's states are saved by one mesh and loaded by another, and by one process."""
    every = batches(33)
    model, whole = parallelize(exact_model(), "tensor=2"), exact_model()
    model.model.activation_plan = (Recompute.MLP,) * 3
    with accumulating(model):
        model(**every[0], num_items_in_batch=9).loss.backward()
    model(**every[1], num_items_in_batch=9).loss.backward()
    _, expected = gradients(whole, every[:2], 9)
    compare({name: full(weight.grad) for name, weight in model.named_parameters()}, expected, "accumulating")
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, whole)]
    for optimizer in optimizers:
        optimizer.step()
    save_optimizer(model, optimizers[0], directory / "optimizer")
    for other in (parallelize(exact_model(), "shard=2"), parallelize(exact_model(), "tensor=2"), exact_model()):
        again = torch.optim.AdamW(other.parameters(), lr=1e-2)
        load_optimizer(other, again, directory / "optimizer")
        for (name, mine), weight in zip(other.named_parameters(), whole.parameters(), strict=True):
            for key, value in again.state[mine].items():
                saved = optimizers[1].state[weight][key]
                torch.testing.assert_close(full(value), saved, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")
    state = whole.hf_state_dict()
    model.load_hf_state_dict(state)
    for name, weight in model.hf_state_dict().items():
        assert torch.equal(weight, state[name]), name
    with unsharded(model):
        got = model.generate(torch.arange(3, 9)[None], max_new_tokens=6, do_sample=False)
    assert torch.equal(got, whole.eval().generate(torch.arange(3, 9)[None], max_new_tokens=6, do_sample=False))


def experts(rank: int) -> None:
    """Experts with LoRA, one of which no token selects; and what cannot be divided."""
    config = MixtralConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        initializer_range=0.3,
    )
    for mesh in ("expert=2", "tensor=2"):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            # A loss of routers is that of each micro-batch: of other ones in processes with other tokens.
            model = Mixtral(dataclasses.replace(config, output_router_logits=mesh == "tensor=2")).train()
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.gate.weight[5:] = -10 * layer.mlp.gate.weight[:5].abs().sum(0)
            add_lora(model, 2, 4, ("experts", "q_proj"))
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(weight, std=0.1)
            models.append(model)
        parts = make_mesh(mesh)
        equal_one_process(mesh, parallelize(models[0], parts), models[1], parts)
    config = dataclasses.replace(config, num_experts=5)
    for mesh in ("expert=2", "tensor=2"):
        with pytest.raises(ConfigError, match=r"mlp\.experts: has 5 experts, which 2 processes cannot share equally"):
            parallelize(Mixtral(config), mesh)
    with pytest.raises(ConfigError, match=r"mesh expert: Llama has no layers to divide.* Use a mesh without expert\."):
        parallelize(new_model(), "expert=2")


def one_and_all(rank: int, directory: Path) -> None:
    """All cases of two processes, since starting them takes seconds."""
    refusals(rank)
    experts(rank)
    own_model(rank)
    adapters(rank)
    tokens_between_layers(rank)
    accumulation_and_optimizer(rank, directory)
    architectures(rank, directory, "tensor=2", saves=True)
    architectures(rank, directory, "expert=2", saves=True, only=("deepseek_v3",))
