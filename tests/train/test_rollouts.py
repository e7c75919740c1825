"""The model that samples in mixed precision."""

import torch

from ligerzoo.models import Qwen3Next, Qwen3NextConfig
from ligerzoo.train.rollouts import SamplingModel
from tests.generate.models import HYBRID, TINY


def test_a_sampling_model_keeps_what_loading_keeps_in_fp32() -> None:
    model = Qwen3Next(Qwen3NextConfig(**TINY, **HYBRID, head_dim=16))
    model.register_buffer("statistics", torch.zeros(2))
    sampling = SamplingModel(model, mixed_precision=True)
    mixer = sampling.model.get_submodule("model.layers.0.linear_attn")
    kept = ("A_log", "dt_bias", "norm.weight")
    with torch.no_grad():
        for tensor in (*model.parameters(), model.statistics):
            tensor.add_(2**-12)
    with sampling.current():
        for name in kept:
            assert torch.equal(mixer.get_parameter(name), model.get_parameter(f"model.layers.0.linear_attn.{name}"))
        assert torch.equal(sampling.model.get_buffer("statistics"), model.statistics.bfloat16())
    others = [
        p for name, p in sampling.model.named_parameters() if not name.endswith(kept) or "linear_attn" not in name
    ]
    assert {p.dtype for p in others} == {torch.bfloat16}
    assert not any(p.requires_grad for p in sampling.model.parameters())
    ids = torch.randint(10, (1, 5))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
    torch.testing.assert_close(sampling.model(ids).logits.float(), expected.float(), rtol=0.05, atol=0.02)
