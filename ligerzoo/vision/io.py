"""Reads images and videos as uint8 RGB tensors, (3, H, W) and (T, 3, H, W).

Transparent pixels become white, as in transformers 5. Image files are untrusted: only plain image formats are read, and
the size in the header is checked before any pixel is decoded.
"""

from __future__ import annotations

import base64
import io
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ligerzoo.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"
ImageInput: TypeAlias = "str | Path | bytes | PILImage | Array"
VideoInput: TypeAlias = "Sequence[ImageInput] | Array"

MAX_PIXELS = 89_478_485  # of one image: a quarter of a GiB in RGB; Pillow warns above it
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV")  # Pillow's pixel modes
_ORIENTATION, _ROTATED = 0x0112, (5, 6, 7, 8)  # the EXIF entry, and its values that exchange height and width
_FILE_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no formats for which Pillow runs another program


def read_image(image: ImageInput, where: str = "image") -> Tensor:
    """Reads an image as RGB.

    Args:
        image: one of

            - a file name, with or without "file://"; the image is rotated as its EXIF data say;
            - a string "data:image/png;base64,...", or the bytes of an image file;
            - a Pillow image; its EXIF data are ignored;
            - a uint8 tensor or array (C, H, W), (H, W, C) or (H, W) with C = 1, 3 or 4 channels. The fourth channel is
              opacity. If the first and the last dimension could both be channels, the first is.

            Files and Pillow images have 8 bits for each channel, or one channel of 16 bits (grey).
        where: the name of the image in error messages.

    Returns:
        uint8 (3, H, W), on the CPU.

    Raises:
        ImageError: the argument is none of these; the file does not exist or cannot be decoded; or the image has no
            pixels or more than `MAX_PIXELS`.
    """
    match image:
        case str() | Path() | bytes():
            with _opened(image, where) as opened:
                opened.load()
                from PIL import ImageOps

                return _from_pillow(ImageOps.exif_transpose(opened), where)
        case Tensor() | np.ndarray():
            return _from_array(image, where)
    if isinstance(image, pillow().Image):
        return _from_pillow(image, where)
    expected = "a file name, the bytes of a file, a Pillow image, a tensor or an array"
    raise ImageError("not an image", where=where, got=type(image).__name__, expected=expected)


def image_size(image: ImageInput, where: str = "image") -> tuple[int, int]:
    """Returns the height and width that `read_image` gives, of files from their header alone.

    Args:
        image: see `read_image`.
        where: the name of the image in error messages.

    Raises:
        ImageError: as `read_image`, apart from errors of the pixels' data.
    """
    match image:
        case str() | Path() | bytes():
            with _opened(image, where) as opened:
                # Pillow exchanges the sides of TIFF files itself.
                is_rotated = opened.format != "TIFF" and opened.getexif().get(_ORIENTATION, 1) in _ROTATED
                return (opened.width, opened.height) if is_rotated else (opened.height, opened.width)
        case Tensor() | np.ndarray():
            pass
        case _ if isinstance(image, pillow().Image):
            check_size(image.height, image.width, where)
            return image.height, image.width
    height, width = read_image(image, where).shape[1:]
    return height, width


def read_video(video: VideoInput, where: str = "video") -> Tensor:
    """Reads a video as RGB frames.

    Args:
        video: a sequence of T images of one size, or a uint8 tensor or array (T, C, H, W) or (T, H, W, C).
        where: the name of the video in error messages.

    Returns:
        uint8 (T, 3, H, W), on the CPU.

    Raises:
        ImageError: the argument is none of these, the video has no frames, the frames differ in size, or a frame
            cannot be read.
    """
    remedy = "Decode a video file first, and pass its frames."
    expected = "a sequence of frames, or a tensor or an array of four dimensions"
    match video:
        case Tensor() | np.ndarray():
            _refuse_without_data(video, where)
            if video.ndim != 4:
                raise ImageError("not a video", where=where, got=f"shape {tuple(video.shape)}", expected=expected)
        case [*_]:
            pass
        case _:
            raise ImageError("not a video", where=where, got=type(video).__name__, expected=expected, remedy=remedy)
    frames = [read_image(frame, f"{where}[{i}]") for i, frame in enumerate(video)]
    if not frames:
        raise ImageError("the video has no frames", where=where)
    for i, frame in enumerate(frames):
        if frame.shape != frames[0].shape:
            got, expected = (f"{one.shape[2]} x {one.shape[1]}" for one in (frame, frames[0]))
            what = "the size differs from the first frame's"
            raise ImageError(what, where=f"{where}[{i}]", got=got, expected=expected)
    return torch.stack(frames)


