"""Image and video preprocessing equals transformers' Pillow image processors bit for bit."""

import base64
import builtins
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from PIL import Image
from torch import Tensor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ligerzoo.errors import ConfigError, ImageError
from ligerzoo.vision import (
    Gemma3Preprocessor,
    MllamaPreprocessor,
    Qwen2VLPreprocessor,
    Settings,
    read_image,
    read_video,
)
from ligerzoo.vision.io import image_size

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="other sizes; no white background",
)

MODES = ["RGB", "L", "RGBA", "LA", "P", "1", "CMYK"]
SIDES = st.integers(1, 700)
PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 40,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Returns an image of noise and a gradient, so that resizing smooths something."""
    noise = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 4), dtype=np.uint8)
    noise[..., 0] = np.arange(width) * 255 // width
    image = Image.fromarray(noise, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB" if mode == "CMYK" else mode).convert(mode)


def qwen(**entries: Any) -> Qwen2VLPreprocessor:
    return Qwen2VLPreprocessor.for_images(Settings(entries, "preprocessor_config.json"))


def gemma(**entries: Any) -> Gemma3Preprocessor:
    return Gemma3Preprocessor.from_settings(Settings(entries, "preprocessor_config.json"))


def mllama(**entries: Any) -> MllamaPreprocessor:
    return MllamaPreprocessor.from_settings(Settings(entries, "preprocessor_config.json"))


def assert_qwen_agrees(image: Any, **entries: Any) -> None:
    patches, grid = qwen(**entries)(read_image(image)[None])
    theirs = Qwen2VLImageProcessorPil(**entries)(image, return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [list(grid)]
    assert patches.dtype == torch.float32
    assert torch.equal(patches, theirs["pixel_values"])


def assert_gemma_agrees(image: Any, **entries: Any) -> None:
    theirs = Gemma3ImageProcessorPil(do_convert_rgb=True, **entries)(image, return_tensors="pt")
    assert torch.equal(gemma(**entries)(read_image(image)), theirs["pixel_values"])


def assert_mllama_agrees(image: Any, **entries: Any) -> None:
    preprocess = mllama(**entries)
    tiles, (rows, columns) = preprocess(read_image(image))
    theirs = MllamaImageProcessorPil(**entries)(image, return_tensors="pt")
    assert theirs["aspect_ratio_ids"].item() == 1 + preprocess.arrangements.index((rows, columns))
    assert theirs["aspect_ratio_mask"].sum() == len(tiles) == rows * columns
    assert torch.equal(tiles, theirs["pixel_values"][0, 0, : rows * columns])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(60, 90), (301, 57), (3, 2)])
def test_every_kind_of_image(size: tuple[int, int], mode: str) -> None:
    image = picture(*size, mode)
    assert_qwen_agrees(image)
    assert_gemma_agrees(image)
    assert_mllama_agrees(image, size={"height": 56, "width": 56})


@settings(max_examples=30, deadline=None)
@given(SIDES, SIDES)
@example(1, 1)
@example(1, 200)
@example(200, 1)
@example(70, 42)  # 2.5 and 1.5 units, which round to even
@example(14, 14)
@example(1000, 3000)
def test_qwen_sizes(height: int, width: int) -> None:
    if max(height, width) <= 200 * min(height, width):
        assert_qwen_agrees(picture(height, width))
        assert_qwen_agrees(picture(height, width), min_pixels=20000, max_pixels=30000)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 10**6), st.integers(1, 10**7))
def test_qwen_limits(height: int, width: int, least: int, most: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    preprocess = qwen(min_pixels=least, max_pixels=most)
    if max(height, width) / min(height, width) <= 200:
        assert preprocess.resized(height, width) == smart_resize(height, width, 28, least, most)
    else:
        with pytest.raises(ImageError, match="too long and thin"):
            preprocess.resized(height, width)


@pytest.mark.parametrize(
    "entries",
    [
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        {"size": {"shortest_edge": 50000, "longest_edge": 60000}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 50000, "max_pixels": 60000},
        {"patch_size": 8, "merge_size": 3, "temporal_patch_size": 3, "resample": 2},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "rescale_factor": 0.01, "min_pixels": None},
    ],
)
def test_qwen_settings(entries: dict[str, Any]) -> None:
    assert_qwen_agrees(picture(250, 190), **entries)


@settings(max_examples=30, deadline=None)
@given(SIDES, SIDES)
@example(1, 700)
def test_gemma_sizes(height: int, width: int) -> None:
    assert_gemma_agrees(picture(height, width), size={"height": 56, "width": 56}, **PAN_AND_SCAN)


def test_gemma_pan_and_scan_is_off_by_default() -> None:
    long = read_image(picture(100, 1000))
    assert len(gemma()(long)) == 1
    assert len(gemma(**PAN_AND_SCAN)(long)) == 5


@settings(max_examples=50, deadline=None)
@given(SIDES, SIDES, st.integers(1, 7))
@example(30, 30, 4)
@example(100, 50, 4)
@example(57, 57, 4)
@example(200, 210, 4)
@example(40, 300, 4)
@example(1, 600, 4)
def test_mllama_sizes(height: int, width: int, max_image_tiles: int) -> None:
    image = picture(height, width)
    assert_mllama_agrees(image, size={"height": 56, "width": 56}, max_image_tiles=max_image_tiles)


ARRAYS: list[Callable[[], Any]] = [
    lambda: np.array(picture(40, 50)),
    lambda: np.array(picture(40, 50)).transpose(2, 0, 1),
    lambda: np.array(picture(40, 50, "RGBA")),
    lambda: np.array(picture(40, 50, "L"))[None],
    lambda: np.array(picture(40, 50, "L"))[..., None],
    lambda: torch.from_numpy(np.array(picture(40, 50))).permute(2, 0, 1),
    lambda: torch.from_numpy(np.array(picture(40, 50, "RGBA"))).permute(2, 0, 1),
    lambda: np.array(picture(3, 50)),  # ambiguous: (3, 50, 3)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("array", ARRAYS)
def test_arrays(array: Callable[[], Any]) -> None:
    if array is ARRAYS[-1]:
        image = read_image(array()[:, :3])
        assert torch.equal(image, torch.from_numpy(array()[:, :3].copy()))
    else:
        assert_qwen_agrees(array())


def test_read_only_and_flipped_arrays() -> None:
    array = np.array(picture(40, 50))
    array.flags.writeable = False
    assert torch.equal(read_image(array[:, ::-1]), read_image(picture(40, 50)).flip(2))
    assert read_image(array[..., 0]).shape == (3, 40, 50)


def test_files_are_rotated_by_their_exif_data(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    picture(40, 70).save(tmp_path / "rotated.png", exif=exif)
    assert_qwen_agrees(str(tmp_path / "rotated.png"))
    assert read_image(tmp_path / "rotated.png").shape == (3, 70, 40)
    assert read_image(Image.open(tmp_path / "rotated.png")).shape == (3, 40, 70)


def test_file_names_and_data_strings(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    picture(40, 70).save(path)
    data = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    for source in (path, str(path), f"file://{path}", data):
        assert torch.equal(read_image(source), read_image(picture(40, 70)))


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    palette = Image.new("P", (5, 4), 1)
    palette.putpalette([9, 9, 9, 50, 60, 70])
    palette.save(tmp_path / "palette.png", transparency=1)
    Image.new("RGBA", (5, 4), (50, 60, 70, 0)).save(tmp_path / "rgba.png")
    for name in ("palette.png", "rgba.png"):
        assert read_image(tmp_path / name).unique().tolist() == [255]


def grey_16_bit() -> np.ndarray[Any, Any]:
    return (np.arange(40 * 50, dtype=np.uint32) * 32).clip(max=65535).astype(np.uint16).reshape(40, 50)


@pytest.mark.parametrize("name, order", [("grey.png", "<"), ("grey.tiff", "<"), ("grey.tiff", ">")])
def test_16_bit_grey_becomes_8_bit(tmp_path: Path, name: str, order: str) -> None:
    levels = grey_16_bit()
    Image.fromarray(levels.astype(f"{order}u2")).save(tmp_path / name)
    expected = torch.from_numpy(np.round(levels / 257)).expand(3, -1, -1)  # 65535 is white
    assert len(expected.unique()) > 200
    with Image.open(tmp_path / name) as opened:
        for image in (tmp_path / name, opened, Image.fromarray(levels)):
            assert torch.equal(read_image(image), expected.byte())
    grey = picture(40, 50, "L")
    Image.fromarray(np.array(grey).astype(np.uint16) * 257).save(tmp_path / name)
    assert torch.equal(read_image(tmp_path / name), read_image(grey))


def test_16_bit_grey_may_have_a_transparent_level(tmp_path: Path) -> None:
    Image.fromarray(np.array([[1000, 1001]], dtype=np.uint16)).save(tmp_path / "grey.png", transparency=1000)
    assert read_image(tmp_path / "grey.png")[0].tolist() == [[255, 4]]


@pytest.mark.parametrize("mode", ["I", "F", "LAB", "La"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_pixel_modes_without_a_defined_white_are_refused(tmp_path: Path, mode: str, on_disk: bool) -> None:
    """Pillow, and transformers, clip them to white or black or fail."""
    image: Any = Image.new(mode, (5, 4))
    if on_disk and mode != "La":
        image.save(tmp_path / "image.tiff")
        image = tmp_path / "image.tiff"
    with pytest.raises(ImageError, match=rf"^a.*got mode '{mode}'; expected 8 bits per channel .* or 16 bits of grey"):
        read_image(image, "a")


@pytest.mark.parametrize("modes", [["RGBA"], ["RGBA", "RGBa"], ["LA"]])
def test_transparent_modes_become_white(modes: list[str]) -> None:
    image = Image.new("RGBA", (5, 4), (9, 9, 9, 0))
    for mode in modes:
        image = image.convert(mode)
    assert read_image(image).unique().tolist() == [255]


def halves_of_frames(frames: Tensor, entries: dict[str, Any]) -> Tensor:
    """Returns the patches of a video from transformers' image processor, which duplicates each frame.

    A patch of a pair of frames is the first half of one frame's patch and the second half of the other's.
    """
    process = Qwen2VLImageProcessorPil(**entries)
    images = [process(frame, return_tensors="pt")["pixel_values"].unflatten(1, (3, 2, -1)) for frame in frames]
    images += images[-1:] * (len(images) % 2)
    pairs = zip(images[::2], images[1::2], strict=True)
    return torch.cat([torch.stack([one[:, :, 0], two[:, :, 1]], dim=2).flatten(1) for one, two in pairs])


@pytest.mark.parametrize("number", [1, 2, 5])
def test_videos(number: int) -> None:
    entries = {"min_pixels": 4000, "max_pixels": 9000}
    frames = torch.stack([read_image(picture(100, 130 + i).crop((0, 0, 130, 100))) for i in range(number)])
    preprocess = Qwen2VLPreprocessor.for_videos(Settings(entries, ""))
    patches, (t, h, w) = preprocess(frames)
    assert (t, patches.shape) == ((number + 1) // 2, (t * h * w, 3 * 2 * 14 * 14))
    assert torch.equal(patches, halves_of_frames(frames, entries))


def test_videos_have_their_own_default_limits() -> None:
    preprocess = Qwen2VLPreprocessor.for_videos(Settings({}, ""))
    assert (preprocess.min_pixels, preprocess.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)


def test_kinds_of_videos() -> None:
    frames = [picture(20, 30 + i).crop((0, 0, 30, 20)) for i in range(3)]
    video = torch.stack([read_image(frame) for frame in frames])
    for same in (frames, tuple(frames), video, video.permute(0, 2, 3, 1), video.numpy(), list(video)):
        assert torch.equal(read_video(same), video)


# Errors


@pytest.mark.parametrize(
    "image, message",
    [
        (3, "not an image; got int"),
        (b"\x89PNG", "cannot read the image"),
        (None, "not an image; got NoneType"),
        (np.zeros((3, 4, 4), dtype=np.uint16), "got torch.uint16; expected uint8"),
        (np.zeros((3, 4, 4), dtype=np.float32), "got torch.float32; expected uint8"),
        (torch.zeros(3, 4, 4), "got torch.float32; expected uint8"),
        (np.zeros((3, 4, 4), dtype=np.uint32).astype(object), "expected uint8"),
        (torch.zeros(2, 4, 5, dtype=torch.uint8), r"got \(2, 4, 5\); expected \(C, H, W\)"),
        (torch.zeros(1, 3, 4, 5, dtype=torch.uint8), "unsupported shape for an image"),
        (torch.zeros(3, 0, 5, dtype=torch.uint8), "the image has no pixels; got 5 x 0"),
        ("https://example.org/a.png", "Download it first"),
        ("data:image/png;base64,???", "the image data is not valid base64"),
        ("data:image/png;base64,AAAA", "cannot read the image"),
        ("data:image/png;base64,iVBORé", "the image data is not valid base64"),
        ("data:image/é;base64,\U0001f600=", "the image data is not valid base64"),
        ("data:image/png;base64,\ud800", "the image data is not valid base64"),
        (torch.zeros(3, 4, 5, dtype=torch.uint8, device="meta"), "not a dense tensor with data; got .* on meta"),
        (torch.zeros(3, 4, 5, dtype=torch.uint8).to_sparse(), "not a dense tensor with data; got torch.sparse_coo"),
        ("nowhere.png", "FileNotFoundError"),
        ("nul\0.png", "cannot read the image"),
        ("x" * 5000, "cannot read the image"),
    ],
)
def test_invalid_images_are_refused(image: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        read_image(image, "images[2]")
    assert str(caught.value).startswith("images[2]")
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    "video, message",
    [
        ("film.mp4", "Decode a video file first"),
        (torch.zeros(3, 4, 5, dtype=torch.uint8), r"got shape \(3, 4, 5\)"),
        ([], "the video has no frames"),
        (torch.zeros(2, 3, 4, 5, dtype=torch.uint8, device="meta"), "video: not a dense tensor with data"),
        (torch.zeros(2, 3, 4, 5, dtype=torch.uint8).to_sparse(), "video: not a dense tensor with data"),
        ([torch.zeros(3, 4, 5, dtype=torch.uint8).to_sparse()], r"video\[0\]: not a dense tensor with data"),
        (
            [picture(4, 5), picture(5, 4)],
            r"video\[1\]: the size differs from the first frame's; got 4 x 5; expected 5 x 4",
        ),
    ],
)
def test_invalid_videos_are_refused(video: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        read_video(video)


def png_of(width: int, height: int) -> bytes:
    """Returns a PNG whose header has this size, without any pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000)])
