"""Real models, SmolLM2-135M-Instruct and Gemma 3 270M: as in transformers, trained, served, saved and converted."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ligerzoo import AutoModel, Tokenizer, cli
from ligerzoo.generate import ConversationCache
from tests.real.conftest import load_gguf
from tests.real.packages import llama_cpp, pip_package
from tests.serve.serving import serving

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TEXT = """The liger is a hybrid offspring of a male lion and a female tiger. It is the largest of all known cats.

def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a  # fibonacci(10) == 55

Im Jahr 1824 wurde der erste Liger geboren; «c'est énorme», dit le gardien. 東京の動物園にはライオンがいます。
In 2013, Hercules weighed 418.2 kg (922 lb), 3.33 m long, and ate about 13.6 kg of meat every day.
"""
PROMPTS = ["The capital of France is", "Once upon a time, in a zoo far away,", "1, 2, 3, 4,"]
QUESTION = [{"role": "user", "content": "What is a lion? Answer in one sentence."}]


every_model = pytest.mark.parametrize("checkpoint", ["smollm2", "gemma3"], indirect=True)


@every_model
def test_logits_and_perplexity(model: Any, theirs: Any, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad():
        ours, expected = model(ids).logits, theirs(ids).logits
        losses = model(ids, labels=ids).loss, theirs(ids, labels=ids).loss
    assert ids.shape[1] > 150
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
    assert ((ours - expected).abs().amax() / expected.abs().amax()) < 2e-5
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert losses[0].exp() < 60  # the weights are those of a language model


@every_model
def test_packed_texts_have_the_logits_of_each_alone(model: Any, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.encode(text) for text in (TEXT, *PROMPTS)]
    bounds = torch.tensor([0, *map(len, texts)]).cumsum(0)
    with torch.no_grad():
        packed = model(torch.tensor([[*chain(*texts)]]), cu_seqlens=bounds).logits[0]
        for start, text in zip(bounds, texts, strict=False):
            alone = model(torch.tensor([text])).logits[0]
            torch.testing.assert_close(packed[start : start + len(text)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [28]}], ids=str
)
@every_model
def test_greedy_texts(options: dict[str, Any], checkpoint: Path, model: Any, theirs: Any, tokenizer: Tokenizer) -> None:
    """Of each prompt alone, of all with padding on either side, and of many."""
    model.generation_config |= options
    length = {"max_new_tokens": 10}
    try:
        expected = []
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode(prompt)])
            tokens = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length, **options)
            expected.append(tokenizer.decode(tokens[0, ids.shape[1] :].tolist(), skip_special_tokens=True))
            assert (
                tokenizer.decode(model.generate(ids, **length)[0, ids.shape[1] :], skip_special_tokens=True)
                == (expected[-1])
            )
        for side in ("left", "right"):
            batch = tokenizer(PROMPTS, padding_side=side, return_tensors="pt")
            width = batch["input_ids"].shape[1]
            rows = model.generate(**batch, **length)[:, width:]
            assert [tokenizer.decode(row, skip_special_tokens=True) for row in rows] == expected
        many = model.generate_many([tokenizer.encode(prompt) for prompt in PROMPTS], batch_size=2, **length)
        assert {one.index: tokenizer.decode(one.tokens, skip_special_tokens=True) for one in many} == dict(
            enumerate(expected)
        )
    finally:
        for name in options:
            del model.generation_config[name]
    if not options:
        assert {"smollm2-fp32": " Paris", "gemma3-fp32": " France"}[checkpoint.name] in expected[0]


def test_the_command_line_answers_a_question(
    checkpoint: Path, theirs: Any, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.tensor([tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)])
    tokens = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    arguments = ["--chat", "--prompt", QUESTION[0]["content"], "--max-new-tokens", "20", "--dtype", "float32"]
    assert cli.main(["generate", str(checkpoint), *arguments]) == 0
    assert capsys.readouterr().out.strip() == tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_conversation_with_its_cache_goes_on_as_without(model: Any, tokenizer: Tokenizer) -> None:
    cache, messages = ConversationCache(model), list(QUESTION)
    for _ in range(2):
        ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True)])
        cached = model.generate(ids, past_key_values=cache.shared_with(ids), max_new_tokens=12)
        cache.keep(cached)
        assert torch.equal(cached, model.generate(ids, max_new_tokens=12))
        answer = tokenizer.decode(cached[0, ids.shape[1] :], skip_special_tokens=True)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And a tiger?"}]


def test_the_server_answers_the_official_client(model: Any, tokenizer: Tokenizer) -> None:
    openai = pytest.importorskip("openai")
    ids = torch.tensor([tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)])
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=16)[0, ids.shape[1] :], skip_special_tokens=True)
    options: dict[str, Any] = {"model": "demo", "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    with serving(model, tokenizer) as served, openai.OpenAI(base_url=served.url, api_key="none") as client:
        whole = client.chat.completions.create(**options).choices[0].message.content
        chunks = list(client.chat.completions.create(**options, stream=True))
    assert whole == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected


def test_lora_learns_and_fuses(checkpoint: Path, model: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    record = {"messages": [*QUESTION, {"role": "assistant", "content": "A lion is a large cat with a mane."}]}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(record)}\n" * 8)
    arguments = ["--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "run"), "--lora-rank", "4"]
    arguments += ["--batch-size", "2", "--seq-length", "64", "--max-steps", "4", "--lr", "2e-3", "--dtype", "float32"]
    assert cli.main(["train", str(checkpoint), *arguments]) == 0
    assert cli.main(["fuse", str(checkpoint), str(tmp_path / "run"), str(tmp_path / "fused")]) == 0
    ids = torch.tensor([tokenizer.apply_chat_template(record["messages"])])
    with torch.no_grad():
        before = model(ids, labels=ids).loss
        after = AutoModel.from_pretrained(tmp_path / "fused")(ids, labels=ids).loss
    assert after < before - 0.01


def test_what_is_saved_is_the_same_model_for_transformers(model: Any, theirs: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    expected = theirs.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


@pytest.mark.usefixtures("gguf")
def test_llama_cpp_converts_what_is_saved(model: Any, theirs: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The GGUF file has the same weights and tokens."""
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    paths = [llama_cpp() / "gguf-py", pip_package("sentencepiece", "0.2.3", "")]
    converter = [sys.executable, str(llama_cpp() / "convert_hf_to_gguf.py"), str(tmp_path)]
    subprocess.run(
        [*converter, "--outfile", str(tmp_path / "model.gguf"), "--outtype", "f32"], check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip
    converted, expected = load_gguf(tmp_path, "model.gguf").state_dict(), theirs.state_dict()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    vocabulary = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").get_vocab()
    assert vocabulary == tokenizer.get_vocab()
