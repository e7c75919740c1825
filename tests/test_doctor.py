"""`ligerzoo doctor`: what it finds on a CPU, and that a broken machine or model is named."""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import AutoModel, cli
from ligerzoo.convert import architecture_of
from ligerzoo.doctor import Certificate, Finding, default_models, exact, examine
from ligerzoo.doctor.exact import CHECKS, count_packed, count_placements, exact_findings, head_shapes, weights_by_shape
from ligerzoo.doctor.paths import path_findings
from ligerzoo.generate import Completion
from ligerzoo.layers import MoE, exactness, invariance
from ligerzoo.layers.cache import TokenCache
from ligerzoo.layers.exactness import check_exact
from ligerzoo.layers.invariance import (
    HeadShape,
    count_attention,
    count_experts,
    count_products,
    count_updates,
    expert_obstacles,
    machine_obstacles,
)
from ligerzoo.layers.lora import LoRAOptions
from ligerzoo.layers.masks import CausalMask
from ligerzoo.layers.moe import RouterLogits
from ligerzoo.models import CausalLM
from tests.models.tiny_gemma4_text import GEMMA4_TEXT

LLAMA = next(Path(cli.__file__).parents[1].rglob("tiny-python-llama"))
CPU = torch.device("cpu")


def small_models() -> list[CausalLM]:
    return [model for _, model in default_models(CPU, torch.float32)]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "2 layers of Llama 3.2 1B, small on device " in shown
    assert "2 layers of Qwen3 30B-A3B, small on device " in shown
    assert "not covered  plain torch computes on a CPU" in shown
    assert shown.count("nothing fails (") == 3


def test_json_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(LLAMA), "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"]
    [model] = report["models"]
    assert model["model"] == "tiny-python-llama"
    assert model["machine"]["torch"] == torch.__version__
    found = {(one["group"], one["name"]): one for one in model["findings"]}
    assert {name for group, name in found if group == "exact"} == {*CHECKS} - {"experts"}
    assert found["exact", "sampling"]["status"] == "not covered"
    assert "expected a Hopper GPU" in found["exact", "sampling"]["detail"]
    assert found["model", "KV cache"]["status"] == "holds"


