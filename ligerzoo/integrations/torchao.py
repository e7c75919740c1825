"""Weight-only quantization of ligerzoo models with torchao.

    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_linear)

Without the filter, `quantize_` quantizes all linear layers except the language-model head, whose class is not
`nn.Linear`.
"""

from torch import nn

from ligerzoo.layers import LMHead


def is_linear(module: nn.Module, name: str) -> bool:
    """A filter for `quantize_`: whether a module is a linear layer or a language-model head, and not an embedding.

    A head that shares its weight with the embedding gets a quantized copy; the embedding keeps the weight.

    Args:
        module: the module.
        name: its name in the model; unused.
    """
    return isinstance(module, nn.Linear | LMHead)
