"""The loss over packed completions: that of each sequence alone, and that of TRL."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, Tokenizer
from ligerzoo.losses import GRPO
from ligerzoo.losses.grpo import VARIANTS
from ligerzoo.models import CausalLM, Gemma2, Gemma2Config, Mixtral, MixtralConfig
from ligerzoo.train.completion_batches import CompletionBatch, completion_logps, completion_loss, pack_completions
from ligerzoo.train.completions import CompletionSampler, SampledCompletion
from ligerzoo.train.data import PromptSample, Source
from tests.train.tiny_run import SIZES

TEMPERATURE = 0.8
OPTIONS: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 4.0}, "dr_grpo": {"max_length": 12}}


def sampled(seed: int = 0) -> list[SampledCompletion]:
    """Returns completions of different lengths with random log-probabilities, 4 of each prompt."""
    source = random.Random(seed)
    completions = []
    for index in range(3):
        ids = [256, *(source.randrange(256) for _ in range(source.randint(1, 9)))]
        prompt = PromptSample(ids, {"prompt": "?"}, Source("prompts", index, "row"))
        for _ in range(4):
            new = [source.randrange(256) for _ in range(source.choice([1, 3, 7, 12]))]
            completions.append(
                SampledCompletion(
                    input_ids=ids + new, labels=[-100] * len(ids) + new, source=prompt.source, prompt=prompt, text="",
                    logps=[-5.5 + source.uniform(-0.4, 0.4) for _ in new], finish_reason="stop", reward=0.0,
                    advantage=source.gauss(0, 1),
                )
            )  # fmt: skip
    return completions


def gradients(model: CausalLM, batches: list[CompletionBatch], variant: str, **inputs: Any) -> tuple[float, Any]:
    """Returns the loss of a step, and its gradients."""
    inputs["is_kl_corrected"] = inputs.get("beta", 0) > 0
    grpo = GRPO(variant=variant, temperature=TEMPERATURE, **{**OPTIONS.get(variant, {}), **inputs})
    completions = [one for batch in batches for one in batch.completions]
    items = sum(one.trained_tokens for one in completions)
    items = items if VARIANTS[variant].divided_by == "tokens" else len(completions)
    total = 0.0
    for batch in batches:
        extra = {"ref_logps": batch.sampler_logps - 0.1} if inputs.get("beta") else {}
        loss, _ = completion_loss(
            model, batch, grpo, num_items=items, advantages=batch.advantages, old_logps=batch.sampler_logps, **extra
        )
        loss.backward()
        total += float(loss.detach())
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return total, found


def small_model(name: str) -> CausalLM:
    torch.manual_seed(0)
    sizes = {**SIZES, "tie_word_embeddings": False}
    if name == "gemma2":
        return Gemma2(Gemma2Config(**sizes, head_dim=8, query_pre_attn_scalar=8, sliding_window=8))
    return Mixtral(MixtralConfig(**sizes, num_experts=4))


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference of gradients, divided by their norm."""
    error = sum(float((got[name] - gradient).double().square().sum()) for name, gradient in expected.items())
    return (error / sum(float(gradient.double().square().sum()) for gradient in expected.values())) ** 0.5


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_packed_completions_train_as_those_alone(checkpoint: Path, name: str, variant: str) -> None:
    """Equal in fp64. In fp32, packing errs by 1e-6, or as completions alone do (vespo's weights are exponential)."""
    model = AutoModel.from_pretrained(checkpoint) if name == "llama" else small_model(name)
    completions = sampled()
    packed = pack_completions(completions, batch_size=2, seq_length=48, pad_token_id=0)
    alone = [pack_completions([one], batch_size=1, seq_length=48, pad_token_id=0)[0] for one in completions]
    assert len(packed) < 4
    loss, got = gradients(model, packed, variant, beta=0.05)
    loss_alone, got_alone = gradients(model, alone, variant, beta=0.05)
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    model = model.double()
    exact_loss, exact = gradients(model, alone, variant, beta=0.05)
    assert relative_error(got, exact) < max(1e-6, 2 * relative_error(got_alone, exact))
    loss, got = gradients(model, packed, variant, beta=0.05)
    assert loss == pytest.approx(exact_loss, rel=1e-9)
    assert relative_error(got, exact) < 1e-10


