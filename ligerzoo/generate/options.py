"""Options of a call: checked, completed from generation_config.json, or refused."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from ligerzoo.checks import AT_LEAST_1, COUNT, FLAG, Values
from ligerzoo.dtensors import is_divided, is_dtensor
from ligerzoo.errors import LigerzooError, did_you_mean, warn
from ligerzoo.kernels.fp8 import FP8
from ligerzoo.layers import KVCache
from ligerzoo.sampling_options import FILTERS, SAMPLING_OPTIONS, SamplingOptions

T = TypeVar("T")


class SupportsGenerate(Protocol):
    """A model that `generate` accepts, called like `ligerzoo.models.CausalLM`.

    `generate` also uses `check_inputs`, `device`, `inputs_per_token`, `modalities` and `new_cache` if the model has
    them. The option `inputs_embeds` needs `get_input_embeddings`, and a call without token ids. `num_return_sequences`
    needs a cache with `select_rows` and, with further model inputs, `repeat_rows`.
    """

    @property
    def config(self) -> Any: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    def __call__(
        self,
        input_ids: Any,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        *,
        past_key_values: Any,
        use_cache: bool,
        logits_to_keep: int,
        **model_inputs: Any,
    ) -> Any: ...


class CausalModel(SupportsGenerate, Protocol):
    """All that generation uses of `ligerzoo.models.CausalLM`; options need some of it, see `SupportsGenerate`."""

    modalities: Sequence[str]
    placeholders: Mapping[int, str]
    inputs_per_token: Sequence[str]

    @property
    def device(self) -> torch.device: ...
    def new_cache(
        self, capacity: int | None = None, dtype: torch.dtype | None = None, *, exact: bool = False
    ) -> KVCache: ...
    def get_input_embeddings(self) -> nn.Embedding: ...
    def check_inputs(
        self,
        input_ids: Tensor,
        padding_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        **modalities: object,
    ) -> None: ...
    def repeat_rows(
        self,
        modalities: Mapping[str, object],
        repeats: int,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Mapping[str, object]: ...


POSITIVE_INTEGER = AT_LEAST_1._replace(expected="a positive integer")


def refuse_unknown_options(model: SupportsGenerate, names: Iterable[str], options: Sequence[str]) -> None:
    """Raises LigerzooError unless all names, which are not `options`, are inputs of the model.

    A model without `modalities` may have any inputs whose names `REMEDIES` lacks.
    """
    modalities: Sequence[str] | None = getattr(model, "modalities", None)
    for name in names:
        if name not in (modalities or ()) and (modalities is not None or name in REMEDIES):
            inputs = ", ".join(modalities or ()) or "text inputs only, such as input_ids"
            remedy = "help(ligerzoo.generate.generate) lists the options."
            what = f"not an option of generate or input of {type(model).__name__}"
            raise no_such_option(name, what, [*options, *(modalities or ())], inputs, remedy)


def count_new_tokens(max_new_tokens: int | None, max_length: int | None, prompt_length: int) -> int:
    """Returns the largest number of new tokens from the options of `generate`.

    Args:
        max_new_tokens: takes precedence, with a warning if both are given.
        max_length: largest number of tokens with those of the prompt.
        prompt_length: number of tokens of the padded prompts.

    Raises:
        LigerzooError: a number is invalid, both are None, or the prompt has `max_length` tokens already.
    """
    if max_length is not None:
        check_option("max_length", max_length, COUNT)
    if max_new_tokens is None:
        if max_length is None:
            raise invalid("max_new_tokens", "None", COUNT.expected, "Pass max_new_tokens=20, for example.")
        expected = f"more than {prompt_length}, the length of the prompts"
        require(max_length > prompt_length, "max_length", max_length, expected, "Use max_new_tokens.")
        return max_length - prompt_length
    check_option("max_new_tokens", max_new_tokens, COUNT)
    if max_length is not None:
        warn(f"generate: max_new_tokens={max_new_tokens} takes precedence over max_length={max_length}. Pass only one.")
    return max_new_tokens


def token_ids(model: SupportsGenerate, name: str, argument: int | Sequence[int] | None) -> list[int]:
    """Returns the token ids from the argument, else generation_config, else config. Negative ids mean none."""
    sources = (argument, model.generation_config.get(name), getattr(model.config, name, None))
    value: Any = next((source for source in sources if source is not None), [])
    ids = value if isinstance(value, list | tuple) else [value]
    valid = all(type(i) is int and abs(i) < 2**31 for i in ids)
    remedy = "tokenizer.token_to_id(text) returns the id of a token." if isinstance(value, str) else None
    require(valid, name, repr(value), "a token id below 2^31, or a list of them", remedy)
    return [i for i in ids if i >= 0]


def check_copies(num_return_sequences: int, *, do_sample: object) -> None:
    """Raises LigerzooError unless `num_return_sequences` is valid for greedy decoding or sampling."""
    check_option("num_return_sequences", num_return_sequences, POSITIVE_INTEGER)
    got = f"{num_return_sequences} without sampling, which gives equal sequences"
    is_useful = num_return_sequences == 1 or do_sample is not False
    require(is_useful, "num_return_sequences", got, "1", "Pass do_sample=True to sample different ones.")


def check_devices(model: object, name: str | None = None, inputs: Tensor | None = None) -> None:
    """Raises LigerzooError if the model has no weights or is sharded, or if inputs are on another device than they.

    Args:
        model: the model.
        name: of the inputs, for messages.
        inputs: model inputs, or None.
    """
    device: torch.device | None = getattr(model, "device", None)
    where = type(model).__name__
    if device is not None and device.type == "meta":
        what = "the weights are on the meta device, which stores no values"
        raise LigerzooError(what, where=where, remedy="Load them with from_pretrained.")
    weights = model.parameters() if isinstance(model, nn.Module) and hasattr(model, "unshard") else ()
    if any(is_dtensor(weight) and not is_divided(weight) for weight in weights):
        what = "the model is sharded: each token would gather all weights from all processes"
        raise LigerzooError(what, where=where, remedy="Generate within `with ligerzoo.parallel.unsharded(model):`.")
    # Weights on a CPU may be offloaded, so that the model computes elsewhere.
    if inputs is not None and device is not None and device != inputs.device:
        is_offloaded = device.type == "cpu" and inputs.device.type != "meta"
        remedy = f"Use {name}.to(model.device)."
        require(is_offloaded, str(name), f"a tensor on {inputs.device}", f"one on {device}, like the model", remedy)


def invalid(name: str, got: object, expected: str, remedy: str | None = None) -> LigerzooError:
    """Returns the error for the value of an option."""
    return LigerzooError("invalid value", where=name, got=got, expected=expected, remedy=remedy)


def require(holds: bool, name: str, got: object, expected: str, remedy: str | None = None) -> None:
    """Raises LigerzooError unless the value of an option is valid."""
    if not holds:
        raise invalid(name, got, expected, remedy)


def check_option(name: str, value: object, values: Values, remedy: str | None = None) -> None:
    """Raises LigerzooError unless the value of an option is one of these."""
    if not values.accepts(value):
        raise invalid(name, repr(value), values.expected, remedy)


def type_name(value: object) -> str:
    """Returns the name of a value's type, or "None", for messages about objects whose repr is long."""
    return "None" if value is None else type(value).__name__


