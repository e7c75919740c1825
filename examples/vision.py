"""Asks a vision-language model about pictures, all in one batch.

python examples/vision.py                                              # the package's small Qwen2-VL, on a CPU
python examples/vision.py Qwen/Qwen2-VL-2B-Instruct cat.png dog.png    # any vision-language model, and your pictures
"""

import sys
from pathlib import Path

import torch

from ligerzoo import AutoModel, Processor

ROOT = Path(__file__).parent.parent


def main(checkpoint: str = str(ROOT / "ligerzoo/demo/assets/tiny-shapes-qwen2-vl"), *pictures: str) -> None:
    files = [Path(picture) for picture in pictures] or sorted((ROOT / "examples/drawings").glob("*.png"))[:4]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModel.from_pretrained(checkpoint, device=device)
    processor = Processor.from_pretrained(checkpoint)

    questions = [[{"type": "image", "path": file}, {"type": "text", "text": "What do you see?"}] for file in files]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    inputs = processor(conversations, add_generation_prompt=True)  # padded on the left

    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    ids = model.generate(**inputs, max_new_tokens=20)
    for file, answer in zip(files, ids[:, inputs["input_ids"].shape[1] :], strict=True):
        print(f"{file.name}: {processor.tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
