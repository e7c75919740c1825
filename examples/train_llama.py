"""Loads a Llama, completes a text, fine-tunes in a plain PyTorch loop, saves, and generates with the result.

python examples/train_llama.py                                         # the package's small Llama, on a CPU
python examples/train_llama.py meta-llama/Llama-3.2-1B my_text.txt     # any Llama; a GPU is used if there is one
"""

import sys
from pathlib import Path

import torch

from ligerzoo import Tokenizer
from ligerzoo.models import Llama

ROOT = Path(__file__).parent.parent
STEPS, BATCH, LENGTH = 12, 4, 64


def main(
    checkpoint: str = str(ROOT / "ligerzoo/demo/assets/tiny-python-llama"),
    text: str = str(ROOT / "ligerzoo/demo/text.py"),
    output: str = "runs/llama",
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama.from_pretrained(checkpoint, dtype="float32", device=device)
    tokenizer = Tokenizer.from_pretrained(checkpoint)

    ids = torch.tensor(tokenizer.encode(Path(text).read_text()), device=device)
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    print(f"{len(rows)} rows of {LENGTH} tokens")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator).to(device)]
        loss = model(batch, labels=batch).loss  # the fused loss: no logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.3f}")

    model.save_pretrained(output)  # Hugging Face format: transformers and vLLM read it
    tokenizer.save_pretrained(output)

    model = Llama.from_pretrained(output, device=device)
    prompt = torch.tensor([tokenizer.encode("def load(directory):\n    return")], device=device)
    print(tokenizer.decode(model.generate(prompt, max_new_tokens=20)[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
