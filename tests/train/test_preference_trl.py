"""DPO and KTO of the recipe and of TRL's trainers: the same losses from the same weights, data and optimizer."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
import transformers
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from ligerzoo.train.log import RunLog, read_log
from ligerzoo.train.recipes import preference
from tests.train.preference_data import options, write
from tests.train.tiny_run import write_checkpoint

datasets.disable_progress_bars()

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),  # torch, when accelerate trains on a CPU
    # transformers 5.23 renamed an option that TRL 1.16 sets.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*return_outputs=True.*:FutureWarning"),
]

STEPS, PER_STEP, LR = 20, 4, 1e-3
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


def records(method: str) -> list[dict[str, Any]]:
    """Returns records of 36 tokens, of which exactly `PER_STEP` fit a row of 144: each step is one row."""
    source = random.Random(0)

    def text(length: int) -> str:
        return "".join(source.choices("abcdefgh ", k=length))

    if method == "kto":
        lengths = [source.randint(3, 25) for _ in range(40)]
        return [
            {"prompt": text(n), "completion": text(34 - n), "label": source.random() < 0.5} for n in lengths
        ]  # fmt: skip
    lengths = [source.randint(3, 17) for _ in range(40)]
    return [{"prompt": text(6), "chosen": text(n), "rejected": text(20 - n)} for n in lengths]


@pytest.mark.parametrize(
    "method, variant",
    [
        ("dpo", None),
        ("kto", None),
        pytest.param("dpo", "ipo", marks=pytest.mark.thorough),
        pytest.param("kto", "apo_zero_unpaired", marks=pytest.mark.thorough),
    ],
)
def test_losses_agree_with_trl(
    method: str, variant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", initializer_range=0.1)
    rows = records(method)
    data = write(tmp_path / "data.jsonl", rows)
    seen: list[dict[str, Any]] = []
    log_step = RunLog.step

    def recorded(self: Any, step: int, **values: Any) -> None:
        sources = dict.fromkeys(source for batch in values["batches"] for source in batch.sources)
        seen.extend(rows[int(source.rpartition(":")[2]) - 1] for source in sources)
        log_step(self, step, **values)

    monkeypatch.setattr(RunLog, "step", recorded)
    given = options(
        checkpoint, data, tmp_path / "run", method=method, variant=variant, seq_length=36 * PER_STEP, batch_size=1,
        max_steps=STEPS, lr=LR, schedule="constant", warmup=0.0,
    )  # fmt: skip
    assert preference.main(preference.PreferenceRunOptions(**given)) == 0
    ours = [entry for entry in read_log(tmp_path / "run" / "log.jsonl") if "loss" in entry]
    assert len(seen) == STEPS * PER_STEP

    trainer_class, config_class = (KTOTrainer, KTOConfig) if method == "kto" else (DPOTrainer, DPOConfig)
    config = config_class(
        str(tmp_path / "trl"), max_steps=STEPS, per_device_train_batch_size=PER_STEP, logging_steps=1, report_to=[],
        save_strategy="no", learning_rate=LR, lr_scheduler_type="constant", weight_decay=0.0, use_cpu=True, bf16=False,
        disable_tqdm=True, train_sampling_strategy="sequential", gradient_checkpointing=False, max_length=None,
        **({} if variant is None else {"loss_type": variant}),
    )  # fmt: skip
    model, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32) for _ in range(2)
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint, pad_token="</s>")
    trainer = trainer_class(
        model, ref_model=reference, args=config, train_dataset=datasets.Dataset.from_list(seen),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(ours) == len(theirs) == STEPS
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    assert worst < 1e-4, json.dumps([(a["loss"], b["loss"]) for a, b in zip(ours, theirs, strict=True)])
    for a, b in zip(ours, theirs, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        for name in METRICS:
            if name in b:
                assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-3), name
    if method == "dpo":
        assert theirs[0].keys() >= set(METRICS)
    if method == "kto" and variant is None:
        assert max(entry["kl"] for entry in ours) > 0.1
    assert ours[-1]["loss"] != pytest.approx(ours[0]["loss"], abs=1e-2)