_FILE = "generation_config.json"
_TOP_K = 50  # transformers' default, which its files leave out
_FOLLOWED = {*SAMPLING_OPTIONS, "num_return_sequences", "stop_strings"} - {*FILTERS, "constraint", "logits_processor"}
_LENGTHS = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
_FOLLOWED -= {name for pair in _LENGTHS for name in pair}


@dataclass(frozen=True)
class CallOptions:
    """The options of a call: those of the caller, and those of generation_config.json that the caller leaves out.

    Attributes:
        values: the options, by name; none is None.
        from_file: names of those of generation_config.json.
        others: further arguments of the caller, such as model inputs.
    """

    values: Mapping[str, Any]
    from_file: Collection[str]
    others: Mapping[str, Any]

    def get(self, name: str, default: object = None) -> Any:
        """Returns the value of an option."""
        return self.values.get(name, default)

    @property
    def sampling(self) -> SamplingOptions:
        """The options of sampling. Raises LigerzooError if one is invalid."""
        return SamplingOptions(**{name: value for name, value in self.values.items() if name in SAMPLING_OPTIONS})

    @contextmanager
    def naming_file(self) -> Iterator[None]:
        """Lets errors about options of the file name the file."""
        try:
            yield
        except LigerzooError as error:
            if error.where not in self.from_file:
                raise
            remedy = f"Pass {error.where} as an argument, or correct the file."
            raise error.moved_to(f"{_FILE}, {error.where}", remedy) from None


