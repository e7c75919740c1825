"""Frequencies of every rope type against transformers; angles stay fp32 when the module is moved or cast."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from ligerzoo.kernels import rope
from ligerzoo.layers import InterleavedSectionedRotaryEmbedding, RotaryEmbedding, interleaved, sectioned

DIM = 32
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 10 for i in range(DIM // 2)],
    "long_factor": [1 + i * i for i in range(DIM // 2)],
    "original_max_position_embeddings": 100,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, shrinking": {"rope_type": "dynamic", "factor": 0.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512},
    "llama3, context not given": LLAMA3,
    "yarn": YARN,
    "yarn, context not given": {"rope_type": "yarn", "factor": 4.0},
    "yarn, shrinking": {**YARN, "factor": 0.5},
    "yarn, betas": {**YARN, "beta_fast": 8, "beta_slow": 3},
    "yarn, empty ramp": {**YARN, "beta_fast": 1e9, "beta_slow": 1e9},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.4},
    "yarn, one mscale": {**YARN, "mscale": 1.3},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 7.0},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.7},
    "longrope, short of its context": {**LONGROPE, "original_max_position_embeddings": 4000},
}
MAX_POSITION = 1000


def theirs(scaling: dict[str, Any], positions: Tensor, dtype: torch.dtype, theta: float = 1e4) -> tuple[Tensor, Tensor]:
    config = LlamaConfig(
        head_dim=DIM, max_position_embeddings=MAX_POSITION, rope_parameters={**scaling, "rope_theta": theta}
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=dtype), positions)
    return cos[..., : DIM // 2], sin[..., : DIM // 2]


@pytest.mark.parametrize("length", [100, 101, 1000, 1001, 5000])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_rotations_match_transformers(scaling: dict[str, Any], length: int) -> None:
    positions = torch.arange(length)[None]
    ours = RotaryEmbedding(DIM, 1e4, scaling, MAX_POSITION)
    for got, expected in zip(ours(positions, torch.float32), theirs(scaling, positions, torch.float32), strict=True):
        assert (got.dtype, got.shape) == (torch.float32, (1, length, DIM // 2))
        # An ulp of the frequency is 1e-7 of the angle, and the angle is at most the position.
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-7 * length)


@pytest.mark.parametrize("name", sorted(SCALINGS.keys() - {"default"}))
def test_every_scaling_has_an_effect(name: str) -> None:
    """The comparison above cannot pass by ignoring the scaling."""
    positions = torch.arange(1500)[None]
    plain, scaled = (RotaryEmbedding(DIM, 1e4, scaling, MAX_POSITION) for scaling in (None, SCALINGS[name]))
    assert (plain(positions, torch.float32)[0] - scaled(positions, torch.float32)[0]).abs().max() > 0.1


@pytest.mark.parametrize("theta", [100, 1000042, 5e5])
def test_theta(theta: float) -> None:
    positions = torch.tensor([[0, 3, 17], [99, 2, 1]])
    ours = RotaryEmbedding(DIM, theta)(positions, torch.float32)
    torch.testing.assert_close(ours, theirs({}, positions, torch.float32, theta), rtol=0, atol=1e-6)


def test_integer_theta() -> None:
    """In a file it may have any number of digits."""
    positions = torch.arange(9)[None]
    of_whole, of_float = (RotaryEmbedding(DIM, theta)(positions, torch.float32) for theta in (10**20, 1e20))
    assert torch.equal(torch.stack(of_whole), torch.stack(of_float))


def test_angles_are_fp32_and_rounded_last(device: str) -> None:
    rotary = RotaryEmbedding(DIM).to(torch.bfloat16).to(device)
    positions = torch.tensor([[100_003, 65_537]], device=device)
    exact = positions[..., None].double() * rotary.frequencies(positions).double()
    with torch.autocast(device, torch.bfloat16):
        cos, sin = rotary(positions, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    torch.testing.assert_close(cos.double(), exact.cos(), rtol=2**-8, atol=0.01)
    torch.testing.assert_close(sin.double(), exact.sin(), rtol=2**-8, atol=0.01)


def test_module_can_be_moved_copied_and_pickled(device: str) -> None:
    """It gives the same rotations and has no state to save."""
    positions = torch.arange(50, device=device)[None]
    expected = RotaryEmbedding(DIM, scaling=YARN)(positions, torch.float32)
    with torch.device("meta"):
        rotary = RotaryEmbedding(DIM, scaling=YARN)
    for module in (rotary.to_empty(device=device), copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):  # noqa: S301
        assert all(map(torch.equal, module(positions, torch.float32), expected))
        assert module.state_dict() == {}


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_calls_are_independent(rope_type: str) -> None:
    """After a long call, a short one gives the same as before (transformers' dynamic type stays long)."""
    rotary, short = (
        RotaryEmbedding(DIM, scaling=SCALINGS[rope_type], max_position_embeddings=100),
        torch.arange(90)[None],
    )
    before = rotary(short, torch.float32)
    rotary(torch.arange(5000)[None], torch.float32)
    assert all(map(torch.equal, rotary(short, torch.float32), before))


def test_runs_on_meta() -> None:
    cos, _ = RotaryEmbedding(DIM)(torch.arange(5, device="meta")[None], torch.float32)
    assert (cos.device.type, cos.shape) == ("meta", (1, 5, DIM // 2))


@pytest.mark.parametrize("sections", [[5, 6, 5], [16], [2, 3, 3, 4, 1, 3]], ids=str)
def test_sections_match_qwen2_vl(sections: list[int]) -> None:
    positions = torch.randint(1000, (3, 2, 7))
    q, k = torch.randn(2, 7, 4, DIM), torch.randn(2, 7, 2, DIM)
    cos, sin = (sectioned(t, sections) for t in RotaryEmbedding(DIM, 1e4)(positions, torch.float32))

    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = Qwen2VLTextConfig(hidden_size=4 * DIM, num_attention_heads=4, rope_parameters=parameters)
    theirs = qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, positions)
    if hasattr(qwen2_vl, "apply_multimodal_rotary_pos_emb"):  # versions that select the axes late
        expected = qwen2_vl.apply_multimodal_rotary_pos_emb(q, k, *theirs, sections, unsqueeze_dim=2)
    else:
        expected = qwen2_vl.apply_rotary_pos_emb(q, k, *theirs, unsqueeze_dim=2)
    torch.testing.assert_close(rope(q, k, cos, sin), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sections", [[24, 20, 20], [11, 11, 10], [2, 1, 1], [4, 0, 2], [5, 0, 0]], ids=str)
def test_interleaved_sections_match_qwen3_vl(sections: list[int]) -> None:
    positions, dim = torch.randint(1000, (3, 2, 7)), 2 * sum(sections)
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    theirs = qwen3_vl.Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=dim, rope_parameters=parameters))
    expected = [angles[..., : dim // 2] for angles in theirs(torch.ones(()), positions)]
    ours = InterleavedSectionedRotaryEmbedding(sections, dim, 1e4)
    torch.testing.assert_close(list(ours(positions, torch.float32)), expected, rtol=0, atol=1e-5)
    plain = RotaryEmbedding(dim, 1e4)(positions[0], torch.float32)
    assert all(map(torch.equal, ours(positions[0], torch.float32), plain))


@pytest.mark.parametrize("sections", [[2, 2, 1], [1, 1, 2], [0, 3, 1]], ids=str)
def test_interleaved_sections_must_fit(sections: list[int]) -> None:
    with pytest.raises(ValueError, match=r"interleaved: got sections .*; expected alternating axes of 4 pairs"):
        interleaved(torch.ones(3, 1, 2, 4), sections)


def test_equal_positions_on_all_axes() -> None:
    rotary, positions = RotaryEmbedding(DIM), torch.arange(50)[None]
    plain, on_axes = (rotary(p, torch.float32) for p in (positions, positions.expand(3, 1, 50)))
    assert all(torch.equal(sectioned(axes, [4, 6, 6]), one) for axes, one in zip(on_axes, plain, strict=True))


def test_sections_must_add_up() -> None:
    with pytest.raises(ValueError, match=r"sections \(4, 6, 5\); expected a sum of R/2 = 16"):
        sectioned(torch.ones(3, 1, 2, 16), [4, 6, 5])


@pytest.mark.parametrize(
    "scaling, named",
    [
        ({"rope_type": "su"}, "su"),
        ({"rope_type": ["yarn"]}, "yarn"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": True}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "linear", "factor": 10**400}, "factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({**YARN, "original_max_position_embeddings": -1}, "original_max_position_embeddings"),
        ({**YARN, "beta_fast": "fast"}, "beta_fast"),
        ({**YARN, "attention_factor": [1]}, "attention_factor"),
        ({**LONGROPE, "factor": "7"}, "factor"),
        ({**LONGROPE, "long_factor": [1.0] * (DIM // 2 - 1)}, "long_factor"),
        ({**LONGROPE, "short_factor": ["1"] * (DIM // 2)}, "short_factor"),
        ({**LONGROPE, "short_factor": 1.0}, "short_factor"),
    ],
)
def test_invalid_scalings(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"scaling: .*{named}"):
        RotaryEmbedding(DIM, scaling=scaling)


@pytest.mark.parametrize("dim", [0, 7, -2, 2**31 - 2])
def test_invalid_dims(dim: int) -> None:
    with pytest.raises(ValueError, match=rf"dim={dim}; expected an even number"):
        RotaryEmbedding(dim)


@pytest.mark.parametrize("theta", [0, 1, -5.0, float("inf"), float("nan"), 10**400])
def test_invalid_thetas(theta: float) -> None:
    with pytest.raises(ValueError, match=r"theta=.*; expected a number above 1"):
        RotaryEmbedding(DIM, theta)
