"""The contrastive loss: its options, memory, processes and messages. tests/kernels has its accuracy."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ligerzoo.losses import ContrastiveLoss, contrastive, contrastive_loss
from tests.parallel.spawning import on_all_processes

QUERIES_AND_DOCUMENTS = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc")
SOFTMAXES: list[dict[str, Any]] = [
    {},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    {"directions": QUERIES_AND_DOCUMENTS, "margin": 0.1},
]


def embeddings(n: int, features: int = 10, *, negatives: int | None = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, features), (n, features), *([] if negatives is None else [(n, negatives, features)])]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("options", SOFTMAXES, ids=str)
def test_cosine_similarities_equal_the_matrix_form(options: dict[str, Any]) -> None:
    inputs = [*embeddings(13), torch.tensor(0.2, requires_grad=True)]
    ids = {"query_ids": torch.arange(13) // 2, "positive_ids": torch.arange(13) // 3}
    found = gradients(contrastive_loss(*inputs[:3], temperature=inputs[3], **options, **ids).loss, *inputs)
    expected = gradients(contrastive.reference(*inputs[:3], temperature=inputs[3], **options, **ids), *inputs)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


def test_softmaxes_over_columns_of_many_rows() -> None:
    """Several programs share the rows of a column, and the columns."""
    inputs = embeddings(300, negatives=None)
    options = {**SOFTMAXES[1], "margin": 0.3}
    found = gradients(contrastive_loss(*inputs, temperature=0.2, **options).loss, *inputs)
    expected = gradients(contrastive.reference(*inputs, temperature=0.2, **options), *inputs)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


def test_clip_and_infonce_in_two_lines_each() -> None:
    """The losses that everyone knows, written as their papers do."""
    queries, positives, negatives = embeddings(7)
    q, p, n = (F.normalize(x, dim=-1) for x in (queries, positives, negatives))
    labels = torch.arange(7)
    infonce = F.cross_entropy(20 * q @ torch.cat([p, n.flatten(0, 1)]).T, labels)
    torch.testing.assert_close(contrastive_loss(queries, positives, negatives).loss, infonce)
    log_scale = torch.tensor(2.0, requires_grad=True)
    logits = log_scale.exp() * q @ p.T
    clip = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    loss = contrastive_loss(queries, positives, temperature=(-log_scale).exp(), **SOFTMAXES[1]).loss
    torch.testing.assert_close(gradients(loss, log_scale), gradients(clip, log_scale))


def test_metrics_and_the_module() -> None:
    queries = torch.eye(5)
    positives = queries.clone()
    positives[4] = -queries[4]
    ours = ContrastiveLoss(temperature=0.1)
    loss, metrics = ours(queries, positives)
    assert metrics["accuracy"] == 0.8
    assert metrics["positive_similarity"].item() == pytest.approx(0.6)
    assert loss == contrastive_loss(queries, positives, temperature=0.1).loss
    assert ours(queries, positives, temperature=0.2).loss != loss
    assert torch.equal(ours(queries, positives, num_items=10).loss, loss / 2)


def test_matryoshka_dims_are_summed() -> None:
    queries, positives = embeddings(7, negatives=None)
    expected = sum(contrastive_loss(queries[:, :n], positives[:, :n]).loss for n in (10, 4))
    output = contrastive_loss(queries, positives, dims=(10, 4))
    torch.testing.assert_close(gradients(output.loss, queries), gradients(expected, queries))  # type: ignore[arg-type]
    assert output.metrics == contrastive_loss(queries, positives).metrics


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.numel())
        return result


@pytest.mark.parametrize("options", SOFTMAXES, ids=str)
def test_the_matrix_of_similarities_never_exists(options: dict[str, Any]) -> None:
    n = 1024
    queries, positives = embeddings(n, 4, negatives=None)
    with LargestTensor() as mode:
        contrastive_loss(queries, positives, logits_budget=1, **options).loss.backward()
    assert mode.largest <= 2**20 // 4 < n**2


# Several processes


def parts(rank: int) -> None:
    """Two processes with other numbers of queries and negatives have the loss and the gradients of one."""
    whole = embeddings(9)
    temperature = torch.tensor(0.3, requires_grad=True)
    ids = {"query_ids": torch.arange(9) // 2, "positive_ids": torch.arange(9) % 7}
    for counts in ((9, 0), (5, 4)):
        own = slice(0, counts[0]) if rank == 0 else slice(counts[0], 9)
        mine = [x[own].detach().requires_grad_() for x in whole]
        of_own = {name: value[own] for name, value in ids.items()}
        for options in SOFTMAXES:
            one = contrastive_loss(*whole, temperature=temperature, **options, **ids)
            expected = gradients(one.loss, *whole, temperature)
            sizes = [(n, 2 * n) for n in counts]
            part = contrastive_loss(
                *mine, temperature=temperature, num_items=4.5, group=dist.group.WORLD, sizes=sizes, **options, **of_own
            )
            loss, *found, dtemperature = (x / 2 for x in gradients(part.loss, *mine, temperature))
            for total in (loss, dtemperature):
                dist.all_reduce(total)
            torch.testing.assert_close([loss, dtemperature], [expected[0], expected[-1]])
            torch.testing.assert_close(found, [x[own] for x in expected[1:-1]], rtol=2e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version
def test_processes_share_negatives() -> None:
    on_all_processes(parts)


# Messages

Q, N = torch.ones(4, 3), torch.ones(4, 2, 3)


@pytest.mark.parametrize("args, options, message", [
    ((Q, Q[:3]), {}, r"contrastive_loss: queries is \(4, 3\) torch.float32, positives \(3, 3\) .*; expected .*"),
    ((Q, Q, N[:3]), {}, r"contrastive_loss: .* negatives \(3, 2, 3\) torch.float32; expected .*"),
    ((Q, Q.half()), {}, r"contrastive_loss: .*positives \(4, 3\) torch.float16 .* of one dtype"),
    ((Q, Q), {"temperature": 0}, r"contrastive_loss: temperature=0; expected a positive number"),
    ((Q, Q), {"temperature": torch.ones(2)}, r"contrastive_loss: temperature has shape \(2,\); expected \(\)"),
    ((Q, Q), {"directions": ("doc_to_query",)}, r"contrastive_loss: directions=\('doc_to_query',\) .* query_to_doc .*"),
    ((Q, Q), {"directions": ("query_to_docs",)}, r"contrastive_loss: direction='query_to_docs'; .* 'query_to_doc'\?"),
    ((Q, Q), {"directions": QUERIES_AND_DOCUMENTS, "partition_mode": "per_direction"},
     r"contrastive_loss: .*; expected directions whose candidates include .*\. Use partition_mode=\"joint\""),
    ((Q, Q), {"query_ids": Q[:, 0]}, r"contrastive_loss: query_ids has dtype torch.float32; expected an integer dtype"),
    ((Q, Q, N), {"positive_ids": torch.arange(4), "negative_ids": torch.arange(4)},
     r"contrastive_loss: negative_ids has shape \(4,\); expected \(4, 2\)"),
    ((Q, Q, N), {"negative_ids": N[..., 0].long()}, r"contrastive_loss: negative_ids without positive_ids, .*"),
    ((Q, Q), {"negative_ids": torch.arange(4)}, r"contrastive_loss: negative_ids without negatives"),
    ((Q, Q, N), {"negatives_of": torch.arange(4)},
     r"contrastive_loss: negatives_of without negatives \(M, D\); got \(4, 2, 3\), whose first index is the query"),
    ((Q, Q, Q[:2]), {"negatives_of": torch.tensor([0, 4])}, r"contrastive_loss: negatives_of=4; expected -1 to 3"),
    ((Q, Q), {"sizes": [(3, 0)]}, r"contrastive_loss: sizes=\[\(3, 0\)\]; expected one pair .* \(4, 0\) for .*"),
    ((Q, Q), {"dims": (4,)}, r"contrastive_loss: dims=\(4,\); expected numbers of features, 1 to 3"),
    ((Q, Q), {"scale": 20.0}, r"contrastive_loss: unknown option scale=20.0; .* Use temperature instead of 'scale' .*"),
])  # fmt: skip
def test_messages(args: tuple[Tensor, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$") as caught:
        contrastive_loss(*args, **options)
    assert re.match("contrastive_loss: ", str(caught.value))