def test_a_wrong_cache_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    append = TokenCache.append

    def loses_the_first_key(self: TokenCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = append(self, k, v)
        return torch.cat([keys[:, :1] * 0, keys[:, 1:]], 1), values

    monkeypatch.setattr(TokenCache, "append", loses_the_first_key)
    assert cli.main(["doctor", str(LLAMA), "--device", "cpu", "--dtype", "float32"]) == 1
    shown = capsys.readouterr().out
    assert "KV cache      fails" in shown
    assert "fails: KV cache (" in shown


def test_the_generators_of_torch_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    state, [model, *_] = torch.random.get_rng_state(), small_models()
    torch.random.set_rng_state(state)
    seen: list[Finding] = []
    certificate = examine(model, "model", report=seen.append)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert seen == certificate.findings
    assert certificate.holds


def row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """A product in which a row does not depend on the others."""
    rows = [weight @ row for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).view(*x.shape[:-1], len(weight))


def with_wrong_last_row(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
    y = row_by_row(x, weight).view(-1, len(weight))
    last = y[-1].nextafter(torch.tensor(torch.inf))
    return torch.cat([y[:-1], last[None]]) if len(y) > 100 else y


def cached_query_by_query(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor | None, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention in which a query does not depend on what else is in the call, and no logsumexp."""
    last = torch.arange(q.shape[1])[None] if last is None else last
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5 if scale is None else scale
    y = torch.empty_like(q)
    for row in range(len(q)):
        for token in range(q.shape[1]):
            end = int(last[min(row, len(last) - 1), token]) + 1
            for head in range(q.shape[2]):
                seen = slice(0 if window is None else max(0, end - window), end)
                scores = (k[row, seen, head // group].contiguous() * q[row, token, head]).sum(-1) * scale
                y[row, token, head] = (scores.softmax(0)[:, None] * v[row, seen, head // group].contiguous()).sum(0)
    return y, torch.empty(0)


def query_by_query(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    assert sinks is None
    return cached_query_by_query(q, k, v, None, scale, None if mask is None else mask.window)[0]


def test_products(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = list(weights_by_shape(small_models()[0]))
    assert len(weights) == len({weight.shape for weight in weights}) == 5
    monkeypatch.setattr(invariance, "linear", row_by_row)
    assert count_products(weights, random.Random(0), rows=200)[:2] == (0, 40)
    monkeypatch.setattr(invariance, "linear", with_wrong_last_row)
    count = count_products(weights, random.Random(0), rows=200)
    assert 0 < count.differing < count.total
    assert str(count) == f"{count.differing} of 40 products of some rows differ"


def test_products_with_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_bits_in_few_rows(limit: int, x: Tensor, weights: list[Tensor], *_: Any) -> tuple[Tensor]:
        return (row_by_row(x, *weights) + (len(x) <= limit),)

    weights = [torch.randn(12, 16), torch.randn(5, 16)]
    for limit, expected in ((0, 0), (1, 8), (64, 16)):
        monkeypatch.setattr(invariance, "compute_lora_linears", partial(other_bits_in_few_rows, limit))
        count = count_updates(weights, [(2, 0.5), (8, 2.0)], random.Random(0), rows=80)
        assert count[:2] == (expected, 32)


@pytest.mark.parametrize("window", [None, 20])
def test_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def sees_padding(q: Tensor, *others: Any, sinks: Tensor | None) -> Tensor:
        return query_by_query(q, *others, sinks=sinks) + 1e-3 * (len(q) - 1)

    def others(*arguments: Any) -> tuple[Tensor, Tensor]:
        y, lse = cached_query_by_query(*arguments)
        return y * 1.001, lse

    like, shape = torch.empty(0), HeadShape(2, 1, 64, window=window)
    monkeypatch.setattr(invariance, "MAX_PADDING", 3)
    for attend, cached, expected in (
        (query_by_query, cached_query_by_query, 0),
        (sees_padding, cached_query_by_query, 6),
        (query_by_query, others, 6),
    ):
        monkeypatch.setattr(invariance, "attend", attend)
        monkeypatch.setattr(invariance, "exact_attention_with_lse", cached)
        count = count_attention(like, shape, random.Random(0), draws=6, most=210)
        assert count[:2] == (expected, 12)


class TokenByToken(MoE):
    """Experts that compute each token alone, but for those of calls of few tokens, or with gradients."""

    limit, with_gradients = 0, 0.0

    def forward(self, x: Tensor, context: RouterLogits | None = None) -> Tensor:
        y = torch.cat([MoE.forward(self, token, context) for token in x.split(1)])
        return y + float(len(x) <= self.limit) + self.with_gradients * torch.is_grad_enabled()


@pytest.mark.parametrize(("changes", "expected"), [({}, 0), ({"limit": 64}, 6), ({"with_gradients": 1.0}, 5)])
def test_experts(changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    [layer, *_] = [part for part in small_models()[2].modules() if isinstance(part, MoE)]
    layer.__class__ = TokenByToken
    for name, value in changes.items():
        setattr(layer, name, value)
    assert count_experts([layer], random.Random(0), rows=80)[:2] == (expected, 10)
    monkeypatch.setattr(invariance, "QUICK_ROWS", 80)
    monkeypatch.setattr(invariance, "_OF_EXPERTS", {})
    found = [f"{expected} of 10 mixtures of experts of some tokens differ"] if expected else []
    assert list(expert_obstacles([layer, layer], CPU)) == found
    monkeypatch.setattr(invariance, "count_experts", None)  # checked once
    assert list(expert_obstacles([layer], CPU)) == found


def test_head_shapes() -> None:
    shapes = [head_shapes(model) for model in small_models()]
    assert shapes == [[HeadShape(2, 1, 64)], [HeadShape(2, 1, 128)], [HeadShape(2, 1, 128)]]


def test_what_a_gpu_gets_wrong_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    layer = SimpleNamespace(
        head_dim=64, window=4096, attention_call=None, lora={"weight": LoRAOptions(rank=8, alpha=4)}
    )
    needs = gpu, {HeadShape(8, 2, 64, window=96)}, {(8, 0.5)}
    module: Any = SimpleNamespace(
        parameters=lambda: iter([SimpleNamespace(device=gpu)]), modules=lambda: iter([layer, SimpleNamespace()])
    )
    found: tuple[str, ...] = ("3 of 24 products of some rows differ",)
    monkeypatch.setattr(exactness, "obstacles", lambda *_: iter(()))
    monkeypatch.setattr(exactness, "machine_obstacles", lambda *given: found if given == needs else ("others",))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    message = r"^exact cache: cuda:0 with torch \S+, cuDNN \w+ gives other bits: 3 of 24 products .*`ligerzoo doctor`"
    with pytest.raises(ValueError, match=message):
        check_exact(module)
    found = ()
    check_exact(module)


def test_the_quick_check_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "SHAPES", ((8, 16),))
    monkeypatch.setattr(invariance, "QUICK_ROWS", 70)
    monkeypatch.setattr(invariance, "linear", row_by_row)
    machine_obstacles.cache_clear()
    first = machine_obstacles(CPU, frozenset({HeadShape(8, 2, 64)}))
    assert all("texts" in one for one in first)  # rows of products are equal; attention on a CPU has other bits
    monkeypatch.setattr(invariance, "linear", with_wrong_last_row)
    assert machine_obstacles(CPU, frozenset({HeadShape(8, 2, 64)})) is first
    machine_obstacles.cache_clear()


class Bigrams:
    """A model whose logits depend on one token alone, so that they are exact."""

    input_vocab_size, device, placeholders = 50, CPU, {7: "pixel_values"}
    config = SimpleNamespace(max_position_embeddings=900)

    def __init__(self) -> None:
        self.table = torch.randn(50, 50)
        self.calls = 0

    def modules(self) -> Iterator[Any]:
        return iter(())

    def __call__(self, ids: Tensor, position_ids: Tensor | None = None, *, exact: bool) -> Any:
        assert exact
        assert not (ids == 7).any()
        assert position_ids is not None or ids.shape[1] <= 900
        return SimpleNamespace(logits=self.table[ids])

    def generate_many(self, prompts: list[list[int]], **options: Any) -> Iterator[Completion]:
        assert options["exact"]
        for index in reversed(range(len(prompts))):
            self.calls += 1
            tokens = [index % 50] * options["max_new_tokens"]
            yield Completion(index, tokens, [-1.0] * len(tokens), "length")


class WrongInLongRows(Bigrams):
    def __call__(self, ids: Tensor, position_ids: Tensor | None = None, *, exact: bool) -> Any:
        logits = self.table[ids]
        return SimpleNamespace(logits=logits if position_ids is None else logits.nextafter(torch.tensor(torch.inf)))


def test_packed_rows() -> None:
    model: Any = Bigrams()
    count = count_packed(model, random.Random(0))
    assert count.differing == 0 < count.total
    model = WrongInLongRows()
    count = count_packed(model, random.Random(0))
    assert count.differing == count.total


@pytest.mark.parametrize("is_wrong", [False, True])
def test_placements(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []

    def logps(model: Any, batch: Any) -> Tensor:
        batches.append(batch)
        found: Tensor = batch.sampler_logps.clone()
        if is_wrong and len(batches) == 1:
            found[0, 0] = found[0, 0].nextafter(torch.tensor(0.0))
        return found

    monkeypatch.setattr(exact, "completion_logps", logps)
    model: Any = Bigrams()
    count = count_placements(model, 50, random.Random(0))
    assert count.differing == is_wrong
    assert model.calls == 50
    assert all(batch.exact for batch in batches)
    assert sum(len(batch.completions) for batch in batches) == 50
    assert max(batch.inputs["input_ids"].shape[1] for batch in batches) > 300
    assert count.what == "log-probabilities of 50 sampled texts"


def test_a_refused_machine_leaves_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exact=True refuses, the certificate says which bits differ."""
    [*_, model] = small_models()
    for name, differing in (("count_products", 1), ("count_attention", 0), ("count_experts", 0), ("count_packed", 0)):
        count = invariance.Count(differing, 9, name)
        monkeypatch.setattr(exact, name, lambda *_, count=count: count)
    monkeypatch.setattr(exact, "obstacles", lambda *_: iter(()))
    findings = {one.name: one for one in exact_findings(model, 3, random.Random(0))}
    assert [findings[name].status for name in CHECKS] == ["fails", "holds", "holds", "holds", "not covered"]
    assert "expected a Hopper GPU" in findings["sampling"].detail
    certificate = Certificate("model", {}, list(findings.values()), 1.0)
    assert not certificate.holds
    assert "fails: products (1 s)" in str(certificate)


def test_a_model_with_per_layer_embeddings() -> None:
    """It reads token ids only."""
    config = architecture_of("gemma4_text").config_from_hf(GEMMA4_TEXT)
    found = list(path_findings(AutoModel.from_config(config), random.Random(0)))
    assert {(one.name, one.status) for one in found} == {
        (name, "holds") for name in ("packed row", "left padding", "KV cache")
    }
