"""Bytes to images: the only decoder. It reads the header first and refuses decompression bombs before they expand.

Formats: JPEG, PNG, WebP, BMP, GIF, TIFF, PPM. Of several frames it reads the first; it applies the EXIF orientation, drops
transparency, as torchvision and timm do, and scales more than 8 bits per channel to 8. Masks keep the values that are stored.
"""

import io
import re
import warnings
from collections.abc import Callable
from os import PathLike
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from polaformer.errors import ImageError, printable
from polaformer.regular_files import read_regular, reason

MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_READ = f"{', '.join(FORMATS)} are supported: fetch it again, or remove it from the data"
_SHRINK = "make it smaller, or remove it from the data"
_AS_PNG = "save it as a PNG of 8 or 16 bits per pixel, of a palette, or of RGB colours"
Decoded = TypeVar("Decoded")

# Our own pixel limit replaces the first warning; the second are about damaged camera metadata, which is harmless.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")


def read_image(path: str | PathLike[str], *, channels: int = 3, most_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image in a file, as RGB (three channels) or greyscale (one); raises ImageError."""
    return decode(read_file(path), printable(path), channels=channels, most_pixels=most_pixels)


def read_file(path: str | PathLike[str]) -> bytes:
    """The bytes of a file; raises ImageError if it cannot be read, is too large, or is a pipe or device."""
    try:
        return read_regular(path)
    except (OSError, ValueError) as error:
        raise ImageError(f"{path} cannot be read: {reason(error)}; check the path, or remove it from the data") from error


def decode(content: bytes, name: str, *, channels: int = 3, most_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image that `content` encodes, as RGB (three channels) or greyscale (one); raises ImageError, citing `name`."""
    return _decode(
        content, name, most_pixels, lambda image: _as_mode(_upright(_loaded(image)), "RGB" if channels == 3 else "L")
    )


def decode_values(content: bytes, name: str, *, most_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The values of a mask as they are stored, unscaled; raises ImageError, citing `name`.

    Greyscale of 1 to 16 bits and palettes, whose indices count, give (height, width); RGB gives (height, width, 3) uint8.
    JPEG is refused, since its compression changes values.
    """
    return _decode(content, name, most_pixels, lambda image: _values(image, name))


def _decode(content: bytes, name: str, most_pixels: int, convert: Callable[[Image.Image], Decoded]) -> Decoded:
    """What `convert` makes of the opened image, whose size is known and allowed."""
    if not content:
        raise ImageError(f"{name} is empty; fetch it again, or remove it from the data")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > most_pixels:
                raise ImageError(
                    f"{name} has {image.width}×{image.height} pixels, more than the {most_pixels:,} allowed; {_SHRINK}"
                )
            return convert(image)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:  # far more: Pillow does not report how many
        raise ImageError(f"{name} has more pixels than the {most_pixels:,} allowed; {_SHRINK}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} is not a readable image; {_READ}") from error
    except Exception as error:
        # A damaged file can raise nearly anything inside Pillow; report all of it as a damaged file.
        raise ImageError(f"{name} is damaged: {str(error) or type(error).__name__}; {_READ}") from error


def from_array(pixels: np.ndarray, *, channels: int = 3) -> Image.Image:
    """The image of a uint8 array, (height, width) or (height, width, 3), as RGB or greyscale."""
    return _as_mode(Image.fromarray(pixels), "RGB" if channels == 3 else "L")


def _loaded(image: Image.Image) -> Image.Image:
    image.load()
    return image


def _values(image: Image.Image, name: str) -> np.ndarray:
    if image.format in ("JPEG", "MPO"):
        raise ImageError(f"{name} is a JPEG, whose compression changes values; {_AS_PNG} from the original mask")
    step = _greyscale_step(image)
    upright = _upright(_loaded(image))
    if upright.mode in ("RGBA", "LA") and upright.getchannel("A").getextrema() == (255, 255):
        upright = upright.convert(upright.mode.removesuffix("A"))
    if upright.mode in ("1", "L", "P", "RGB"):
        return np.asarray(upright).astype(np.uint8) // np.uint8(step)
    if upright.mode == "I" or upright.mode.startswith("I;16"):
        return np.asarray(upright).astype(np.int64)
    kind = "partly transparent" if upright.mode.endswith("A") else f"of mode {upright.mode}"
    raise ImageError(f"{name} is {kind}, so its values are not classes; {_AS_PNG}")


def _greyscale_step(image: Image.Image) -> int:
    """How far apart Pillow puts successive shades of an image that is not yet loaded: it scales 2 and 4 bits to 8."""
    arguments = image.tile[0].args if isinstance(image, ImageFile) and image.tile else ""
    raw = arguments if isinstance(arguments, str) else str((arguments or ("",))[0])
    bits = re.fullmatch(r"L;([24])", raw)
    return 255 // (2 ** int(bits[1]) - 1) if bits else 1


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # Damaged EXIF data; the pixels are intact.
        return image


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.uint32) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        pixels = np.nan_to_num(np.asarray(image, dtype=np.float64))
        largest = 65535.0 if image.mode == "I" else max(float(pixels.max()), 1.0)
        image = Image.fromarray((255 * pixels / largest).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
