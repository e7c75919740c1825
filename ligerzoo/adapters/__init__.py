"""Training with low-rank adapters (LoRA, DoRA): attaching, PEFT's files, merging. See docs/lora.md."""

from typing import TYPE_CHECKING

from ligerzoo.adapters.attach import add_lora as add_lora
from ligerzoo.adapters.attach import freeze_all_but as freeze_all_but
from ligerzoo.adapters.attach import has_adapters as has_adapters
from ligerzoo.adapters.loading import load_adapter as load_adapter
from ligerzoo.adapters.merge import fuse as fuse
from ligerzoo.adapters.merge import merge_lora as merge_lora
from ligerzoo.adapters.merge import remove_lora as remove_lora
from ligerzoo.adapters.saving import save_adapter as save_adapter
from ligerzoo.exports import renamed
from ligerzoo.layers.adapt import adapters_disabled as adapters_disabled

if not TYPE_CHECKING:  # a type checker reports a missing name itself
    __getattr__ = renamed(__name__)
