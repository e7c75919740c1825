"""Contrastive learning: embeddings of queries approach those of their documents, and leave those of all others.

`ligerzoo train MODEL --method contrastive --data PAIRS --output DIR` runs this file; with --print-recipe it prints it
with these options as defaults. Change what you like and run it with `python`, or with `torchrun --nproc-per-node N` on
several GPUs; options of the command line replace the defaults.

The loss compares each query with the documents of all pairs of a step. Their number does not depend on the memory: if
the texts do not fit together, they are embedded without gradients first, row by row; the loss is differentiated by the
embeddings; and each row is embedded again to propagate its part of that gradient (GradCache, Gao et al. 2021).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligerzoo.train.command_line import run_script
from ligerzoo.train.encoder_options import ContrastiveRunOptions
from ligerzoo.train.evaluation import evaluate_batches
from ligerzoo.train.metrics import mean_metrics
from ligerzoo.train.pairs import PairRows, TextRow, embedding_model, open_embedding_model, pair_packer
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunPairs

DEFAULTS: dict[str, Any] = {}


def main(options: ContrastiveRunOptions) -> int:
    """Trains, in each process of torchrun. Returns the exit code: 0, or 130 if Ctrl-C ended the run."""
    with Run(options) as run:
        data = RunPairs(options, run.tokenizer, embedding_model(run.meta_model))
        run.prepare(data)
        if options.dry_run:
            return 0
        model = open_embedding_model(run, options)
        pack, loss_function = pair_packer(model, options), options.loss()

        def embed(rows: Sequence[TextRow], index: int) -> Tensor:
            """Returns the embeddings of a row, with the same dropout each time."""
            run.seed(index)
            with run.autocast():
                return rows[index].embed(model)

        def loss_of(pairs: PairRows) -> tuple[Tensor, dict[str, Tensor]]:
            """Returns the loss of a step and metrics; accumulates gradients, if they are enabled."""
            trains, rows = torch.is_grad_enabled(), pairs.rows
            with torch.set_grad_enabled(trains and pairs.fit_together):
                embeddings = torch.cat([embed(rows, index) for index in range(len(rows))])
            of_loss = embeddings.detach().requires_grad_(trains)
            similarity = model.settings.similarity
            loss, metrics = loss_function(*pairs.of_kinds(of_loss), similarity=similarity, **pairs.arguments)
            if not trains:
                return loss, pairs.retrieval(embeddings, similarity)
            (gradient,) = torch.autograd.grad(loss, of_loss)
            if pairs.fit_together:
                torch.autograd.backward(embeddings, gradient)
            else:
                for index, part in enumerate(torch.split(gradient, [row.count for row in rows])):
                    torch.autograd.backward(embed(rows, index), part)
            return loss.detach(), mean_metrics([metrics], [pairs.count])

        def evaluate() -> dict[str, float]:
            """Returns the loss over all evaluation pairs at once, and how well their queries find their documents."""
            numbers = evaluate_batches(run.model, lambda batches: loss_of(*batches), [pack(data.held_out)])
            return {f"eval_{name}": number for name, number in {**numbers, "pairs": len(data.held_out)}.items()}

        for step in run.steps(evaluate, loss_label="contrastive loss", metrics=("accuracy",)):
            pairs = pack(step.batches)
            loss, metrics = loss_of(pairs)
            step.log(loss=loss, grad_norm=run.optimizer_step(), metrics=metrics, batches=pairs.rows)
    return run.exit_code


if __name__ == "__main__":
    sys.exit(run_script(main, ContrastiveRunOptions, DEFAULTS))