def parse_call(
    model: SupportsGenerate, given: Mapping[str, Any], arguments: Mapping[str, Any], *, use_model_defaults: bool
) -> CallOptions:
    """Completes the options of a call from generation_config.json.

    Options that change the tokens are followed, except for token ids, which `Stopping` looks up. Those that change how
    fast a call is or what it returns, such as `use_cache`, are not.

    Args:
        model: the model, whose generation_config.json may have options.
        given: options of the caller. None counts as left out.
        arguments: further arguments of the caller: options of sampling, those of transformers that have no effect, and
            others.
        use_model_defaults: whether to follow generation_config.json.

    Raises:
        LigerzooError: `use_model_defaults` is not a bool.

    Warns:
        UserWarning: generation_config.json has an option that changes the tokens and is not implemented.
    """
    check_option("use_model_defaults", use_model_defaults, FLAG)
    others = {
        name: value for name, value in arguments.items() if name not in SAMPLING_OPTIONS and not is_neutral(name, value)
    }
    given = {**given, **{name: value for name, value in arguments.items() if name not in others}}
    values = {name: value for name, value in given.items() if value is not None}
    generation_config = model.generation_config if use_model_defaults else {}
    file = {name: value for name, value in generation_config.items() if value is not None and name not in values}
    samples = values.get("do_sample", file.get("do_sample", False)) is not False
    if generation_config.get("do_sample") is True and "top_k" not in values:
        file.setdefault("top_k", _TOP_K)
    for name, needs_sampling in NOT_IMPLEMENTED.items():
        if name in file and samples >= needs_sampling and not is_neutral(name, file[name]):
            warn(
                f"{_FILE}: {name}={reprlib.repr(file[name])} is not implemented and has no effect. Remove it, or "
                "use the generate method of transformers: "
                "ligerzoo.integrations.transformers.wrap(model).generate(...)."
            )
    names = [*sorted(_FOLLOWED), *(FILTERS if samples else ())]
    for pair in _LENGTHS:  # the first takes precedence, and one of the caller replaces both
        names += [name for name in pair if name in file and not values.keys() & set(pair)][:1]
    followed = {name: file[name] for name in names if name in file}
    return CallOptions({**values, **followed}, followed.keys(), others)


def limits_length(generation_config: Mapping[str, object]) -> bool:
    """Returns whether generation_config.json has a largest number of tokens."""
    return any(generation_config.get(name) is not None for name in _LENGTHS[0])


class CacheOptions(NamedTuple):
    """The options of the KV caches of a call.

    Attributes:
        dtype: see `ligerzoo.layers.KVCache`.
        exact: see `ligerzoo.layers.KVCache`.
    """

    dtype: torch.dtype | None = None
    exact: bool = False

    @property
    def is_default(self) -> bool:
        """Whether a model's default cache has these options."""
        return self == DEFAULT_CACHE

    def new_cache(self, model: CausalModel | nn.Module, capacity: int | None = None) -> KVCache:
        """Returns a cache of the model. One without the options is made without naming them."""
        options = {name: value for name, value in self._asdict().items() if value}
        new_cache = cast(CausalModel, model).new_cache
        return new_cache(**options) if capacity is None else new_cache(capacity, **options)

    def check(self, model: object) -> None:
        """Raises LigerzooError unless the model can have such caches."""
        expected = f"{FP8}, or None for the dtype of the keys and values"
        require(self.dtype in (None, FP8), "cache_dtype", repr(self.dtype), expected)
        check_option("exact", self.exact, FLAG)
        if not self.is_default:
            name = "cache_dtype" if self.dtype is not None else "exact"
            got = f"a {type(model).__name__} without new_cache"
            has_caches = hasattr(model, "new_cache")
            require(has_caches, name, got, "a model with the method new_cache, like ligerzoo.models.CausalLM")
            try:
                self.new_cache(cast(CausalModel, model))
            except ValueError as error:
                raise LigerzooError(str(error), where=name) from None


DEFAULT_CACHE = CacheOptions()
"""Keys and values in their own dtype, in caches that need not be exact."""


# Options that other libraries have

_WRAP = "Use the generate method of transformers: ligerzoo.integrations.transformers.wrap(model).generate(...)."
_BEAMS = "Beam search is not implemented. " + _WRAP
_NOT_IMPLEMENTED = "It is not implemented. " + _WRAP
_SPECULATIVE = "Use prompt_lookup_num_tokens=10, or assistant_model=... with num_assistant_tokens=5."
_STOP_STRINGS = "Use stop_strings=[...] with tokenizer=tokenizer."
_STOP_IDS = "Use eos_token_id=..., which may be a list."
_COPIES = "Use num_return_sequences=... with do_sample=True."
_LOG_PROBS = "Use return_dict_in_generate=True, which returns the log-probabilities of the new tokens as .logps."
_FORWARD = "Call the model itself, which returns them: model(sequences, {}=True)."
_OWN_CACHE = "Pass past_key_values=model.new_cache(), or model.new_cache(capacity) for a cache of fixed size."
_PROMPTS = "Pass token ids as input_ids, or embeddings as inputs_embeds."
_NO_COMPILE = "Decode steps run as captured CUDA graphs where the model allows it. Leave it out."


def _all(names: str, value: T) -> dict[str, T]:
    """Returns the same value for several names."""
    return dict.fromkeys(names.split(), value)


