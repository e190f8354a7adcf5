"""Bytes to images: the only decoder. It reads the header first and refuses decompression bombs before they expand.

Formats: JPEG, PNG, WebP, BMP, GIF, TIFF, PPM. Of several frames it reads the first; it applies the EXIF orientation, drops
transparency, as torchvision and timm do, and scales more than 8 bits per channel to 8.
"""

import io
import warnings
from os import PathLike

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from polaformer.errors import ImageError, printable
from polaformer.regular_files import read_regular, reason

MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_READ = f"{', '.join(FORMATS)} are supported: fetch it again, or remove it from the data"
_SHRINK = "make it smaller, or remove it from the data"

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
    if not content:
        raise ImageError(f"{name} is empty; fetch it again, or remove it from the data")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > most_pixels:
                raise ImageError(
                    f"{name} has {image.width}×{image.height} pixels, more than the {most_pixels:,} allowed; {_SHRINK}"
                )
            image.load()
            return _as_mode(_upright(image), "RGB" if channels == 3 else "L")
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