def test_decompression_bombs_are_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_of(*size))
    with pytest.raises(ImageError, match=r"too many pixels|decompression bomb"):
        read_image(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(50, 50).save(buffer, "PNG")
    (tmp_path / "half.png").write_bytes(buffer.getvalue()[:500])
    with pytest.raises(ImageError, match="cannot read the image"):
        read_image(tmp_path / "half.png")


@pytest.mark.parametrize("suffix", ["png", "jpeg", "gif", "bmp", "ppm"])
def test_an_opened_truncated_file_is_refused(tmp_path: Path, suffix: str) -> None:
    """Pillow decodes the pixels after it opens the file, so an opened image may still fail."""
    buffer = io.BytesIO()
    picture(90, 90).save(buffer, suffix)
    (tmp_path / "half").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    message = r"^images\[1\].*: cannot read the image; got \w+: "
    with Image.open(tmp_path / "half") as opened, pytest.raises(ImageError, match=message):
        read_image(opened, "images[1]")
    with pytest.raises(ImageError, match=message):
        read_image(tmp_path / "half", "images[1]")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe.png")
    cases = {tmp_path / "pipe.png": "a named pipe", tmp_path / "link.png": "a named pipe", tmp_path: "a directory",
             Path("/dev/zero"): "a device"}  # fmt: skip
    for path, kind in cases.items():
        for name in (path, str(path), f"file://{path}"):
            with pytest.raises(ImageError, match=f"cannot read this kind of file; got {kind}; expected a regular file"):
                read_image(name)


def test_formats_that_run_other_programs_are_refused(tmp_path: Path) -> None:
    picture(9, 9).save(tmp_path / "page.eps")
    with pytest.raises(ImageError, match="cannot identify image file"):
        read_image(tmp_path / "page.eps")


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def import_without_pillow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_pillow)
    with pytest.raises(ImageError, match=r"pip install ligerzoo\[vision\]"):
        read_image("image.png")


