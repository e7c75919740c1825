"""Converter for BERT checkpoints: names of tensors, and fields of the config that have other names."""

from collections.abc import Mapping
from dataclasses import replace

from ligerzoo.convert.encoder import EncoderArchitecture
from ligerzoo.convert.fields import first_spelling, written_as
from ligerzoo.convert.layout import Layout, Rename, Rule
from ligerzoo.models.config import DecoderConfig

BLOCK = (
    Rename("encoder.layer", "layers"),
    Rename("attention.self.query", "self_attn.q_proj"),
    Rename("attention.self.key", "self_attn.k_proj"),
    Rename("attention.self.value", "self_attn.v_proj"),
    Rename("attention.output.dense", "self_attn.o_proj"),
    Rename("intermediate.dense", "mlp.fc1"),
    Rename("output.dense", "mlp.fc2"),
    Rename("embeddings.word_embeddings", "embed_tokens"),
    Rename("embeddings.position_embeddings", "position_embeddings"),
    Rename("embeddings.token_type_embeddings", "token_type_embeddings"),
)
"""Names in BERT's blocks and embeddings, but for norms."""

NORMS = (
    Rename("attention.output.LayerNorm", "post_attention_layernorm"),
    Rename("output.LayerNorm", "post_feedforward_layernorm"),
    Rename("embeddings.LayerNorm", "input_norm"),
)
"""Names of their norms."""


def _of_tensorflow(rules: tuple[Rename, ...]) -> tuple[Rule, ...]:
    """Returns the rules of norms in files that were converted from TensorFlow's, with `gamma` and `beta`."""
    return tuple(
        Rename(f"{rule.stored_path}.{stored}", f"{rule.path}.{name}")
        for rule in rules
        for stored, name in (("gamma", "weight"), ("beta", "bias"))
    )


def _write_entries(config: object, entries: dict[str, object]) -> dict[str, object]:
    """Returns the entries of config.json, without those about rotary positions."""
    kept = {name: value for name, value in entries.items() if not name.startswith("rope_")}
    return written_as(rms_norm_eps="layer_norm_eps")(config, kept)


def bert_architecture(
    model_type: str,
    hf_class: str,
    prefix: str,
    masked_head: Mapping[str, str],
    linear: str,
    text_head: Mapping[str, str],
    extra_heads: frozenset[str] = frozenset(),
) -> EncoderArchitecture:
    """Returns the architecture of encoders with BERT's names.

    The bias over the vocabulary has two names in transformers, of which files have one or both. Of both, that of the
    head counts where the config ties the head to the embedding, else that of its linear layer, as in transformers 5.

    Args:
        model_type: see `Architecture`, as for `hf_class`.
        prefix: prefix of the encoder's tensors; files of a bare encoder, such as `BertModel`, have none.
        masked_head: names of the head for masked tokens, and ours.
        linear: name of its linear layer.
        text_head: names of the head of sequence classifiers, and ours.
        extra_heads: see `EncoderArchitecture`.
    """
    bias, linear_bias = next(name for name in masked_head if name.endswith("bias")), f"{linear}.bias"
    head = _renames(masked_head)
    rules = (*BLOCK, *NORMS, *head, Rename(linear, "lm_head"))
    norms = tuple(rule for rule in (*NORMS, *head) if rule.stored_path.endswith("LayerNorm"))

    def layouts(config: DecoderConfig) -> tuple[Layout, ...]:
        layout = Layout(rules, (("model.", f"{prefix}.", ""),))
        own = replace(layout, rules=(Rename(linear_bias, "lm_head.bias"), *rules))
        new, other = (layout, own) if config.tie_word_embeddings else (own, layout)
        return new, other, replace(layout, rules=(*_of_tensorflow(norms), *rules)), new

    return EncoderArchitecture(
        model_type,
        hf_class,
        accepted={
            "hidden_act": ("gelu",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            "position_embedding_type": ("absolute",),
            "pruned_heads": ({},),
        },
        read_entries=first_spelling(rms_norm_eps=("layer_norm_eps",)),
        write_entries=_write_entries,
        layouts=layouts,
        extra_tensors=rf"({prefix}\.)?(pooler\..+|embeddings\.(position|token_type)_ids)",
        text_head=_renames(text_head),
        extra_heads=extra_heads,
        unused_names=frozenset({bias, linear_bias}),
    )


def _renames(names: Mapping[str, str]) -> tuple[Rename, ...]:
    return tuple(Rename(*pair) for pair in names.items())


ARCHITECTURE = bert_architecture(
    "bert",
    "BertForMaskedLM",
    "bert",
    {
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions.bias": "lm_head.bias",
    },
    "cls.predictions.decoder",
    {"model.pooler.dense": "head.dense", "classifier": "score"},
    frozenset({"cls.seq_relationship.weight", "cls.seq_relationship.bias"}),
)
