"""Sample arguments of the registered ops, by keyword: layouts, dtypes, empty inputs, and results not needed."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels import ClampedSwiGLU, Ungated, pack_documents, route
from ligerzoo.kernels.causal_conv import ConvInputs
from ligerzoo.kernels.decode_attention import VisibleKeys
from ligerzoo.kernels.delta_chunks import Inputs, Prepared
from ligerzoo.kernels.experts import ExpertSlots, Hidden, Projection, _Needs
from ligerzoo.kernels.few_rows import _Three as Three
from ligerzoo.kernels.fused_attention import TorchAttention, attention_kernel
from ligerzoo.kernels.gated_rms_norm import _Needs as GatedNormNeeds
from ligerzoo.kernels.gated_rms_norm import _Options as GatedNormOptions
from ligerzoo.kernels.gating import gating
from ligerzoo.kernels.glu import _Needs as GLUNeeds
from ligerzoo.kernels.jit import INTERPRETING
from ligerzoo.kernels.layer_norm import _Needs as LayerNormNeeds
from ligerzoo.kernels.low_rank import LowRankTerms
from ligerzoo.kernels.packed_attention import _Results as Results
from ligerzoo.kernels.registration import OPS
from ligerzoo.kernels.rms_norm import _Needs as RMSNormNeeds
from ligerzoo.kernels.rms_norm import _Options as Options
from ligerzoo.kernels.route import SigmoidOptions
from ligerzoo.kernels.row_sums import LowRankTerm
from ligerzoo.kernels.sampling import _Bounds as Bounds
from ligerzoo.kernels.sampling import _Drawing as Drawing
from ligerzoo.kernels.ssd_chunks import SSDInputs
from ligerzoo.kernels.ssd_gates import GateInputs
from ligerzoo.kernels.weighted_glu import Biases
from ligerzoo.kernels.xielu import _Numbers as XIELUNumbers
from tests.kernels.layouts import transposed
from tests.kernels.oracles import angles, numbers

Samples = list[dict[str, Any]]


def new(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(*shape, dtype=dtype, device=device).detach()


_LLAMA, _GEMMA = Options(1e-6, 0.0, True), Options(1e-6, 1.0, False)


def _rms_norm_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    return [
        {"x": t(5, 33), "weight": t(33), "options": _LLAMA},
        {"x": transposed(t(2, 3, 33)), "weight": half(33), "options": _LLAMA},
        {"x": half(5, 33), "weight": t(33), "options": _GEMMA},
        {"x": half(5, 33), "weight": None, "options": _LLAMA},
        {"x": t(0, 33), "weight": t(33), "options": _LLAMA},
    ]


def _add_rms_norm_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    return [
        {"x": t(5, 33), "residual": t(5, 33), "weight": t(33), "options": _LLAMA},
        {"x": half(2, 3, 33), "residual": transposed(t(2, 3, 33)), "weight": t(33), "options": _GEMMA},
        {"x": t(5, 33), "residual": half(5, 33), "weight": None, "options": _LLAMA},
        {"x": t(0, 33), "residual": t(0, 33), "weight": t(33), "options": _LLAMA},
    ]


def _rms_norm_backward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    common = {"dy": t(5, 33), "dsummed": t(5, 33), "x": t(5, 33), "weight": t(33), "rstd": t(5).abs()}
    common |= {"options": _LLAMA, "needs": RMSNormNeeds(True, True)}
    empty = {"dy": t(0, 33), "dsummed": None, "x": t(0, 33), "rstd": t(0)}
    batched = {"dy": transposed(t(2, 3, 33)), "dsummed": t(2, 3, 33), "x": half(2, 3, 33), "rstd": t(2, 3)}
    return [
        common | {"dsummed": None},
        common | batched | {"options": _GEMMA, "needs": RMSNormNeeds(True, False)},
        common | {"needs": RMSNormNeeds(False, True)},
        common | {"x": half(5, 33), "weight": None, "needs": RMSNormNeeds(True, False)},
        common | empty,
    ]


def _layer_norm_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    return [
        {"x": t(5, 33), "weight": t(33), "bias": t(33), "eps": 1e-5},
        {"x": transposed(t(2, 3, 33)), "weight": half(33), "bias": None, "eps": 1e-5},
        {"x": t(0, 33), "weight": t(33), "bias": t(33), "eps": 1e-5},
    ]


def _layer_norm_backward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    common = {"dy": t(5, 33), "x": t(5, 33), "weight": t(33), "mean": t(5), "rstd": t(5).abs()}
    common |= {"needs": LayerNormNeeds(True, True, True)}
    batched = {"dy": transposed(t(2, 3, 33)), "x": half(2, 3, 33), "mean": t(2, 3), "rstd": t(2, 3)}
    return [
        common,
        common | batched | {"needs": LayerNormNeeds(False, True, False)},
        common | {"needs": LayerNormNeeds(True, False, True)},
        common | {"dy": t(0, 33), "x": t(0, 33), "mean": t(0), "rstd": t(0)},
    ]


def _rope(device: str) -> Samples:
    q, k = new(2, 3, 4, 8, device=device), new(2, 3, 2, 8, device=device)
    shared, per_sequence = (
        dict(zip(("cos", "sin"), angles(batch, 3, 3, device=device), strict=True)) for batch in (1, 2)
    )
    no_tokens = {name: angle[:, :0] for name, angle in shared.items()}
    return [
        {**shared, "q": q, "k": k, "interleaved": False, "inverse": False},
        {**per_sequence, "q": q.half(), "k": transposed(k), "interleaved": True, "inverse": True},
        {**shared, "q": None, "k": k, "interleaved": True, "inverse": False},
        {**shared, "q": q, "k": None, "interleaved": False, "inverse": True},
        {**no_tokens, "q": q[:, :0], "k": k[:, :0], "interleaved": False, "inverse": True},
    ]


def _glu_forward(device: str) -> Samples:
    t = partial(new, device=device)
    return [
        {"gate": t(5, 33), "up": t(5, 33), "activation": "silu", "dtype": torch.float32},
        {"gate": transposed(t(2, 3, 33)), "up": t(2, 3, 33), "activation": "gelu_tanh", "dtype": torch.float16},
        {"gate": t(0, 33), "up": t(0, 33), "activation": "gelu", "dtype": torch.float32},
    ]


def _glu_backward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    common = {"dy": t(5, 33), "gate": t(5, 33), "up": t(5, 33), "activation": "silu"}
    batched = {"dy": half(2, 3, 33), "gate": transposed(t(2, 3, 33)), "up": t(2, 3, 33), "activation": "gelu_tanh"}
    empty = {"dy": t(0, 33), "gate": t(0, 33), "up": t(0, 33), "activation": "gelu"}
    return [
        {**common, "needs": GLUNeeds(True, False, True)},
        {**batched, "needs": GLUNeeds(False, True, False)},
        {**empty, "needs": GLUNeeds(True, True, True)},
    ]


def _activation_forward(device: str) -> Samples:
    t = partial(new, device=device)
    return [
        {"x": t(5, 33), "activation": "quick_gelu", "dtype": torch.float32},
        {"x": transposed(t(2, 3, 33)), "activation": "gelu_tanh", "dtype": torch.float16},
        {"x": t(0, 33), "activation": "gelu", "dtype": torch.float32},
    ]


def _activation_backward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    return [
        {"dy": t(5, 33), "x": t(5, 33), "activation": "quick_gelu", "needs_y": True},
        {"dy": transposed(half(2, 3, 33)), "x": t(2, 3, 33), "activation": "gelu_tanh", "needs_y": False},
        {"dy": t(0, 33), "x": t(0, 33), "activation": "gelu", "needs_y": True},
    ]


def _visible_keys(device: str, padding_mask: Tensor) -> VisibleKeys:
    index = torch.tensor([1, 2], device=device)
    return VisibleKeys(index, index + 60, padding_mask, index + 60)


def _decode_attention(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    none = {"visible": VisibleKeys(), "scale": 1.0, "softcap": None, "sinks": None}
    some = {"visible": _visible_keys(device, t(2, 70) > 0), "scale": 0.5, "softcap": 2.0, "sinks": t(4)}
    return [
        {"q": t(2, 4, 16), "keys": t(2, 2, 70, 16), "values": t(2, 2, 70, 16), **none},
        {"q": half(2, 4, 16), "keys": half(2, 70, 2, 16).transpose(1, 2), "values": half(2, 2, 70, 16), **none},
        {"q": t(2, 4, 16), "keys": t(2, 2, 70, 16), "values": t(2, 2, 70, 16), **some},
    ]


def _exact_attention(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.float16)
    last = torch.tensor([[3, 4, 5], [128, 129, 130]], device=device)
    return [
        {
            "q": t(2, 3, 6, 64), "keys": t(2, 140, 2, 64), "values": t(2, 140, 2, 64), "last": last, "scale": 0.2,
            "window": None,
        },
        {
            "q": t(2, 1, 2, 128), "keys": t(2, 2, 9, 128).transpose(1, 2), "values": t(2, 9, 2, 128),
            "last": last[:1, :1], "scale": 1.0, "window": 3,
        },
    ]  # fmt: skip


def _few_rows(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.bfloat16)
    empty = {"biases": Three(), "scales": Three(), "activation": None, "splits": False}
    int8 = torch.arange(-70, 70, dtype=torch.int8, device=device).view(7, 20)
    quantized = {"weights": Three(int8, -int8), "scales": Three(*(torch.full((7,), 0.01, device=device) for _ in "01"))}
    biases = {"biases": Three(t(7), t(7))}
    return [
        empty | {"x": t(1, 20), "weights": Three(t(7, 20))},
        empty | {"x": t(1, 20), "weights": Three(t(7, 20)), "splits": True},
        empty | {"x": t(3, 20), "weights": Three(t(7, 20), t(2, 20), t(33, 20))},
        empty | {"x": t(2, 3, 20), "weights": Three(t(7, 20), t(2, 20))},
        empty | {"x": t(3, 20), "weights": Three(t(7, 20), t(7, 20)), "activation": "silu"} | biases,
        empty | {"x": t(3, 20)} | quantized,
        empty | {"x": t(1, 20), "activation": "gelu"} | biases | quantized,
    ]


def _ordered_product(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.float16)
    return [
        {"x": t(3, 20), "weight": t(1, 20), "bias": None, "term": LowRankTerm()},
        {
            "x": t(1, 20),
            "weight": transposed(t(7, 20)),
            "bias": t(7),
            "term": LowRankTerm(t(1, 9)[:, :3], t(7, 3), 2.0),
        },
    ]


def _add_low_rank_term(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.float16)
    return [
        {"x": t(3, 20), "term": LowRankTerm(t(3, 9)[:, :3], new(20, 3, device=device), 2.0)},
        {"x": t(2, 140)[:, :135], "term": LowRankTerm(t(2, 70), t(135, 70), 0.5)},
    ]


def _filter_bounds(device: str) -> Samples:
    t = partial(new, device=device)
    ones, top_k = torch.ones(3, device=device), torch.tensor([2, 40, 3], device=device)
    return [
        {"logits": t(3, 33), "temperature": ones, "top_k": top_k, "top_p": 0.5 * ones, "min_p": 0.1 * ones},
        {"logits": t(3, 66).half()[:, ::2], "temperature": ones, "top_k": top_k, "top_p": ones, "min_p": 0 * ones},
    ]


def _sample_tokens(device: str) -> Samples:
    t = partial(new, device=device)
    index = torch.tensor([1, 2, 5], device=device)
    none = {"scores": None, "drawing": Drawing(None, None, None), "bounds": Bounds(None, None)}
    drawing = {"drawing": Drawing(index, index, torch.tensor([0.5, 0.0, 2.0], device=device))}
    return [
        none | {"logits": t(3, 33)},
        none | {"logits": t(3, 2500)} | drawing,
        {"logits": t(3, 33).half(), "scores": t(3, 33), "bounds": Bounds(t(3), index)} | drawing,
    ]


def _softmax_forward(device: str) -> Samples:
    t = partial(new, device=device)
    return [{"x": t(5, 33)}, {"x": transposed(t(2, 3, 33)).half()}, {"x": t(0, 33)}]


def _softmax_backward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    return [
        {"dy": t(5, 33), "y": t(5, 33)},
        {"dy": transposed(t(2, 3, 33)), "y": half(2, 3, 33)},
        {"dy": t(0, 33), "y": t(0, 33)},
    ]


def _projections(device: str, biased: bool = False) -> dict[str, Any]:
    t = partial(new, device=device)
    biases = (t(3, 8), t(3, 7)) if biased else (None, None)
    return {"gate_up": Projection(t(3, 8, 7), biases[0]), "down": Projection(t(3, 7, 4), biases[1])}


def _updated_projections(device: str, biased: bool = False) -> dict[str, Any]:
    t, plain = partial(new, device=device), _projections(device, biased)
    return {
        "gate_up": plain["gate_up"]._replace(a=t(3, 2, 7), b=t(3, 8, 2), scale=0.5),
        "down": plain["down"]._replace(a=t(3, 1, 4), b=t(3, 7, 1), scale=2.0),
    }


def _experts_options(device: str) -> dict[str, Any]:
    return {"gating": gating("silu"), "triton": device == "cuda" or INTERPRETING}


def _biased_experts(device: str) -> dict[str, Any]:
    return {"gating": gating(ClampedSwiGLU(0.5, 1.2)), **_projections(device, biased=True)}


def _ungated_experts(device: str) -> dict[str, Any]:
    return {"gating": gating(Ungated()), "gate_up": Projection(new(3, 4, 7, device=device))}


def _experts_forward(device: str) -> Samples:
    expert_ids = torch.tensor([[0, 2], [2, 0], [0, 0], [2, 2], [0, 2]], device=device)  # expert 1 gets no token
    common = {"x": new(5, 7, device=device), "slots": ExpertSlots(expert_ids, new(5, 2, device=device))}
    common |= _projections(device) | _experts_options(device)
    gate_up, down = Projection(common["gate_up"].weight.half()), Projection(transposed(common["down"].weight).half())
    return [
        common,
        common | {"x": transposed(common["x"]).half(), "gate_up": gate_up, "down": down, "gating": gating("gelu")},
        common | _biased_experts(device),
        common | {"x": common["x"][:0], "slots": ExpertSlots(expert_ids[:0], new(0, 2, device=device))},
        common | _ungated_experts(device),
        common | _updated_projections(device),
        common | _updated_projections(device, biased=True) | {"gate_up": _projections(device, biased=True)["gate_up"]},
    ]


def _experts_gate_up(device: str) -> Samples:
    rows, bounds = torch.arange(10, device=device).int().view(5, 2), torch.tensor([0, 5, 5, 10], device=device).int()
    gate_up, triton = new(3, 8, 7, device=device), _experts_options(device)["triton"]
    common = {"x": new(5, 7, device=device), "rows": rows, "bounds": bounds, "gate_up": gate_up, "triton": triton}
    return [common, common | {"x": transposed(common["x"]).half(), "gate_up": gate_up.half()}]


def _experts_backward(device: str) -> Samples:
    t = partial(new, device=device)
    rows, bounds = torch.arange(10, device=device).int().view(5, 2), torch.tensor([0, 5, 5, 10], device=device).int()
    common = {
        **_projections(device),
        **_experts_options(device),
        "dy": t(5, 7),
        "x": t(5, 7),
        "slots": ExpertSlots(torch.tensor([[0, 2]] * 5, device=device), t(5, 2)),
        "saved": Hidden(t(10, 8), rows, bounds, None, None),
    }
    updated = common | _updated_projections(device)
    updated |= {"saved": common["saved"]._replace(gate_up_h=t(10, 2), down_h=t(10, 1))}

    def needs(*names: str) -> dict[str, Any]:
        return {"needs": _Needs(*(name in names for name in _Needs._fields))}

    return [
        common | needs("x", "weights", "gate_up", "down"),
        common | {"gating": gating("gelu_tanh")} | needs("down"),
        common | {"dy": transposed(common["dy"]), "gating": gating("gelu")} | needs("x", "gate_up"),
        common | _biased_experts(device) | needs("x", "weights", "gate_up", "gate_up_bias", "down", "down_bias"),
        common | _biased_experts(device) | needs("down_bias"),
        common
        | _ungated_experts(device)
        | {"saved": common["saved"]._replace(hidden=t(10, 4))}
        | needs("x", "weights", "gate_up", "down"),
        updated | needs("x", "weights", "gate_up_update", "down_update"),
        updated | {"dy": transposed(common["dy"])} | needs("down_update"),
        updated | _updated_projections(device, biased=True) | needs("x", "gate_up_update", "down_update"),
    ]


def _biases(device: str) -> dict[str, Any]:
    biases = Biases(new(3, 8, device=device), new(3, 7, device=device))
    return {"gating": gating(ClampedSwiGLU(0.5, 1.2)), "biases": biases}


def _low_rank_gradients(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.float16)
    common = {"dy": t(5, 9), "b": t(9, 3), "h": t(5, 3), "scale": 0.5}
    return [common, common | {"dy": transposed(common["dy"]), "b": common["b"].float()}]


def _low_rank_glu_forward(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.float16)
    terms = LowRankTerms(t(5, 5), t(33, 3), t(33, 2), 0.5, 2.0)
    common = {"gate": t(5, 33), "up": t(5, 33), "terms": terms, "activation": "silu", "dtype": torch.float16}
    return [common, common | {"terms": terms._replace(gate_b=t(33, 3).float()), "activation": "gelu"}]


def _low_rank_glu_gradients(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.float16)
    common = {"dy": t(5, 33), **_low_rank_glu_forward(device)[0], "down_dh": t(5, 4), "a": t(4, 33).float()}
    del common["dtype"]
    return [common | {"needs_y": True}, common | {"down_dh": None, "a": None, "needs_y": False}]


def _route(device: str) -> Samples:
    t = partial(new, device=device)
    return [
        {"logits": t(5, 4), "num_experts_per_token": 3, "renormalize": True},
        {"logits": t(1, 40).half(), "num_experts_per_token": 2, "renormalize": False},
        {"logits": transposed(t(3, 5)), "num_experts_per_token": 5, "renormalize": True},
    ]


def _route_sigmoid(device: str) -> Samples:
    t = partial(new, device=device)
    return [
        {"logits": t(5, 4), "bias": t(4), "num_experts_per_token": 3, "options": SigmoidOptions(1, 1, True, 1.0)},
        {
            "logits": transposed(t(2, 40)).half(), "bias": t(40), "num_experts_per_token": 2,
            "options": SigmoidOptions(4, 2, False, 2.5),
        },
    ]  # fmt: skip


def _latent_decode_attention(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    sizes = {"q": (2, 4, 16), "q_rope": (2, 4, 8), "latents": (2, 70, 16), "k_rope": (2, 70, 8)}
    return [
        {name: t(*size) for name, size in sizes.items()} | {"visible": VisibleKeys(), "scale": 1.0},
        {name: half(*size) for name, size in sizes.items()}
        | {"visible": _visible_keys(device, t(2, 70) > 0), "scale": 0.5},
    ]


def _decode_experts(device: str) -> Samples:
    t = partial(new, device=device)

    def sample(tokens: int, dtype: torch.dtype, **others: Any) -> dict[str, Any]:
        x, gate_up, down = (t(*shape).to(dtype) for shape in ((tokens, 7), (3, 8, 7), (3, 7, 4)))
        routing = route(t(tokens, 3), 2, backend="torch")
        common = {"x": x, "routing": routing, "gate_up": gate_up, "down": down, "residual": None}
        return common | {"gating": gating("silu"), "biases": Biases(None, None)} | others

    return [
        sample(5, torch.float32),
        sample(1, torch.float32, residual=t(1, 7), gating=gating("gelu")),
        sample(5, torch.float32, gate_up=t(3, 4, 7), gating=gating(Ungated())),
        sample(1, torch.float32, **_biases(device)),
        sample(5, torch.float32, **_biases(device)),
        sample(5, torch.float16, residual=transposed(t(5, 7).half())),
        sample(5, torch.float32, x=transposed(t(5, 7)), gate_up=transposed(t(3, 8, 7)), down=transposed(t(3, 7, 4))),
        sample(0, torch.float32),
    ]


def _apply_sinks(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    fused = device == "cuda" or INTERPRETING
    return [
        {"out": t(2, 5, 3, 10), "lse": t(2, 3, 5), "sinks": t(3), "triton": fused},
        {"out": half(2, 3, 70, 16).transpose(1, 2), "lse": t(2, 3, 70), "sinks": half(3), "triton": fused},
    ]


def _apply_sinks_backward(device: str) -> Samples:
    half = partial(new, device=device, dtype=torch.float16)
    samples = [sample | {"dy": new(*sample["out"].shape, device=device)} for sample in _apply_sinks(device)]
    return [*samples, samples[0] | {"dy": half(2, 3, 5, 10).transpose(1, 2), "out": half(2, 5, 3, 10)}]


def _sink_gradients(device: str) -> Samples:
    samples = _apply_sinks_backward(device)
    return [{"y": sample.pop("out"), **sample} for sample in samples]


def _large_head_attention(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    joint = half(1, 7, 4, 24)
    return [
        {"q": t(2, 5, 4, 40), "k": t(2, 9, 2, 40), "v": t(2, 9, 2, 40), "scale": 0.3, "is_causal": False},
        {"q": joint[:, :, :2], "k": joint[:, :, 2:3], "v": joint[:, :, 3:], "scale": 1.0, "is_causal": True},
    ]


def _large_head_attention_backward(device: str) -> Samples:
    samples = []
    for sample in _large_head_attention(device):
        out, sums = OPS["large_head_attention"](*sample.values())
        samples.append({"dout": torch.ones_like(out), **sample, "sums": sums})
    return samples


def _packed_attention(device: str) -> Samples:
    t = partial(new, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    fused, joint = device == "cuda" or INTERPRETING, t(1, 70, 4, 16)
    rows = pack_documents([[(0, 3), (3, 1)], [(1, 8)]], 9, device), pack_documents([[(0, 65), (65, 5)]], 70, device)
    operands = [(t(2, 9, 4, 16), t(2, 9, 2, 16), t(2, 9, 2, 16)), (joint[:, :, :2], joint[:, :, 2:3], joint[:, :, 3:])]
    kernel = attention_kernel(*operands[0], True)
    assert kernel is not None
    common = {"attention": TorchAttention(kernel, 0.3, is_causal=True), "triton": fused}
    return [
        {"q": q, "k": k, "v": v, "packing": packing, **common}
        for (q, k, v), packing in zip(operands, rows, strict=True)
    ]


def _packed_attention_backward(device: str) -> Samples:
    samples = _packed_attention(device)
    for sample in samples:
        out, lse = OPS["packed_attention"](*sample.values())
        sample["results"] = Results(torch.ones_like(out), out, lse)
    return samples


def _delta_inputs(device: str, batch: int = 1, dtype: torch.dtype = torch.float32, **others: Any) -> Inputs:
    t = partial(new, device=device, dtype=dtype)
    fused = t(batch, 5, 24)  # the tokens are views of it
    q, k = (fused[..., start : start + 4].unflatten(-1, (1, 4)) for start in (0, 4))
    inputs = Inputs(q, k, fused[..., 8:18].unflatten(-1, (2, 5)), t(batch, 5, 2).sigmoid(), None, None, 0.5)
    return inputs._replace(**others)


def _delta_rule_forward(device: str) -> Samples:
    t = partial(new, device=device)
    common = {"inputs": _delta_inputs(device), "g": -t(1, 5, 2).abs(), "normalize": True, "needs_final": True}
    segment_start = torch.tensor([[0, 0, 2, 2, 2]], device=device)
    halves = _delta_inputs(device, dtype=torch.float16, initial_state=t(1, 2, 4, 5), segment_start=segment_start)
    return [
        common,
        common | {"inputs": halves, "needs_final": False},
        common | {"normalize": False},
        common | {"inputs": _delta_inputs(device, batch=0), "g": t(0, 5, 2)},
        common | {"g": -t(1, 5, 2, 4).abs()},
    ]


def _delta_rule_backward(device: str) -> Samples:
    t = partial(new, device=device)

    def sample(inputs: Inputs, normalize: bool, channels: tuple[int, ...] = (), **others: Any) -> dict[str, Any]:
        prepared = Prepared(*OPS["delta_rule_forward"](inputs, -t(1, 5, 2, *channels).abs(), normalize, False)[2:])
        do = t(1, 5, 2, 5).to(inputs.v.dtype)
        return {"do": do, "inputs": inputs, "prepared": prepared, "g_dtype": torch.float32, **others}

    segment_start = torch.tensor([[0, 0, 2, 2, 2]], device=device)
    packed = _delta_inputs(device, initial_state=t(1, 2, 4, 5), segment_start=segment_start)
    halves = _delta_inputs(device, dtype=torch.float16, beta=t(1, 5, 2).sigmoid())
    return [
        sample(packed, True, dfinal=t(1, 2, 4, 5), needs_initial=True),
        sample(halves, False, dfinal=None, needs_initial=False),
        sample(_delta_inputs(device), True, channels=(4,), dfinal=None, needs_initial=False),
    ]


def _ssd_inputs(device: str, batch: int = 1, dtype: torch.dtype = torch.float32, **others: Any) -> SSDInputs:
    t = partial(new, device=device, dtype=dtype)
    fused = t(batch, 5, 24)  # the tokens are views of it
    b, c = (fused[..., start : start + 4].unflatten(-1, (1, 4)) for start in (0, 4))
    x, g, dt = fused[..., 8:18].unflatten(-1, (2, 5)), -t(batch, 5, 2).abs(), t(batch, 5, 2).sigmoid()
    return SSDInputs(x, b, c, g, dt, None, None, None)._replace(**others)


def _ssd_forward(device: str) -> Samples:
    t, segment_start = partial(new, device=device), torch.tensor([[0, 0, 2, 2, 2]], device=device)
    halves = _ssd_inputs(device, dtype=torch.float16, initial_state=t(1, 2, 4, 5), segment_start=segment_start)
    return [
        {"inputs": _ssd_inputs(device, d=t(2)), "needs_final": True},
        {"inputs": halves, "needs_final": False},
        {"inputs": _ssd_inputs(device, batch=0), "needs_final": True},
    ]


def _ssd_backward(device: str) -> Samples:
    t, segment_start = partial(new, device=device), torch.tensor([[0, 0, 2, 2, 2]], device=device)
    packed = _ssd_inputs(device, d=t(2), initial_state=t(1, 2, 4, 5), segment_start=segment_start)
    halves = _ssd_inputs(device, dtype=torch.float16)
    needs = {"needs_d": True, "needs_initial": True}
    return [
        {"dy": t(1, 5, 2, 5), "dfinal": t(1, 2, 4, 5), "inputs": packed, **needs},
        {"dy": t(1, 5, 2, 5).half(), "dfinal": None, "inputs": halves, **dict.fromkeys(needs, False)},
    ]


def _ssd_gates_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    return [
        {"inputs": GateInputs(t(2, 3, 5), t(5), t(5), 0.0, math.inf)},
        {"inputs": GateInputs(half(2, 3, 10)[..., :5], t(5), half(5), 0.1, 0.5)},
        {"inputs": GateInputs(t(0, 5), t(5), t(5), 0.0, math.inf)},
    ]


def _ssd_gates_backward(device: str) -> Samples:
    forward, t = _ssd_gates_forward(device), partial(new, device=device)
    return [{"dg": t(*f["inputs"].x.shape), "ddt": t(*f["inputs"].x.shape), **f} for f in forward]


def _conv_inputs(device: str, **others: Any) -> ConvInputs:
    t = partial(new, device=device)
    arguments = {"x": t(2, 5, 8)[..., :7], "weight": t(7, 4), "bias": t(7), "initial_state": t(2, 3, 7)}
    return ConvInputs(**{**arguments, "segment_start": torch.tensor([[0, 0, 2, 2, 2]], device=device), **others})


def _causal_conv_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    plain: dict[str, Any] = {"bias": None, "initial_state": None, "segment_start": None}
    return [
        {"inputs": _conv_inputs(device), "silu": True},
        {"inputs": _conv_inputs(device, x=half(2, 5, 7), weight=t(7, 2), **plain), "silu": False},
        {"inputs": _conv_inputs(device, x=t(0, 5, 7), **plain), "silu": True},
    ]


def _causal_conv_backward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    plain: dict[str, Any] = {"bias": None, "initial_state": None, "segment_start": None}
    needs = {"needs_x": True, "needs_weight": True, "needs_state": True}
    weight_only = {"needs_x": False, "needs_weight": True, "needs_state": False}
    x_only = {"needs_x": True, "needs_weight": False, "needs_state": False}
    halves = _conv_inputs(device, x=half(2, 5, 7), weight=t(7, 2), **plain)
    return [
        {"dy": t(2, 5, 7), "inputs": _conv_inputs(device), "silu": True, **needs},
        {"dy": transposed(half(2, 5, 7)), "inputs": halves, "silu": False, **x_only},
        {"dy": t(0, 5, 7), "inputs": _conv_inputs(device, x=t(0, 5, 7), **plain), "silu": True, **weight_only},
    ]


def _gated_rms_norm_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    first, grouped = GatedNormOptions(1e-6, 33, True, False), GatedNormOptions(1e-6, 11, False, False)
    return [
        {"x": t(5, 33), "z": t(5, 33), "weight": t(33), "options": first},
        {"x": half(2, 3, 33), "z": transposed(half(2, 3, 33)), "weight": t(33), "options": grouped},
        {"x": t(0, 33), "z": t(0, 33), "weight": t(33), "options": first},
    ]


def _gated_rms_norm_backward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    common = {"dy": t(5, 33), "x": t(5, 33), "z": t(5, 33), "weight": t(33), "rstd": t(5).abs()}
    common |= {"options": GatedNormOptions(1e-6, 33, True, False)}
    grouped = {"options": GatedNormOptions(1e-6, 11, False, False), "rstd": t(15).abs()}
    everything = {"needs": GatedNormNeeds(True, True, True)}
    return [
        common | everything,
        common | {"x": half(5, 33), "z": half(5, 33), "needs": GatedNormNeeds(False, True, False)},
        common | {"needs": GatedNormNeeds(True, False, True), **grouped},
        common
        | {"dy": t(0, 33), "x": t(0, 33), "z": t(0, 33), "rstd": t(0), "needs": GatedNormNeeds(True, True, True)},
    ]


def _xielu_forward(device: str) -> Samples:
    xielu = {"numbers": XIELUNumbers(*(new(1, device=device) for _ in XIELUNumbers._fields))}
    half = new(2, 3, 33, device=device, dtype=torch.float16)
    return [{"x": x, **xielu} for x in (new(5, 33, device=device), transposed(half), new(0, 33, device=device))]


def _xielu_backward(device: str) -> Samples:
    needs = {"needs_x": True, "needs_curvatures": True}
    samples = [{"dy": torch.ones_like(sample["x"]), **sample, **needs} for sample in _xielu_forward(device)]
    return [*samples, samples[0] | {"needs_x": False}, samples[0] | {"needs_curvatures": False}]


def _delta_gates_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    samples = [
        {"a": t(2, 3, 5), "b": t(2, 3, 5), "a_log": t(5), "dt_bias": t(5)},
        {"a": half(2, 3, 10)[..., :5], "b": half(2, 3, 10)[..., 5:], "a_log": t(5), "dt_bias": half(5)},
        {"a": t(0, 5), "b": t(0, 5), "a_log": t(5), "dt_bias": t(5)},
    ]
    return [{**sample, "max_strength": 2.0} for sample in samples]


def _delta_gates_backward(device: str) -> Samples:
    forward = _delta_gates_forward(device)
    t = partial(new, device=device)
    return [{"dg": t(*f["a"].shape), "dbeta": t(*f["a"].shape).to(f["b"].dtype), **f} for f in forward]


def _delta_channel_gates_forward(device: str) -> Samples:
    t, half = partial(new, device=device), partial(new, device=device, dtype=torch.float16)
    samples = [
        {"a": t(2, 3, 5, 7), "b": t(2, 3, 5), "a_log": t(5), "dt_bias": t(5, 7)},
        {"a": half(2, 3, 80)[..., :35].unflatten(-1, (5, 7)), "b": half(2, 3, 5), "a_log": t(5), "dt_bias": half(5, 7)},
        {"a": t(0, 5, 7), "b": t(0, 5), "a_log": t(5), "dt_bias": t(5, 7)},
    ]
    return [{**sample, "max_strength": 2.0} for sample in samples]


def _delta_channel_gates_backward(device: str) -> Samples:
    forward = _delta_channel_gates_forward(device)
    return [{"dg": new(*f["a"].shape, device=device), "dbeta": torch.ones_like(f["b"]), **f} for f in forward]


SAMPLES: dict[str, Callable[[str], Samples]] = {
    "rms_norm_forward": _rms_norm_forward,
    "add_rms_norm_forward": _add_rms_norm_forward,
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm_forward": _layer_norm_forward,
    "layer_norm_backward": _layer_norm_backward,
    "rope": _rope,
    "glu_forward": _glu_forward,
    "glu_backward": _glu_backward,
    "activation_forward": _activation_forward,
    "activation_backward": _activation_backward,
    "decode_attention": _decode_attention,
    "exact_attention": _exact_attention,
    "few_rows": _few_rows,
    "ordered_product": _ordered_product,
    "add_low_rank_term": _add_low_rank_term,
    "filter_bounds": _filter_bounds,
    "sample_tokens": _sample_tokens,
    "softmax_forward": _softmax_forward,
    "softmax_backward": _softmax_backward,
    "experts_forward": _experts_forward,
    "experts_gate_up": _experts_gate_up,
    "experts_backward": _experts_backward,
    "low_rank_gradients": _low_rank_gradients,
    "low_rank_glu_forward": _low_rank_glu_forward,
    "low_rank_glu_gradients": _low_rank_glu_gradients,
    "select_experts": _route,
    "route": _route,
    "route_sigmoid": _route_sigmoid,
    "latent_decode_attention": _latent_decode_attention,
    "apply_sinks": _apply_sinks,
    "apply_sinks_backward": _apply_sinks_backward,
    "sink_gradients": _sink_gradients,
    "large_head_attention": _large_head_attention,
    "large_head_attention_backward": _large_head_attention_backward,
    "packed_attention": _packed_attention,
    "packed_attention_backward": _packed_attention_backward,
    "decode_experts": _decode_experts,
    "ssd_forward": _ssd_forward,
    "ssd_backward": _ssd_backward,
    "ssd_gates_forward": _ssd_gates_forward,
    "ssd_gates_backward": _ssd_gates_backward,
    "delta_rule_forward": _delta_rule_forward,
    "delta_rule_backward": _delta_rule_backward,
    "causal_conv_forward": _causal_conv_forward,
    "causal_conv_backward": _causal_conv_backward,
    "gated_rms_norm_forward": _gated_rms_norm_forward,
    "gated_rms_norm_backward": _gated_rms_norm_backward,
    "xielu_forward": _xielu_forward,
    "xielu_backward": _xielu_backward,
    "delta_channel_gates_forward": _delta_channel_gates_forward,
    "delta_channel_gates_backward": _delta_channel_gates_backward,
    "delta_gates_forward": _delta_gates_forward,
    "delta_gates_backward": _delta_gates_backward,
}
"""Op name -> its samples on a device, by the parameter names of the registered function."""
