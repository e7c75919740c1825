import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers import LMHead


@pytest.mark.parametrize("budget", [1, 512])
def test_logits_or_their_loss(budget: int, device: str) -> None:
    vocab = 3000 if budget == 1 else 50  # a budget of 1 MiB is 87 rows of 3000
    head = LMHead(16, vocab, logits_budget=budget, device=device)
    hidden = torch.randn(2, 60, 16, device=device, requires_grad=True)
    targets = torch.randint(vocab, (2, 60), device=device).masked_fill(torch.rand(2, 60, device=device) < 0.3, -100)
    logits = head(hidden)
    assert logits.shape == (2, 60, vocab)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    required = torch.autograd.grad(expected, (hidden, head.weight))

    loss = head(hidden, targets)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for got, gradient in zip(torch.autograd.grad(loss, (hidden, head.weight)), required, strict=True):
        torch.testing.assert_close(got, gradient, rtol=0, atol=1e-6 * gradient.abs().max().item() * 10)
    torch.testing.assert_close(head(hidden, targets, num_items=10), expected * (targets != -100).sum() / 10)
    assert torch.equal(head.logits(hidden), logits)
    assert torch.equal(head.loss(hidden, targets), loss)
    assert head.loss(hidden, targets, None, lambda *_, **options: options["logits_budget"]) == budget


def test_logits_budget_is_passed_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def loss(*_: Tensor, logits_budget: int, **__: object) -> Tensor:
        budgets.append(logits_budget)
        return torch.zeros(())

    monkeypatch.setattr("ligerzoo.layers.head.linear_cross_entropy", loss)
    for head in (LMHead(4, 5), LMHead(4, 5, logits_budget=7)):
        head(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    assert budgets == [None, 7]


def test_frozen_head_propagates_gradients() -> None:
    head, hidden = LMHead(16, 50).requires_grad_(False), torch.randn(7, 16, requires_grad=True)
    head(hidden, torch.arange(7)).backward()
    assert head.weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().max() > 0


def test_tied_to_an_embedding() -> None:
    embedding, head = nn.Embedding(50, 16), LMHead(16, 50)
    head.weight = embedding.weight
    tokens = torch.randint(50, (9,))
    head(embedding(tokens), tokens.roll(-1)).backward()
    logits = F.linear(embedding(tokens), embedding.weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, tokens.roll(-1)), embedding.weight)
    torch.testing.assert_close(embedding.weight.grad, expected, rtol=0, atol=1e-6)


def test_repr() -> None:
    assert repr(LMHead(12, 30)) == "LMHead(hidden_size=12, vocab_size=30)"
