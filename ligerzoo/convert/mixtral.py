"""Converter for Mixtral checkpoints.

Checkpoints store one tensor per expert and matrix, under the names of the original code: w1 (gate), w2 (down) and w3
(up). Checkpoints that transformers 5 saves in its in-memory layout have our names. config.json calls our `num_experts`
`num_local_experts`.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_spelling, written_as
from ligerzoo.convert.layout import Layout, PerExpert, Rename

_EXPERT = "block_sparse_moe.experts.{expert}"

RULES = (
    Rename("block_sparse_moe.gate", "mlp.gate"),
    PerExpert((f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"), "mlp.experts.gate_up_proj"),
    PerExpert((f"{_EXPERT}.w2.weight",), "mlp.experts.down_proj"),
)

ARCHITECTURE = Architecture(
    "mixtral",
    read_entries=first_spelling(num_experts=("num_experts", "num_local_experts")),
    write_entries=written_as(num_experts="num_local_experts"),
    layouts=lambda config: (Layout(RULES), Layout()),
)