def pillow() -> ModuleType:
    """Imports and returns the module `PIL.Image`.

    Raises:
        ImageError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps  # noqa: F401  (importing it makes PIL.ImageOps available)
    except ImportError as error:
        remedy = "Run `pip install ligerzoo[vision]`."
        raise ImageError("images need Pillow, which is not installed", remedy=remedy) from error
    return Image


def check_size(height: int, width: int, where: str) -> None:
    """Raises ImageError if an image of this size has no pixels or more than `MAX_PIXELS`."""
    got = f"{width} x {height}"
    if height < 1 or width < 1:
        raise ImageError("the image has no pixels", where=where, got=got)
    if height * width > MAX_PIXELS:
        what, expected, remedy = "the image has too many pixels", f"at most {MAX_PIXELS}", "Scale the image down first."
        raise ImageError(what, where=where, got=got, expected=expected, remedy=remedy)


@contextmanager
def _opened(image: str | Path | bytes, where: str) -> Iterator[PILImage]:
    """Opens an image in a file, in a "data:" string or in bytes, and checks its size; decodes no pixels.

    Every exception in the block becomes an ImageError.
    """
    source: Path | io.BytesIO
    if isinstance(image, bytes):
        source = io.BytesIO(image)
    else:
        text = str(image)
        where = f"{where} ({text[:100]})"
        if text.startswith(("http://", "https://")):
            remedy = "Download it first, and pass the file name."
            raise ImageError("images are not downloaded", where=where, remedy=remedy)
        source = Path(text.removeprefix("file://"))
        if text.startswith("data:"):
            try:
                source = io.BytesIO(base64.b64decode(text.partition(";base64,")[2], validate=True))
            except ValueError as error:  # binascii.Error, or characters beyond ASCII
                raise ImageError("the image data is not valid base64", where=where, got=error) from error

    images = pillow()
    with _reading(where):
        if isinstance(source, Path) and not stat.S_ISREG(mode := source.stat().st_mode):
            kind = _FILE_KINDS.get(stat.S_IFMT(mode), "a device")  # opening a pipe or a device may block forever
            raise ImageError("cannot read this kind of file", where=where, got=kind, expected="a regular file")
        with warnings.catch_warnings():  # check_size raises instead, and names the image
            warnings.simplefilter("ignore", images.DecompressionBombWarning)
            opened = images.open(source, formats=_FORMATS)
        with opened:
            check_size(opened.height, opened.width, where)
            yield opened


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Converts every exception to ImageError: Pillow's decoders raise many kinds."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        raise ImageError("cannot read the image", where=where, got=f"{type(error).__name__}: {error}") from error


def _from_pillow(image: PILImage, where: str) -> Tensor:
    check_size(image.height, image.width, where)
    with _reading(where):  # decodes the pixels if the caller has only opened the file
        if image.mode.startswith("I;16"):
            return _from_16_bit_grey(np.array(image), image.info.get("transparency")).expand(3, -1, -1)
        if image.mode not in _MODES:
            what, got = "unsupported pixel mode: it does not define which value is white", f"mode {image.mode!r}"
            expected = f"8 bits per channel ({', '.join(_MODES)}) or 16 bits of grey"
            remedy = "Scale the values to 0..255, and pass them as a uint8 array."
            raise ImageError(what, where=where, got=got, expected=expected, remedy=remedy)
        if image.mode.upper() in ("LA", "PA", "RGBA") or image.info.get("transparency") is not None:
            background = pillow().new("RGBA", image.size, "white")
            image = pillow().alpha_composite(background, image.convert("RGBA"))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _from_16_bit_grey(levels: np.ndarray[Any, Any], transparent: int | None) -> Tensor:
    """Converts 16-bit grey (H, W), where 65535 is white, to uint8 (1, H, W).

    Pillow's conversion, which transformers uses, maps every level from 255 on to white.
    """
    grey = (levels.astype(np.int32) + 128) // 257
    if transparent is not None:
        grey[levels == transparent] = 255
    return torch.from_numpy(grey.astype(np.uint8))[None]


def _refuse_without_data(array: Array, where: str) -> None:
    """Raises ImageError for tensors whose elements cannot be read, such as sparse ones."""
    if isinstance(array, Tensor) and (array.is_meta or array.layout != torch.strided or array.is_nested):
        got = f"{'nested' if array.is_nested else array.layout} on {array.device}"
        expected = "a dense tensor on a CPU or GPU"
        raise ImageError("not a dense tensor with data", where=where, got=got, expected=expected)


def _from_array(array: Array, where: str) -> Tensor:
    _refuse_without_data(array, where)
    # The copy removes negative strides and read-only memory, which torch.from_numpy does not support.
    image = array.detach().cpu() if isinstance(array, Tensor) else _tensor(np.array(array, order="C"), where)
    if image.dtype != torch.uint8:
        raise ImageError("unsupported dtype", where=where, got=str(image.dtype), expected="uint8, from 0 to 255")
    if image.ndim == 2:
        image = image[None]
    elif image.ndim == 3 and image.shape[0] not in (1, 3, 4):
        image = image.permute(2, 0, 1)
    if image.ndim != 3 or image.shape[0] not in (1, 3, 4):
        expected = "(C, H, W), (H, W, C) or (H, W), with C = 1, 3 or 4"
        raise ImageError("unsupported shape for an image", where=where, got=tuple(array.shape), expected=expected)
    check_size(image.shape[1], image.shape[2], where)
    if len(image) == 4:
        opacity = image[3:].double() / 255
        return torch.round(opacity * image[:3] + (1 - opacity) * 255).byte()
    return image.expand(3, -1, -1)


def _tensor(array: np.ndarray[Any, Any], where: str) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError as error:  # an array of objects, or a dtype that torch does not have
        raise ImageError("unsupported dtype", where=where, got=array.dtype, expected="uint8, from 0 to 255") from error
