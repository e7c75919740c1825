"""The teacher of a distillation, and whether its tokens are the student's."""

from __future__ import annotations

import torch

from ligerzoo import Tokenizer
from ligerzoo.errors import ConfigError, quote
from ligerzoo.models import CausalLM
from ligerzoo.train.methods import DistillRunOptions
from ligerzoo.train.run_model import compute_dtype, open_model


def load_teacher(options: DistillRunOptions, student: CausalLM, *, device: torch.device) -> CausalLM:
    """Loads the teacher of a run without gradients. Several processes shard it.

    Models of a family may pad their vocabularies to different sizes. Rows of the teacher past those of the student,
    which no token of a common tokenizer has, are removed.

    Args:
        student: the student, whose tokenizer has been compared by `check_same_tokens`.

    Raises:
        ConfigError: The student's vocabulary is larger.
    """
    expected = student.config.vocab_size

    def shrink(model: CausalLM) -> None:
        if model.config.vocab_size > expected:
            model.resize_token_embeddings(expected)

    teacher, param_dtype = options.teacher, compute_dtype(options)
    model = open_model(teacher, dtype=options.dtype, device=device, adapt=shrink, param_dtype=param_dtype)
    size = model.config.vocab_size
    if size < expected:
        what = "the teacher's vocabulary is smaller than the student's"
        remedy = f"Resize the student first: model.resize_token_embeddings({size})."
        raise ConfigError(what, where=f"teacher {teacher}", got=f"vocab_size {size}", expected=expected, remedy=remedy)
    return model.requires_grad_(False).eval()


def check_same_tokens(student: Tokenizer, teacher: str) -> None:
    """Refuses a teacher with other tokens than the student's: their distributions could not be compared.

    Args:
        student: the student's tokenizer.
        teacher: checkpoint of the teacher.

    Raises:
        ConfigError: A token id means different texts, or only one of them has it.
    """
    both = student, Tokenizer.from_pretrained(teacher)
    own, other = ({index: token for token, index in one.get_vocab().items()} for one in both)
    different = sorted(index for index in own.keys() | other.keys() if own.get(index) != other.get(index))
    if different:
        first = different[0]
        got, expected = (quote(one[first]) if first in one else "no token" for one in (other, own))
        what = f"the teacher has another vocabulary than the student: {len(different):,} token ids differ"
        remedy = "Choose a teacher with the student's tokenizer, such as a larger model of its family."
        raise ConfigError(what, where=f"teacher {teacher}, token {first}", got=got, expected=expected, remedy=remedy)
