"""Converter for MiniMax-M2 checkpoints, whose tensors are stored as in Mixtral, with biases of routers.

config.json gives the number of rotated features, `rotary_dim`, or their fraction, `partial_rotary_factor`. transformers
ignores entries for linear attention, shared experts and other norms, which are refused.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import FAMILIES, MIXTRAL, ROUTER_BIAS
from ligerzoo.convert.fields import partial_rotary_factor, rope_fields
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.entries import Entries, JsonType, list_of
from ligerzoo.models.minimax_m2 import MiniMaxM2Config

_MIXTRAL = FAMILIES["mixtral"]
_ONE = JsonType[int]("1", lambda value: value == 1)
_ONES = list_of(_ONE, "ones only", "linear attention is not supported")


def _read_entries(raw: Entries) -> dict[str, object]:
    """Returns the entries of config.json under the names of our fields, without a sliding window.

    Raises:
        ConfigError: A layer uses linear attention, or `rotary_dim` is invalid.
    """
    _ONES.entry(raw, "attn_type_list")
    return {**_MIXTRAL.read_entries(raw), "sliding_window": None}


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads the fields of the rotary embedding; `partial_rotary_factor` takes precedence over `rotary_dim`."""
    head_dim = raw.get("head_dim") or MiniMaxM2Config.head_dim
    most = head_dim if type(head_dim) is int else 0
    sizes = JsonType[int]("an integer, 1 to head_dim", lambda value: type(value) is int and 0 < value <= most)
    rotary_dim = sizes.entry(raw, "rotary_dim")
    if rotary_dim is None:
        return rope_fields(raw, default_theta)
    rotated = partial_rotary_factor(raw, rotary_dim / most)
    return {**rope_fields(raw, default_theta), "partial_rotary_factor": rotated}


def _write_entries(config: MiniMaxM2Config, entries: dict[str, object]) -> dict[str, object]:
    del entries["sliding_window"]
    if entries["partial_rotary_factor"] == 1:
        del entries["partial_rotary_factor"]
    else:
        entries["rotary_dim"] = config.rotary_size
    return _MIXTRAL.write_entries(config, entries)


ARCHITECTURE = Architecture(
    "minimax_m2",
    accepted={
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    read_entries=_read_entries,
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=lambda config: (
        Layout((Rename("block_sparse_moe.e_score_correction_bias", ROUTER_BIAS), *MIXTRAL)),
        Layout((Rename("mlp.e_score_correction_bias", ROUTER_BIAS),)),
    ),
    keeps_extra_layers=True,
    quantized_formats=frozenset({"fp8"}),
)
