"""A language model composed from layers, without a config: local and global attention, and mixtures of experts.

python examples/compose.py
"""

import torch

from ligerzoo.layers import (
    Attention,
    Context,
    Decoder,
    Embedding,
    Experts,
    GatedMLP,
    LMHead,
    MoE,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    Router,
    load_balancing_loss,
)

VOCABULARY, HIDDEN, HEADS, LAYERS, EXPERTS = 256, 64, 4, 4, 4
STEPS = 30

rotary = RotaryEmbedding(HIDDEN // HEADS)


def block(layer: int) -> PreNormBlock:
    window = 16 if layer % 2 == 0 else None  # every other layer sees the last 16 tokens only
    attention = Attention(HIDDEN, HEADS, num_kv_heads=1, rotary=rotary, window=window)
    dense = GatedMLP(HIDDEN, 2 * HIDDEN)
    mixture = MoE(Router(HIDDEN, EXPERTS, 2), Experts(HIDDEN, HIDDEN, EXPERTS))
    return PreNormBlock(RMSNorm(HIDDEN), attention, RMSNorm(HIDDEN), dense if layer == 0 else mixture)


def main() -> None:
    torch.manual_seed(0)
    decoder = Decoder(Embedding(VOCABULARY, HIDDEN), [block(layer) for layer in range(LAYERS)], RMSNorm(HIDDEN))
    head = LMHead(HIDDEN, VOCABULARY)
    print(decoder)

    text = torch.tensor([list((__doc__ or "").encode()[:128])])
    parameters = [*decoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(STEPS):
        context = Context(text[:, :-1])
        context.router_logits = []  # each mixture appends its own
        loss = head(decoder(text[:, :-1], context), target=text[:, 1:])
        balance = load_balancing_loss(context.router_logits, 2)
        (loss + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}, load balancing {balance.item():.3f}")


if __name__ == "__main__":
    main()
