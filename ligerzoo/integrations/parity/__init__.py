"""Our model of a checkpoint against transformers' model, module by module, on one text.

    report = compare("org/name", {"input_ids": ids})
    print(report)           # errors of the hidden states of each layer, and the first module that differs
    report.first            # its name and error; None if rounding explains all differences

Modules of both models are one pair if they hold the same tensors of the checkpoint; their names do not matter. Each is
compared alone: it gets the input of transformers' module, and its parts' outputs are replaced by those of transformers,
so that errors do not add up. What a module computes between its parts is compared by the inputs of these parts.

Rounding explains as much as a change of all inputs by an ulp changes the outputs of transformers' module.
"""

from ligerzoo.integrations.parity.models import compare, compare_models
from ligerzoo.integrations.parity.report import Difference, Parity

__all__ = ["Difference", "Parity", "compare", "compare_models"]
