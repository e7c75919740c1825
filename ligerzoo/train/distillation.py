"""The teacher of a distillation, and whether its tokens are the student's."""

from __future__ import annotations

import torch

from ligerzoo import Tokenizer
from ligerzoo.errors import ConfigError, quote
from ligerzoo.models import CausalLM
from ligerzoo.parallel.mesh import check_mesh
from ligerzoo.train import processes
from ligerzoo.train.run import Run
from ligerzoo.train.run_model import compute_dtype, open_model
from ligerzoo.train.teacher_options import TeacherRunOptions


def check_teacher(run: Run, options: TeacherRunOptions) -> CausalLM:
    """Returns the teacher of a run on the meta device, for plans. Prints how many rows of its head are left out.

    Raises:
        ConfigError: The teacher has another vocabulary than the student.
    """
    check_same_tokens(run.tokenizer, options.teacher)
    teacher = open_model(options.teacher, dtype=options.dtype, device=torch.device("meta"), trained_on=run.device)
    if (mesh := processes.mesh()) is not None:
        check_mesh(teacher, mesh)
    extra = fit_vocabulary(teacher, run.meta_model.config.vocab_size, options.teacher)
    if extra:
        rows = "the last row" if extra == 1 else f"the last {extra:,} rows"
        processes.say(f"teacher {options.teacher}: leaves out {rows} of its vocabulary, which no token has")
    return teacher


def load_teacher(run: Run, options: TeacherRunOptions) -> CausalLM:
    """Loads the teacher of a run without gradients, after `check_teacher`. Several processes shard it."""
    name, rows = options.teacher, run.model.config.vocab_size
    model = open_model(
        name,
        dtype=options.dtype,
        device=run.device,
        adapt=lambda model: fit_vocabulary(model, rows, name),
        param_dtype=compute_dtype(options),
    )
    return model.requires_grad_(False).eval()


def fit_vocabulary(teacher: CausalLM, expected: int, name: str) -> int:
    """Removes the rows of a teacher past those of the student, and returns their number.

    Models of a family may pad their vocabularies to different sizes. No token of a common tokenizer has these rows.

    Args:
        expected: number of rows of the student.
        name: checkpoint of the teacher, for the message.

    Raises:
        ConfigError: The student's vocabulary is larger.
    """
    size = teacher.config.vocab_size
    if size < expected:
        what = "the teacher's vocabulary is smaller than the student's"
        remedy = f"Resize the student first: model.resize_token_embeddings({size})."
        raise ConfigError(what, where=f"teacher {name}", got=f"vocab_size {size}", expected=expected, remedy=remedy)
    if size > expected:
        teacher.resize_token_embeddings(expected)
    return size - expected


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
