"""Models are built on one device and in one dtype, which constructors do not pass on."""

import inspect

import pytest
import torch
from torch import nn

from ligerzoo.errors import ConfigError, LigerzooError
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from ligerzoo.models.building import building
from ligerzoo.models.registry import MODEL_CLASSES, module_of

CONFIG = LlamaConfig(
    vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
)  # fmt: skip


class WithConstants(Llama):
    """Llama with tensors on the CPU and in fp32, which the constructor initializes."""

    def __init__(self, config: LlamaConfig, *, value: float = 3.0) -> None:
        super().__init__(config)
        self.constants = nn.Parameter(nn.init.constant_(torch.empty(4, device="cpu", dtype=torch.float32), value))
        self.scale = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_parameters_have_the_device_and_dtype(device: str | None, dtype: torch.dtype | None) -> None:
    model = WithConstants(CONFIG, value=5.0, device=device, dtype=dtype)
    assert (model.constants.dtype, model.constants.tolist()) == (torch.float32, [5.0] * 4)
    others = {(p.dtype, p.device.type) for name, p in model.named_parameters() if name != "constants"}
    assert others == {(dtype or torch.float32, device or "cpu")}
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"


def test_the_signature_names_config_device_and_dtype() -> None:
    assert [*inspect.signature(WithConstants).parameters] == ["config", "value", "device", "dtype"]
    assert [*inspect.signature(CausalLM).parameters] == ["config", "model", "lm_head", "device", "dtype", "parts"]


def test_defaults_are_restored_after_an_error() -> None:
    inside = []

    def fail() -> None:
        with building("meta", torch.bfloat16):
            inside.append(torch.empty(1))
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        fail()
    assert [(x.device.type, x.dtype) for x in (*inside, torch.empty(1))] == [
        ("meta", torch.bfloat16), ("cpu", torch.float32)
    ]  # fmt: skip


def test_invalid_arguments_are_refused_before_the_constructor() -> None:
    with pytest.raises(ConfigError, match="argument config of WithConstants: not a config"):
        WithConstants({"vocab_size": 20})
    with pytest.raises(LigerzooError, match=r"dtype of Llama: not a dtype; got 'bfloat16'.*AutoModel.from_config"):
        Llama(CONFIG, dtype="bfloat16")
    with pytest.raises(TypeError, match="config"):
        Llama()


def test_unknown_names_of_models() -> None:
    import ligerzoo.models

    with pytest.raises(AttributeError, match=r"module 'ligerzoo.models' has no attribute 'Lama'"):
        ligerzoo.models.Lama  # noqa: B018
    for model_type, name in MODEL_CLASSES.items():
        assert getattr(ligerzoo.models, name).__module__ == f"ligerzoo.models.{module_of(model_type)}"
    assert {*MODEL_CLASSES.values()} < {*dir(ligerzoo.models)}