def test_padding_is_not_trained(checkpoint: Path) -> None:
    """What fills the end of rows and of completions changes nothing."""
    model = AutoModel.from_pretrained(checkpoint)
    completions = sampled()
    results = []
    for padding in (0, 99):
        batches = pack_completions(completions, batch_size=2, seq_length=48, pad_token_id=padding)
        assert any(batch.padding for batch in batches)
        results.append(gradients(model, batches, "dapo"))
    assert results[0][0] == results[1][0]
    for parameter, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][parameter])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_sampling_are_those_of_training(checkpoint: Path, temperature: float) -> None:
    """With prompts of different lengths, several of them at once, completions that end early, and a
    generation_config.json that would change the distribution.
    """
    model, tokenizer = AutoModel.from_pretrained(checkpoint), Tokenizer.from_pretrained(checkpoint)
    model.generation_config = {
        "eos_token_id": list(range(40, 60)), "temperature": 0.2, "top_k": 2, "repetition_penalty": 3.0, "num_beams": 4,
        "suppress_tokens": list(range(60, 200)), "min_new_tokens": 9,
    }  # fmt: skip
    prompts = [PromptSample(tokenizer.encode("a" * n), {"prompt": "?"}, Source("x", n, "row")) for n in (1, 9, 4, 2, 7)]
    torch.manual_seed(0)
    sample = CompletionSampler(
        model, tokenizer, num_samples=4, max_new_tokens=10, temperature=temperature, batch_size=9, exact=False
    )
    completions = [dataclasses.replace(one, advantage=0.0) for one in sample(prompts)]
    assert [one.prompt for one in completions] == [prompt for prompt in prompts for _ in range(4)]
    assert {one.finish_reason for one in completions} == {"stop", "length"}
    for one in completions:
        is_end = [token in {*range(40, 60), 257} for token in one.tokens]
        assert is_end == [False] * (len(one.tokens) - 1) + [one.finish_reason == "stop"]
        assert len(one.tokens) == len(one.logps)
        assert one.finish_reason == "stop" or len(one.tokens) == 10
    assert len({tuple(one.tokens) for one in completions}) == len(completions)
    for batch in pack_completions(completions, batch_size=2, seq_length=40, pad_token_id=0):
        logps = completion_logps(model, batch, temperature=temperature)
        torch.testing.assert_close(logps, batch.sampler_logps, rtol=1e-5, atol=1e-5)


# TRL


TRL_OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"}, "cispo": {"epsilon_high": 5.0},
    "luspo": {"importance_sampling_level": "sequence"}, "dr_grpo": {"max_completion_length": 12},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_equals_that_of_trl(checkpoint: Path, tmp_path: Path, variant: str, beta: float) -> None:
    """The same completions and weights give TRL's loss and gradients."""
    pytest.importorskip("trl")
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModel.from_pretrained(checkpoint)
    completions = sampled()
    batches = pack_completions(completions, batch_size=2, seq_length=48, pad_token_id=0)
    loss, got = gradients(model, batches, variant, beta=beta)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = "</s>"
    options = {"loss_type": variant, "beta": beta, "temperature": TEMPERATURE, **TRL_OPTIONS.get(variant, {})}
    trainer = GRPOTrainer(
        theirs,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=12, num_generations=4,
            gradient_checkpointing=False, **options,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "?"}] * 12),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1

    def padded(rows: list[list[Any]], left: bool = False) -> torch.Tensor:
        longest = max(map(len, rows))
        fill = [[0] * (longest - len(row)) for row in rows]
        return torch.tensor([f + row if left else row + f for f, row in zip(fill, rows, strict=True)])

    prompts, tokens = [one.prompt.input_ids for one in completions], [one.tokens for one in completions]
    mask = padded([[1] * len(row) for row in tokens])
    old = padded([one.logps for one in completions])
    inputs = {
        "prompt_ids": padded(prompts, left=True), "prompt_mask": padded([[1] * len(row) for row in prompts], left=True),
        "completion_ids": padded(tokens), "completion_mask": mask, "old_per_token_logps": old,
        "ref_per_token_logps": (old - 0.1) * mask, "num_items_in_batch": mask.sum(),
        "advantages": torch.tensor([one.advantage for one in completions]),
    }  # fmt: skip
    theirs.train()
    expected = trainer._compute_loss(theirs, inputs)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    found = dict(theirs.named_parameters())
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, found[name].grad, rtol=1e-4, atol=1e-6, msg=name)
