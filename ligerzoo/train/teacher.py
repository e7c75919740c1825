"""The teacher of a distillation run: a frozen model with the student's tokens."""

from __future__ import annotations

import torch

from ligerzoo.errors import ConfigError, quote
from ligerzoo.hub import AutoModel
from ligerzoo.models import CausalLM
from ligerzoo.text.tokenizer import Tokenizer


def load_teacher(teacher: str, student: CausalLM, *, dtype: str, device: torch.device) -> CausalLM:
    """Loads a teacher without gradients.

    Models of a family may pad their vocabularies to different sizes. Rows of the teacher past those of the student,
    which no token of a common tokenizer has, are removed.

    Args:
        teacher: checkpoint of the teacher.
        student: the student, whose tokenizer has been compared by `check_same_tokens`.
        dtype: dtype of the weights.
        device: device of the weights.

    Raises:
        ConfigError: The student's vocabulary is larger.
    """
    model = AutoModel.from_pretrained(teacher, dtype=dtype, device=device).requires_grad_(False)
    size, expected = model.config.vocab_size, student.config.vocab_size
    if size < expected:
        raise ConfigError(
            "the teacher's vocabulary is smaller than the student's", where=f"teacher {teacher}",
            got=f"vocab_size {size}", expected=expected,
            remedy=f"Resize the student first: model.resize_token_embeddings({size}).",
        )  # fmt: skip
    if size > expected:
        model.resize_token_embeddings(expected)
    return model.eval()


def check_same_tokens(student: Tokenizer, teacher: Tokenizer, name: str) -> None:
    """Refuses a teacher with other tokens than the student's: their distributions could not be compared.

    Args:
        student: the student's tokenizer.
        teacher: the teacher's.
        name: name of the teacher, for the message.

    Raises:
        ConfigError: A token id means different texts, or only one of them has it.
    """
    own, other = ({index: token for token, index in one.get_vocab().items()} for one in (student, teacher))
    different = sorted(index for index in own.keys() | other.keys() if own.get(index) != other.get(index))
    if different:
        first = different[0]
        got, expected = (quote(one[first]) if first in one else "no token" for one in (other, own))
        raise ConfigError(
            f"the teacher has another vocabulary than the student: {len(different):,} token ids differ",
            where=f"teacher {name}, token {first}", got=got, expected=expected,
            remedy="Choose a teacher with the student's tokenizer, such as a larger model of its family.",
        )  # fmt: skip
