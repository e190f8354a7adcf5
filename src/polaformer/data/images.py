"""Bytes to images: the only place that decodes. The header is read first, so that a bomb is refused before it swells.

What is read: JPEG, PNG, WebP, BMP, GIF, TIFF, PPM; of several frames the first; turned upright as EXIF says; transparency is
dropped, as torchvision and timm do; more than 8 bits a channel are scaled to 8.
"""

import io
import warnings
from os import PathLike

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from polaformer.errors import ImageError, shown
from polaformer.regular_files import read_regular, reason

MOST_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_READ = f"{', '.join(FORMATS)} are read: fetch it again, or remove it from the data"
_SHRINK = "make it smaller, or remove it from the data"

# Ours refuses what the first warns of; the second are about damaged notes of cameras, which do no harm.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")


def read_image(path: str | PathLike[str], *, channels: int = 3, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The image in a file, in RGB or, of one channel, in grey; raises ImageError."""
    return decode(read_file(path), shown(path), channels=channels, most_pixels=most_pixels)


def read_file(path: str | PathLike[str]) -> bytes:
    """The bytes of a file; raises ImageError, also for what might never end: pipes, devices, files beyond all images."""
    try:
        return read_regular(path)
    except (OSError, ValueError) as error:
        raise ImageError(f"{path} cannot be read: {reason(error)}; check the path, or remove it from the data") from error


def decode(content: bytes, name: str, *, channels: int = 3, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The image that `content` encodes, in RGB or, of one channel, in grey; raises ImageError, which tells the name."""
    if not content:
        raise ImageError(f"{name} is empty; fetch it again, or remove it from the data")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > most_pixels:
                raise ImageError(
                    f"{name} has {image.width}×{image.height} pixels, more than the {most_pixels:,} that are allowed; {_SHRINK}"
                )
            image.load()
            return _as_mode(_upright(image), "RGB" if channels == 3 else "L")
    except ImageError:
        raise
    except Image.DecompressionBombError as error:  # far more: Pillow does not even say how many
        raise ImageError(f"{name} has more pixels than the {most_pixels:,} that are allowed; {_SHRINK}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} is no image that can be read; {_READ}") from error
    except Exception as error:
        # A damaged file fails in many ways inside Pillow; none of them may pass as anything but a damaged file.
        raise ImageError(f"{name} is damaged: {str(error) or type(error).__name__}; {_READ}") from error


def from_array(pixels: np.ndarray, *, channels: int = 3) -> Image.Image:
    """The image of an array of bytes, (height, width) or (height, width, 3), in RGB or in grey."""
    return _as_mode(Image.fromarray(pixels), "RGB" if channels == 3 else "L")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # Damaged notes of the camera; the pixels are whole.
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
