"""The repository of kernels for the hub, loaded by the library `kernels` into transformers' Llama."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

kernels = pytest.importorskip("kernels")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tools.hub_kernels import write  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*No kernel mapping found for layer.*:UserWarning")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub")
    write(directory)
    return directory


def results(model: nn.Module) -> dict[str, Tensor]:
    ids = torch.arange(20)[None]
    out = model(ids, labels=ids)
    out.loss.backward()
    return {"logits": out.logits, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def test_layers_give_the_results_of_transformers(repository: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    expected = results(copy.deepcopy(model))
    kernels.replace_kernel_forward_from_hub(modeling_llama.LlamaRMSNorm, "RMSNorm")
    layer = kernels.LocalLayerRepository(repository, layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": layer}}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    assert "ligerzoo" in model.model.norm.forward.__func__.__module__
    got = results(model)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_rotation_is_that_of_transformers(repository: Path) -> None:
    rotate = kernels.get_local_kernel(repository).layers.apply_rotary_transformers
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 4).repeat(1, 1, 2)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for got, one in zip(rotate(q, k, angles.cos(), angles.sin()), expected, strict=True):
        torch.testing.assert_close(got, one)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
    for got, one in zip(rotate(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2), expected, strict=True):
        torch.testing.assert_close(got, one)


def test_it_needs_no_ligerzoo(repository: Path) -> None:
    code = (
        "import kernels, sys, pathlib; kernels.get_local_kernel(pathlib.Path(sys.argv[1]));"
        "print('ligerzoo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, repository], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
