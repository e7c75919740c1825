"""`EncoderArchitecture`: what loading and saving need to know about encoders and their heads in transformers."""

from collections.abc import Iterator
from dataclasses import dataclass

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import SEQUENCE_SUFFIX
from ligerzoo.convert.layout import Rename
from ligerzoo.convert.tensor_slices import shapes_of


@dataclass(frozen=True)
class EncoderArchitecture(Architecture):
    """Encoders with a head for masked tokens, and the names of other heads.

    Attributes:
        text_head: names of the head of sequence classifiers.
        token_head: names of the head of token classifiers.
        extra_heads: stored tensors of heads that no model here has. Models for masked tokens keep them.
        unused_names: stored tensors that transformers ignores.
    """

    text_head: tuple[Rename, ...] = (Rename("classifier", "score"),)
    token_head: tuple[Rename, ...] = (Rename("classifier", "score"),)
    extra_heads: frozenset[str] = frozenset()
    unused_names: frozenset[str] = frozenset()

    @property
    def is_encoder(self) -> bool:
        return True

    @property
    def unused(self) -> frozenset[str]:
        return self.unused_names

    def is_extra_tensor(self, name: str, num_layers: int | None = None) -> bool:
        return super().is_extra_tensor(name, num_layers) or name in self.extra_heads

    def classifier_rules(self, suffix: str) -> tuple[Rename, ...]:
        return self.text_head if suffix == SEQUENCE_SUFFIX else self.token_head

    def stored_heads(self, config: object) -> Iterator[str]:
        shapes = shapes_of(self.build(config, device="meta").state_dict())
        for layout in self.layouts(config):
            for name in shapes:
                if not name.startswith("model."):
                    yield next(layout.slices_of(name, shapes)).stored_name
        yield from self.unused_names | self.extra_heads