REMEDIES = {
    # other names of our options
    "inputs": _PROMPTS,
    "max_tokens": "Use max_new_tokens.",
    "seed": "Use generator=torch.Generator(model.device).manual_seed(seed).",
    "stop": _STOP_STRINGS,
    "stop_sequences": _STOP_STRINGS,
    "stop_tokens": _STOP_IDS,
    "stop_token_ids": _STOP_IDS,
    "frequency_penalty": "Use repetition_penalty.",
    "presence_penalty": "Use repetition_penalty.",
    "n": _COPIES,
    "best_of": _COPIES,
    "logprobs": _LOG_PROBS,
    "kv_cache_dtype": f"Use cache_dtype={FP8}.",
    "return_dict": "Use return_dict_in_generate=True.",
    "skip_special_tokens": "Pass it to tokenizer.decode, or to TextStreamer.",
    # inputs of `forward` that `generate` computes
    "labels": "Call the model itself to compute a loss: model(input_ids, labels=labels).loss.",
    "position_ids": "They are computed from attention_mask.",
    "cu_seqlens": "Pass one prompt in each row, with padding and an attention_mask.",
    "logits_to_keep": "Only the last logits are computed.",
    # options of transformers
    "max_time": "Use stopping_criteria=[transformers.MaxTimeCriteria(seconds)].",
    "output_scores": _LOG_PROBS,
    "output_logits": _LOG_PROBS,
    "output_attentions": _FORWARD.format("output_attentions"),
    "output_hidden_states": _FORWARD.format("output_hidden_states"),
    "generation_config": "Pass its values as options: generate(input_ids, max_new_tokens=20, do_sample=True).",
    "bos_token_id": "Begin each prompt with it; tokenizers do.",
    "decoder_start_token_id": "Begin each prompt with it; tokenizers do.",
    "synced_gpus": "Run one process per model, or gather the weights of a sharded model first.",
    "transformers_version": "Leave it out.",
    "is_assistant": _SPECULATIVE,
    **_all(
        "cache_implementation cache_config max_cache_len prefill_chunk_size low_memory",
        _OWN_CACHE,
    ),
    **_all("compile_config disable_compile continuous_batching_config", _NO_COMPILE),
    **_all(
        "num_beams num_beam_groups length_penalty early_stopping diversity_penalty constraints force_words_ids",
        _BEAMS,
    ),
    **_all(
        "assistant_tokenizer assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight "
        "assistant_lookbehind draft_model num_assistant_tokens_schedule num_speculative_tokens speculation_type "
        "speculative_model target_lookbehind use_mtp",
        _SPECULATIVE,
    ),
    **_all(
        "custom_generate dola_layers encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff "
        "eta_cutoff exponential_decay_length_penalty guidance_scale negative_prompt_attention_mask "
        "negative_prompt_ids penalty_alpha prefix_allowed_tokens_fn remove_invalid_values renormalize_logits "
        "token_healing top_h typical_p watermarking_config",
        _NOT_IMPLEMENTED,
    ),
}
"""What to do instead, by the name of an option that other libraries have."""

NEUTRAL_VALUES: dict[str, tuple[float, ...]] = {
    **_all(
        "num_beams num_beam_groups length_penalty guidance_scale encoder_repetition_penalty typical_p",
        (1,),
    ),
    **_all(
        "penalty_alpha diversity_penalty encoder_no_repeat_ngram_size early_stopping token_healing output_scores "
        "output_logits output_attentions output_hidden_states synced_gpus",
        (0,),
    ),
    **_all("epsilon_cutoff eta_cutoff", (0, 1)),
    **_all("remove_invalid_values renormalize_logits", (False, True)),
}
"""Values without an effect on the result, of options of transformers that are not implemented. They are accepted."""

NOT_IMPLEMENTED = {
    **_all(
        "num_beams num_beam_groups penalty_alpha dola_layers constraints force_words_ids guidance_scale "
        "encoder_repetition_penalty encoder_no_repeat_ngram_size exponential_decay_length_penalty token_healing "
        "watermarking_config max_time",
        False,
    ),
    **_all("typical_p top_h epsilon_cutoff eta_cutoff", True),
}
"""Options that change the tokens and are not implemented, and whether they do so only in sampling."""


def is_neutral(name: str, value: object) -> bool:
    """Returns whether an option of transformers that is not implemented has a value without an effect."""
    is_plain = value is None or isinstance(value, int | float)
    return is_plain and name in NEUTRAL_VALUES and (value is None or value in NEUTRAL_VALUES[name])


def no_such_option(
    name: str, what: str, names: Iterable[str], expected: str, remedy: str | None = None, others: Mapping[str, str] = {}
) -> LigerzooError:
    """Returns the error for an option that does not exist; `others` has further remedies."""
    found = others.get(name) or REMEDIES.get(name) or did_you_mean(name, names)
    return LigerzooError(what, where=name, expected=None if found else expected, remedy=found or remedy)
