"""Shared by Gemma 4's models with images and videos: token ids of placeholders, and their embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import any_true
from ligerzoo.layers import Context, KVCache, repeated_items, scatter_embeddings
from ligerzoo.models.config import refuse_unless
from ligerzoo.models.gemma4_config import Gemma4DecoderConfig
from ligerzoo.models.moe import DeepSeekMoECausalLM


@dataclass(frozen=True, kw_only=True)
class Gemma4MultimodalConfig(Gemma4DecoderConfig):
    """Configuration of Gemma 4's decoder with images and videos. Unless noted, fields are those of the decoder.

    Attributes:
        pad_token_id: token whose per-layer embeddings placeholders have; None for 0.
        image_token_id: placeholder token that image embeddings replace. It may be outside the vocabulary.
        video_token_id: placeholder token that embeddings of video frames replace. It may be outside the vocabulary.
        audio_token_id: placeholder token of audio, which the model does not read.
    """

    image_token_id: int = 258880
    video_token_id: int = 258884
    audio_token_id: int = 258881

    def validate(self) -> None:
        super().validate()
        pad, expected = self.pad_token_id, f"a token id, 0 to {self.vocab_size - 1}"
        refuse_unless(0 <= (pad or 0) < self.vocab_size, "pad_token_id", pad, expected)


_INPUTS = (("pixel_values", "image_position_ids"), ("pixel_values_videos", "video_position_ids"))
"""The inputs of images and of videos: patches and their positions."""

_WITHOUT_AUDIO = "Pass text, images and videos."


class Gemma4Multimodal(DeepSeekMoECausalLM):
    """Gemma 4's decoder with a language-model head and embeddings of images; see `embed`.

    Attributes:
        patches_per_token: number of patches of an image that become one token.
    """

    config: Gemma4MultimodalConfig
    patches_per_token = 1

    def embed_patches(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Returns the embeddings of images, (n, S, H), those of padding last; the arguments are those of `embed`."""
        raise NotImplementedError

    @property
    def placeholders(self) -> Mapping[int, str]:
        return dict(zip(self._token_ids, ("pixel_values", "pixel_values_videos", "input_features"), strict=True))

    @property
    def _token_ids(self) -> tuple[int, int, int]:
        """Placeholders of images, videos and audio."""
        return self.config.image_token_id, self.config.video_token_id, self.config.audio_token_id

    def embed(
        self,
        x: Tensor,
        context: Context,
        *,
        pixel_values: Tensor | None = None,
        image_position_ids: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_position_ids: Tensor | None = None,
        num_frames_per_video: Tensor | None = None,
        input_features: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Embeds tokens, images and videos: (B, T) token ids -> (B, T, H). Embeddings (B, T, H) are returned unchanged.

        If the config says so, adjacent tokens of an image or a frame attend to each other in layers with a sliding
        window. Calls with a cache must not split an image.

        Args:
            x: `input_ids` or `inputs_embeds` of `forward`.
            context: positions and mask of these tokens.
            pixel_values: (n, L, D), patches of all images of the batch, in order, padded.
            image_position_ids: (n, L, 2) int, column and row of each patch, -1 for padding.
            pixel_values_videos: patches of the frames of all videos, like `pixel_values`.
            video_position_ids: positions of these patches, like `image_position_ids`.
            num_frames_per_video: (n,), frames of each video; unused, since text separates the frames.
            input_features: audio, which is not supported; None.
            mm_token_type_ids: (B, T), token types from transformers' processors; unused, since the ids imply them.

        Raises:
            ValueError: the numbers of patches, positions and placeholders do not match, or audio is given.
        """
        if input_features is not None:
            raise LigerzooError("audio is not supported", where="input_features", remedy=_WITHOUT_AUDIO)
        given = (pixel_values, image_position_ids), (pixel_values_videos, video_position_ids)
        has_images = any(part is not None for pair in given for part in pair)
        if x.is_floating_point():
            if has_images:
                what, expected = "images need token ids", "input_ids with placeholder tokens"
                raise LigerzooError(what, where="pixel_values", got="inputs_embeds", expected=expected)
            return x
        c, (*masks, is_audio) = self.config, [x == token_id for token_id in self._token_ids]
        is_visual, padding_mask = masks[0] | masks[1], context.call_padding_mask()
        is_placeholder = is_visual | is_audio
        ids = x.masked_fill(is_placeholder, c.pad_token_id or 0)
        embeddings: Tensor = self.model.embed_tokens(ids)
        for mask, names, (patches, positions) in zip(masks, _INPUTS, given, strict=True):
            if patches is None and positions is None:
                continue
            if patches is None or positions is None or getattr(c, "vision_config", None) is None:
                what, expected = "images need patches, their positions, and a vision_config", " and ".join(names)
                raise LigerzooError(what, where=names[0], got="only some of them", expected=expected)
            features, tokens = self.embed_patches(patches, positions), self._tokens_of(positions).to(x.device)
            is_valid = torch.arange(features.shape[1], device=x.device) < tokens[:, None]
            runs, own = (
                torch.stack([torch.ones_like(tokens), tokens], 1),
                mask if padding_mask is None else mask & padding_mask,
            )
            embeddings = scatter_embeddings(embeddings, own, features.flatten(0, 1), runs, is_valid.flatten())
        self.model.set_block_inputs(context, embeddings, ids, is_placeholder if has_images else None)
        if has_images and c.use_bidirectional_attention == "vision":
            context.allow_bidirectional_spans(is_visual, need_window=True)
        return embeddings

    def _tokens_of(self, positions: Tensor) -> Tensor:
        """Returns the number of tokens of each image, (n,) int64, from the positions of its patches."""
        return (positions[..., 0] >= 0).sum(1) // self.patches_per_token

    def check_inputs(
        self,
        input_ids: Tensor,
        padding_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        **modalities: object,
    ) -> None:
        """See `LanguageModel.check_inputs`. Refuses audio."""
        if input_ids.shape[1] > 1 and any_true(input_ids == self.config.audio_token_id):
            what, got = "placeholder tokens of audio, which is not supported", self.config.audio_token_id
            raise LigerzooError(what, where="input_ids", got=got, remedy=_WITHOUT_AUDIO)
        super().check_inputs(input_ids, padding_mask, past_key_values, **modalities)

    def repeat_rows(
        self,
        modalities: Mapping[str, Tensor | None],
        repeats: int,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> dict[str, object]:
        """See `CausalLM.repeat_rows`. Images and frames are listed in order, without a row dimension."""
        rest = {name: modalities[name] for name in ("mm_token_type_ids",) if name in modalities}
        repeated = super().repeat_rows(rest, repeats, input_ids, attention_mask)
        for token_id, names in zip(self._token_ids[:2], _INPUTS, strict=True):
            given = {name: value for name in names if (value := modalities.get(name)) is not None}
            if given:
                mask = (
                    input_ids == token_id if attention_mask is None else (input_ids == token_id) & attention_mask.bool()
                )
                items = repeated_items(mask, self._tokens_of(given[names[1]]), repeats)
                repeated |= {name: value[items] for name, value in given.items()}
        return repeated
