"""Options of transformers' `from_pretrained` that scripts pass: what they mean here, or what to do instead.

None means the default everywhere. An option that changes nothing here, such as the choice of an attention kernel, is
accepted; if the user may have expected something else, a line of the log says what happens.
"""

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import torch

from ligerzoo.entries import is_object, is_one_of
from ligerzoo.errors import ConfigError, unknown_names


class HubOptions(TypedDict, total=False):
    """Options of a download from the hub.

    Attributes:
        revision: branch, tag or commit.
        token: access token for private and gated repositories. Defaults to the token stored by `hf auth login`.
        cache_dir: directory of the downloaded files. Defaults to the hub library's cache.
        local_files_only: use cached files only, without network access.
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool


class TextOptions(HubOptions, total=False):
    """Options of `from_pretrained` of tokenizers and processors: those of the hub, and of transformers."""

    force_download: bool
    proxies: None
    resume_download: bool
    trust_remote_code: bool
    use_auth_token: None
    use_fast: bool


HUB_DEFAULTS: HubOptions = {"revision": None, "token": None, "cache_dir": None, "local_files_only": False}
HUB_OPTIONS = tuple(HUB_DEFAULTS)
_FLAG = (True, False)
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")

_QUANTIZE = "Quantize the loaded model with torchao, see ligerzoo.integrations.torchao."
_ONE_DEVICE = 'Name one device, such as "cuda:0"; ligerzoo.parallel.load_sharded loads a model on several GPUs.'
_SAFE = "Leave it out: only safetensors files are read."


class _Option(NamedTuple):
    """An option of transformers: the accepted values other than None, and what to do instead of others."""

    values: tuple[object, ...] = ()
    remedy: str | None = None


_EVERYWHERE = {
    "force_download": _Option((False,)),
    "proxies": _Option(),
    "resume_download": _Option(_FLAG),
    "trust_remote_code": _Option(_FLAG),
    "use_auth_token": _Option(remedy="Use token=..."),
}
_OF_TEXT = {**_EVERYWHERE, "use_fast": _Option(_FLAG)}
_OF_MODELS = {
    **_EVERYWHERE,
    "attn_implementation": _Option(_KERNELS, "Leave it out: attention chooses its kernel."),
    "experts_implementation": _Option(("eager", "batched_mm", "grouped_mm")),
    "ignore_mismatched_sizes": _Option(
        (False,), "Call resize_token_embeddings, or load with strict=False into an extended class."
    ),
    "load_in_4bit": _Option((False,), _QUANTIZE),
    "load_in_8bit": _Option((False,), _QUANTIZE),
    "low_cpu_mem_usage": _Option(_FLAG),
    "max_memory": _Option(remedy=_ONE_DEVICE),
    "offload_folder": _Option(remedy=_ONE_DEVICE),
    "offload_state_dict": _Option((False,), _ONE_DEVICE),
    "output_loading_info": _Option((False,), "Leave it out: model.origin lists missing and unexpected tensors."),
    "quantization_config": _Option(remedy=_QUANTIZE),
    "tp_plan": _Option(remedy=_ONE_DEVICE),
    "use_cache": _Option(_FLAG),
    "use_kernels": _Option(_FLAG),
    "use_safetensors": _Option((True,), _SAFE),
    "weights_only": _Option((True,), _SAFE),
}

_NOTES = {
    ("attn_implementation", None): "attention chooses its kernel, whose results are those of all implementations",
    ("trust_remote_code", True): "code of checkpoints is never run",
    ("use_cache", True): "generate uses a cache; forward returns one if it is called with use_cache=True",
}
"""What happens instead of what an option says, by option and value; None for any value."""


def model_options(
    options: Mapping[str, Any], dtype: str | torch.dtype, device: str | torch.device | None
) -> tuple[dict[str, Any], str | torch.dtype, str | torch.device | None]:
    """Reads options of models.

    Args:
        options: further arguments of `from_pretrained`.
        dtype: the argument `dtype`.
        device: the argument `device`.

    Returns:
        The options that are not transformers', dtype, and device.

    Raises:
        ConfigError: a value has no meaning here, or two arguments say different things.
    """
    torch_dtype, device_map = options.get("torch_dtype"), options.get("device_map")
    if torch_dtype is not None:
        if dtype not in ("auto", torch_dtype):
            raise ConfigError("differs from dtype", where="argument torch_dtype", got=torch_dtype, expected=dtype)
        dtype = torch_dtype
    if device_map is not None:
        if device is not None:
            raise ConfigError("given twice", where="arguments device and device_map", expected="one of them")
        device = _single_device(device_map)
    others = _others({n: v for n, v in options.items() if n not in ("torch_dtype", "device_map")}, _OF_MODELS)
    return others, dtype, device


def text_options(options: Mapping[str, Any], where: str, *names: str) -> HubOptions:
    """Checks options of tokenizers and processors, and returns those of the hub.

    Args:
        options: `TextOptions`.
        where: the function.
        names: its other arguments, for the error message.

    Raises:
        ConfigError: an option is unknown, or a value has no meaning here.
    """
    others = _others(options, _OF_TEXT)
    for name, nearest in unknown_names(others, HUB_OPTIONS, [*names, *_OF_TEXT]):
        where, expected = f"{where}, argument {name}", f"one of {', '.join([*HUB_OPTIONS, *names])}"
        raise ConfigError("unknown", where=where, expected=expected, remedy=nearest)
    return cast("HubOptions", others)


def _others(options: Mapping[str, Any], accepted: Mapping[str, _Option]) -> dict[str, Any]:
    """Returns the options that are not transformers', and checks the others."""
    for name, value in options.items():
        if name not in accepted or value is None:
            continue
        values = list(value.values()) if name == "attn_implementation" and is_object(value) else [value]
        choices, remedy = accepted[name]
        if not all(is_one_of(one, choices) for one in values):
            got, expected = repr(value)[:200], " or ".join(map(repr, (*choices, None)))
            where = f"argument {name}"
            raise ConfigError("not supported", where=where, got=got, expected=expected, remedy=remedy)
        for key, note in _NOTES.items():
            if key in ((name, None), (name, values[0])):
                _log(f"{name}={value!r}: {note}")
    return {name: value for name, value in options.items() if name not in accepted}


def _single_device(device_map: object) -> str | torch.device:
    """Returns the device of a device map that names one."""
    if is_one_of(device_map, ("auto", "balanced", "balanced_low_0", "sequential")):
        if torch.cuda.device_count() > 1:
            _log(f"device_map={device_map!r}: the whole model is loaded on cuda:0")
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    values = list(device_map.values()) if is_object(device_map) else [device_map]
    devices = {f"cuda:{value}" if type(value) is int else str(value) for value in values}
    if len(devices) != 1 or not isinstance(values[0], str | int | torch.device) or devices <= {"disk", "True", "False"}:
        got = repr(device_map)[:200]
        expected = '"auto", a device, or a map with one device'
        raise ConfigError("not one device", where="argument device_map", got=got, expected=expected, remedy=_ONE_DEVICE)
    return devices.pop()


@cache
def _log(note: str) -> None:
    """Logs a note once."""
    logging.getLogger("ligerzoo").warning(note)