@pytest.mark.parametrize(
    "build, entries, message",
    [
        (qwen, {"patch_size": 0}, "patch_size: .* got 0; expected an integer from 1 to 256"),
        (qwen, {"patch_size": True}, "patch_size"),
        (qwen, {"merge_size": "2"}, "merge_size"),
        (qwen, {"max_pixels": 10**12}, "max_pixels"),
        (qwen, {"size": [1, 2]}, "size: .* expected an object"),
        (qwen, {"size": {"longest_edge": 0}}, "size: longest_edge"),
        (qwen, {"do_resize": False}, "do_resize"),
        (qwen, {"do_normalize": False}, "do_normalize"),
        (qwen, {"resample": 9}, "resample"),
        (qwen, {"image_mean": [0.5, 0.5]}, "image_mean: .* expected three numbers"),
        (qwen, {"image_std": float("nan")}, "image_std"),
        (qwen, {"image_std": [1, 1, 0]}, "image_std"),
        (qwen, {"rescale_factor": -1}, "rescale_factor"),
        (gemma, {"size": {"height": 10, "width": 20}}, "size: width: .* got 20; expected 10"),
        (gemma, {"size": {"height": 10**6}}, "size: height"),
        (gemma, {"size": {"shortest_edge": 10}}, "size: shortest_edge: .* got 10; expected None or no entry"),
        (gemma, {"do_pan_and_scan": "yes"}, "do_pan_and_scan"),
        (mllama, {"max_image_tiles": 10**9}, "max_image_tiles"),
        (mllama, {"do_pad": False}, "do_pad"),
    ],
)
def test_invalid_settings_are_refused(build: Callable[..., Any], entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"preprocessor_config.json: {message}"):
        build(**entries)


def test_settings_for_too_many_pixels_are_refused() -> None:
    image = read_image(picture(1, 200))
    with pytest.raises(ImageError, match="too many pixels"):
        qwen(min_pixels=89_000_000, max_pixels=89_000_000, patch_size=256, merge_size=16)(image[None])


@pytest.mark.parametrize("suffix", ["jpeg", "png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_of_a_file_is_that_of_the_image(suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    picture(20, 30).save(buffer, suffix, exif=exif)
    assert image_size(buffer.getvalue()) == read_image(buffer.getvalue()).shape[1:]


def test_the_size_of_other_images() -> None:
    assert image_size(picture(20, 30)) == image_size(np.array(picture(20, 30))) == (20, 30)
    with pytest.raises(ImageError, match="not an image; got int"):
        image_size(3)  # type: ignore[arg-type]
