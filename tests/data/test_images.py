"""Rows D1 and D2: any bytes give an image, or one ImageError that says where, why and what to do."""

import io
import os
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polaformer.data.images import EXTENSIONS, FORMATS, MAX_PIXELS, decode, decode_values, from_array, read_image
from polaformer.errors import ImageError, printable
from polaformer.regular_files import MAX_BYTES

# The library ignores these warnings; pytest sets its own filters.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::PIL.Image.DecompressionBombWarning")
HEIGHT, WIDTH = 18, 24
PNG_START = b"\x89PNG\r\n\x1a\n"


def picture() -> Image.Image:
    """Colours without any symmetry."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, rows: bytes, *, bits: int = 8, color: int = 0, interlaced: bool = False, more: bytes = b""
) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, interlaced))
    return PNG_START + header + more + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def image_or_error(content: bytes) -> Image.Image | ImageError:
    """Any other exception is a failure."""
    try:
        return decode(content, "folder/name.jpg")
    except ImageError as error:
        return error


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


# Damaged files


@pytest.mark.parametrize("part", range(40))
def test_a_jpeg_that_is_cut_short_is_one_error(part: int) -> None:
    whole = encoded(picture(), "JPEG", quality=95)
    found = image_or_error(whole[: len(whole) * part // 40])
    assert isinstance(found, ImageError)
    assert str(found).startswith("folder/name.jpg is ")


@pytest.mark.parametrize("seed", range(100))
def test_a_jpeg_with_a_changed_byte_is_an_image_or_one_error(seed: int) -> None:
    content = bytearray(encoded(picture(), "JPEG"))
    content[random.Random(seed).randrange(len(content))] ^= 1 << seed % 8
    found = image_or_error(bytes(content))
    assert isinstance(found, ImageError) or found.mode == "RGB"


@pytest.mark.parametrize("kind", FORMATS)
def test_any_format_with_changed_bytes_or_cut_is_an_image_or_one_error(kind: str) -> None:
    options: dict[str, object] = {"compression": "tiff_lzw"} if kind == "TIFF" else {}
    whole, draw = encoded(picture(), kind, **options), random.Random(0)
    found = []
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 4))):
            content[draw.randrange(draw.choice((64, len(content))))] = draw.randrange(256)
        found.append(image_or_error(bytes(content[: draw.choice((len(content), draw.randrange(len(content))))])))
    errors = [one for one in found if isinstance(one, ImageError)]
    assert errors
    assert all("folder/name.jpg" in str(one) and "remove it from the data" in str(one) for one in errors)


BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "one byte": (b"\xff", "is not a readable image"),
    "text": (b"<html>404 not found</html>", "is not a readable image"),
    "zeros": (bytes(1000), "is not a readable image"),
    "only a signature": (PNG_START, "is not a readable image"),
    "a header that its checksum does not fit": (
        png(2, 2, bytes(6)).replace(b"\0\0\0\2", b"\0\0\0\1", 1),
        "is not a readable image",
    ),
    "pixels that their checksum does not fit": (png(2, 2, bytes(6)).replace(b"IDATx\xda", b"IDATx\xda\x01"), "is damaged"),
    "no rows": (png(2, 2, b""), "is damaged"),
    "no pixels": (png(0, 0, b""), "is not a readable image"),
    "an icon": (encoded(picture(), "ICO"), "is not a readable image"),
    "a format nobody needs": (encoded(picture(), "TGA"), "is not a readable image"),
    "a script": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a readable image"),
    "notes that swell": (
        png(2, 2, bytes(6), more=chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(10**7)))),
        "is damaged",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_image_is_one_error_with_path_reason_and_remedy(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    path = tmp_path / "cat.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{path} {reason}")
    assert str(caught.value).endswith("fetch it again, or remove it from the data")


def test_every_extension_that_is_looked_for_belongs_to_a_format_that_is_read() -> None:
    Image.init()
    assert {Image.EXTENSION[extension] for extension in EXTENSIONS} == set(FORMATS)


# Unusual but intact files


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("JPEG", "WEBP", "GIF")])
def test_every_format_without_loss_gives_the_same_pixels(kind: str) -> None:
    assert np.array_equal(pixels(decode(encoded(picture(), kind), "x")), pixels(picture()))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_every_format_with_loss_gives_nearly_the_same_pixels(kind: str) -> None:
    smooth = Image.fromarray(np.indices((HEIGHT, WIDTH)).sum(0).astype(np.uint8)).convert("RGB")
    found = decode(encoded(smooth, kind), "x")
    assert np.abs(pixels(found).astype(int) - pixels(smooth)).max() <= 8


def interlaced(grey: np.ndarray) -> bytes:
    """Adam7: seven passes over a grid of 8×8, each with its own rows."""
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    parts = [grey[y::step_y, x::step_x] for x, y, step_x, step_y in passes]
    rows = b"".join(b"\0" + row.tobytes() for part in parts if part.size for row in part)
    return png(grey.shape[1], grey.shape[0], rows, interlaced=True)


def test_an_interlaced_png_gives_the_same_pixels() -> None:
    grey = pixels(picture())[..., 0]
    assert np.array_equal(pixels(decode(interlaced(grey), "x", channels=1)), grey)


def sixteen_bit_png(values: np.ndarray) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(values.shape[1], values.shape[0], rows, bits=16, color=0 if values.ndim == 2 else 2)


@pytest.mark.parametrize("kind", ["PNG", "PPM", "TIFF"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_of_grey_are_scaled_to_eight(kind: str, channels: int) -> None:
    wanted = np.arange(256, dtype=np.uint8).reshape(16, 16)
    stored = wanted.astype(np.uint16) * 257
    assert (stored.min(), stored.max()) == (0, 65535)
    content = sixteen_bit_png(stored) if kind == "PNG" else encoded(Image.fromarray(stored), kind)
    found = pixels(decode(content, "x", channels=channels))
    assert np.array_equal(found if channels == 1 else found[..., 2], wanted)


def test_sixteen_bits_of_colour_are_scaled_to_eight() -> None:
    wanted = pixels(picture())
    assert np.array_equal(pixels(decode(sixteen_bit_png(wanted.astype(np.uint16) * 257), "x")), wanted)


def test_numbers_with_a_point_are_scaled_by_the_largest_and_what_is_not_finite_does_no_harm() -> None:
    values = np.array([[0, 50, 100], [np.nan, -5, 25]], dtype=np.float32)
    found = pixels(decode(encoded(Image.fromarray(values), "TIFF"), "x", channels=1))
    assert found.tolist() == [[0, 127, 255], [0, 0, 63]]


def test_one_bit_becomes_black_and_white() -> None:
    bits = pixels(picture())[..., 0] > 127
    found = pixels(decode(encoded(Image.fromarray(bits), "PNG"), "x"))
    assert np.array_equal(found[..., 1], np.where(bits, 255, 0))


def test_transparency_of_a_palette_is_dropped_and_its_colours_stay() -> None:
    image = Image.new("P", (4, 2))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1] * 4)
    found = decode(encoded(image, "PNG", transparency=bytes([0, 128])), "x")
    assert found.mode == "RGB"
    assert pixels(found)[0, :2].tolist() == [[10, 20, 30], [200, 100, 50]]


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_transparency_is_dropped_and_colours_stay(mode: str, channels: int) -> None:
    opaque = picture().convert(mode[:-1])
    image = opaque.copy()
    image.putalpha(7)
    found = decode(encoded(image, "PNG"), "x", channels=channels)
    assert np.array_equal(pixels(found), pixels(opaque.convert("RGB" if channels == 3 else "L")))


def test_printing_colours_become_screen_colours() -> None:
    found = pixels(decode(encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG"), "x"))
    assert found.mean(axis=(0, 1)) == pytest.approx([0, 255, 255], abs=3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_of_several_frames_or_pages_the_first_is_read(kind: str) -> None:
    first, second = Image.new("RGB", (9, 7), (250, 0, 0)), Image.new("RGB", (9, 7), (0, 0, 250))
    content = encoded(first, kind, save_all=True, append_images=[second])
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 2
    found = decode(content, "x")
    assert found.size == (9, 7)
    assert pixels(found).mean(axis=(0, 1)) == pytest.approx([250, 0, 0], abs=6)


# How a camera turns an upright image for each orientation number; a viewer must undo it.
TURNED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: upright[::-1, ::-1].swapaxes(0, 1),
    8: lambda upright: np.rot90(upright, -1),
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_an_image_is_turned_upright_as_its_exif_says(orientation: int, kind: str) -> None:
    upright = np.kron(np.random.default_rng(1).integers(0, 2, (2, 3, 3), dtype=np.uint8) * 255, np.ones((16, 16, 1), np.uint8))
    notes = Image.Exif()
    notes[0x0112] = orientation
    options: dict[str, object] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    stored = Image.fromarray(np.ascontiguousarray(TURNED[orientation](upright)))
    found = pixels(decode(encoded(stored, kind, exif=notes, **options), "x"))
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).max() <= (3 if kind == "JPEG" else 0)


@pytest.mark.parametrize(
    "notes",
    [
        b"Exif\0\0",
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01" * 40,
        b"?",
    ],
    ids=["empty", "text", "an offset beyond the end", "more entries than bytes", "no header"],
)
def test_broken_exif_does_no_harm_to_the_pixels(notes: bytes) -> None:
    plain = encoded(picture(), "JPEG")
    assert np.array_equal(pixels(decode(encoded(picture(), "JPEG", exif=notes), "x")), pixels(decode(plain, "x")))


def test_a_huge_colour_profile_does_no_harm_to_the_pixels() -> None:
    content = encoded(picture(), "JPEG", icc_profile=bytes(2_000_000))
    assert len(content) > 2_000_000
    assert np.array_equal(pixels(decode(content, "x")), pixels(decode(encoded(picture(), "JPEG"), "x")))


@pytest.mark.parametrize("size", [(1, 1), (1, 65535), (65535, 1)])
def test_very_small_and_very_narrow_images_are_read(size: tuple[int, int]) -> None:
    for kind in ("PNG", "BMP"):
        assert decode(encoded(Image.new("RGB", size, (1, 2, 3)), kind), "x").size == size


def test_pixels_of_arrays_become_grey_and_coloured_images() -> None:
    colours = pixels(picture())
    assert np.array_equal(pixels(from_array(colours)), colours)
    assert np.array_equal(pixels(from_array(colours[..., 0])), np.repeat(colours[..., :1], 3, axis=2))
    assert np.array_equal(pixels(from_array(colours[..., 0], channels=1)), colours[..., 0])


# Row D2: bombs


def with_bytes(content: bytes, place: int, replacement: bytes) -> bytes:
    return content[:place] + replacement + content[place + len(replacement) :]


def jpeg_of(side: int) -> bytes:
    small = encoded(Image.new("RGB", (16, 16)), "JPEG")
    return with_bytes(small, small.index(b"\xff\xc0") + 5, struct.pack(">HH", side, side))


def gif_of(side: int, *, frame: bool) -> bytes:
    small = encoded(Image.new("P", (16, 16)), "GIF")
    return with_bytes(small, small.index(b",\0\0\0\0") + 5 if frame else 6, struct.pack("<HH", side, side))


def tiff_of(side: int, compression: str | None) -> bytes:
    content = encoded(Image.new("L", (16, 16)), "TIFF", compression=compression)
    start = struct.unpack("<I", content[4:8])[0]
    for place in range(start + 2, start + 2 + 12 * struct.unpack("<H", content[start : start + 2])[0], 12):
        tag = struct.unpack("<H", content[place : place + 2])[0]
        if tag in (256, 257, 278):  # width, height, rows per strip
            content = with_bytes(content, place, struct.pack("<HHII", tag, 4, 1, side))
    return content


def webp_of(side: int, *, lossless: bool) -> bytes:
    small = encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=lossless)
    if not lossless:
        return with_bytes(small, small.index(b"VP8 ") + 14, struct.pack("<HH", side, side))
    place = small.index(b"VP8L") + 9
    flags = struct.unpack("<I", small[place : place + 4])[0] >> 28
    return with_bytes(small, place, struct.pack("<I", flags << 28 | (side - 1) << 14 | side - 1))


def animated_webp_of(side: int) -> bytes:
    def riff(kind: bytes, data: bytes) -> bytes:
        return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)

    def three(number: int) -> bytes:
        return number.to_bytes(3, "little")

    frame = encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=True)[12:]
    parts = riff(b"VP8X", b"\2\0\0\0" + three(side - 1) * 2) + riff(b"ANIM", bytes(6))
    parts += riff(b"ANMF", three(0) * 2 + three(15) * 2 + three(100) + b"\0" + frame)
    return riff(b"RIFF", b"WEBP" + parts)


def bmp_of(width: int, height: int) -> bytes:
    return with_bytes(encoded(Image.new("RGB", (16, 16)), "BMP"), 18, struct.pack("<ii", width, height))


BOMBS: dict[str, Callable[[], bytes]] = {
    "png-whole": lambda: png(8001, 8001, bytes(8002 * 8001)),
    "png-bits": lambda: png(16000, 16000, bytes(2001 * 16000), bits=1),
    "png-header": lambda: png(40000, 40000, b"", color=2),
    "jpeg": lambda: jpeg_of(65500),
    "jpeg-smaller": lambda: jpeg_of(8100),
    "gif-screen": lambda: gif_of(65535, frame=False),
    "gif-frame": lambda: gif_of(65535, frame=True),
    "tiff": lambda: tiff_of(60000, None),
    "tiff-lzw": lambda: tiff_of(9000, "tiff_lzw"),
    "tiff-deflate": lambda: tiff_of(60000, "tiff_adobe_deflate"),
    "webp": lambda: webp_of(9000, lossless=False),
    "webp-lossless": lambda: webp_of(16383, lossless=True),
    "webp-animated": lambda: animated_webp_of(100_000),
    "bmp": lambda: bmp_of(60000, 60000),
    "bmp-upside-down": lambda: bmp_of(9000, -9000),
    "ppm": lambda: b"P6 60000 60000 255\n" + bytes(100),
}
MEASURE = """
import sys, resource
from pathlib import Path
from polaformer.data.images import read_image
from polaformer.errors import ImageError
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_image(sys.argv[2])
for path in sorted(Path(sys.argv[1]).iterdir()):
    before = peak()
    try:
        text = str(read_image(path).size)
    except ImageError as error:
        text = str(error)
    print(path.name, peak() - before, text, sep="\\t")
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """For each bomb, the kilobytes that reading it took and the message, measured in a separate process."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, content in BOMBS.items():
        (folder / name).write_bytes(content())
    harmless = tmp_path_factory.mktemp("harmless") / "image.jpg"
    harmless.write_bytes(encoded(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"))
    command = [sys.executable, "-c", MEASURE, str(folder), str(harmless)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "", "Pillow warns, of bombs or of broken EXIF"
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    return {name: (int(kilobytes), text) for name, kilobytes, text in lines}


@pytest.mark.parametrize("name", BOMBS)
def test_a_decompression_bomb_is_refused_from_its_header(name: str, refusals: dict[str, tuple[int, str]]) -> None:
    kilobytes, text = refusals[name]
    assert f"{name} has " in text
    assert "64,000,000 allowed; make it smaller, or remove it from the data" in text
    assert kilobytes < 32 * 1024


def test_the_largest_number_of_pixels_is_an_argument() -> None:
    content = encoded(picture(), "PNG")
    assert decode(content, "x", most_pixels=HEIGHT * WIDTH).size == (WIDTH, HEIGHT)
    with pytest.raises(ImageError, match=f"x has {WIDTH}×{HEIGHT} pixels, more than the 431 allowed"):
        decode(content, "x", most_pixels=HEIGHT * WIDTH - 1)
    assert MAX_PIXELS == 64_000_000


# Paths


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"gone.jpg cannot be read: No such file or directory; check the path, or remove it"):
        read_image(tmp_path / "gone.jpg")


def test_a_dangling_link_and_a_link_to_itself_are_errors(tmp_path: Path) -> None:
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    with pytest.raises(ImageError, match=r"dangling.jpg cannot be read: No such file"):
        read_image(tmp_path / "dangling.jpg")
    with pytest.raises(ImageError, match=r"loop.jpg cannot be read: Too many levels of symbolic links"):
        read_image(tmp_path / "loop.jpg")


def test_a_folder_named_like_an_image_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder.jpg").mkdir()
    with pytest.raises(ImageError, match=r"folder.jpg cannot be read: it is not a regular file"):
        read_image(tmp_path / "folder.jpg")


def test_a_file_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture().save(tmp_path / "secret.png")

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    with pytest.raises(ImageError, match=r"secret.png cannot be read: Permission denied"):
        read_image(tmp_path / "secret.png")


@pytest.mark.timeout(20)
def test_a_pipe_and_a_device_do_not_keep_the_reader_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "pipe.jpg", Path("/dev/zero")):
        with pytest.raises(ImageError, match="cannot be read: it is not a regular file"):
            read_image(path)


def test_a_file_larger_than_any_image_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "vast.png", "wb") as file:
        file.truncate(2**40)  # sparse: takes no disk space
    with pytest.raises(ImageError, match=f"it has 1,099,511,627,776 bytes, more than the {MAX_BYTES:,} allowed"):
        read_image(tmp_path / "vast.png")


@pytest.mark.parametrize("path", ["a\0b.jpg", "a" * 5000, ""])
def test_a_path_that_no_system_takes_is_an_error(path: str) -> None:
    with pytest.raises(ImageError, match="cannot be read: "):
        read_image(path)


def test_a_path_is_shown_in_one_printable_line_whatever_its_bytes() -> None:
    assert printable("photos/größe 1.jpg") == "photos/größe 1.jpg"
    assert printable(os.fsdecode(b"a\nb\r\x1b[31m\xff.jpg")) == "a\\nb\\r\\x1b[31m\\udcff.jpg"


# Masks


@pytest.mark.parametrize(("bits", "packed"), [(1, "01011000"), (2, "0011011000"), (4, "0000" + "0001" + "1111" + "1000")])
@pytest.mark.parametrize("color", [0, 3])
def test_values_of_few_bits_are_not_scaled(bits: int, packed: str, color: int) -> None:
    values = [int(packed[start : start + bits], 2) for start in range(0, len(packed), bits)]
    row = int(packed.ljust(-(-len(packed) // 8) * 8, "0"), 2).to_bytes(-(-len(packed) // 8))
    palette = chunk(b"PLTE", bytes(range(3 * 2**bits))) if color == 3 else b""
    content = png(len(values), 2, 2 * (b"\0" + row), bits=bits, color=color, more=palette)
    assert decode_values(content, "mask.png").tolist() == [values, values]


def test_values_of_16_bits_are_not_scaled() -> None:
    values = np.array([[0, 1, 256, 65535]], dtype=np.uint16)
    for kind in ("PNG", "TIFF", "PPM"):
        assert decode_values(encoded(Image.fromarray(values), kind), "mask").tolist() == values.tolist()


def test_values_are_upright_as_images_are() -> None:
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned a quarter
    assert decode_values(encoded(Image.fromarray(values), "PNG", exif=exif), "mask").tolist() == np.rot90(values, -1).tolist()


def test_masks_have_the_limits_of_images() -> None:
    with pytest.raises(ImageError, match="mask has 24×18 pixels, more than the 100 allowed"):
        decode_values(encoded(picture(), "PNG"), "mask", most_pixels=100)
