"""Characters in the fonts that matplotlib ships, drawn in integers: everywhere bit-identical."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt

from stamp_core.config.decode import require
from stamp_core.config.limits import between
from stamp_core.data.cache import Bytes, Numbers
from stamp_core.data.images import ImageArrays

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

PACKAGES = ("numpy", "matplotlib")

# Each differs as much as possible, over all faces, from those before it; digits and capitals come
# first. No two are equal up to size, as an image does not show the size of its character.
CHARACTERS = (
    "AC7M5V1LXPWQ2K9U4ZJDT8RE…¬^>½<+ξ/±=ω«©Љ»$(ЂЖ%βλ"
    "ЧŒ&¶™Ψσ~Ю§Φ@Ц!‡a#Þ€df*ÆΣЯμД£ΞæbemØ?Ы3H№tΓGYBШNΔ6ΩOF¿¤"
)
FACES = tuple(
    family + style
    for family, styles in {
        "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
        "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
    }.items()
    for style in styles
)
ONE = 1 << 16  # 1 in fixed point; also the number of values of a random draw
FACTORS = 14  # random numbers per image besides its noise
BLOCK = 100  # images drawn at once: few enough for the processor's cache
TRAIN, TEST = 0, 1


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    classes: Annotated[int, between(2, len(CHARACTERS))]  # the first characters
    train_per_class: Annotated[int, between(1, 10_000)]  # images for training
    test_per_class: Annotated[int, between(1, 10_000)]  # images for testing
    size: Annotated[int, between(8, 64)] = 20  # pixels per side
    face_domains: bool = False  # every face is a domain, with the same share of each class

    def __post_init__(self) -> None:
        for name in ("train_per_class", "test_per_class"):
            enough = not self.face_domains or getattr(self, name) >= len(FACES)
            right = f"at least {len(FACES)}, one per face, as face_domains is true"
            require(self, name, enough, right)


def make(options: Options) -> ImageArrays:
    """All images, class after class; more classes or images do not change the earlier ones."""
    shapes = draw_outlines(CHARACTERS[: options.classes], 3 * options.size // 4)
    x_train, y_train, face_train = _draw_subset(shapes, options, TRAIN, options.train_per_class)
    x_test, y_test, face_test = _draw_subset(shapes, options, TEST, options.test_per_class)
    classes = tuple(CHARACTERS[: options.classes])
    if not options.face_domains:
        return ImageArrays(x_train, y_train, x_test, y_test, classes)
    return ImageArrays(x_train, y_train, x_test, y_test, classes, FACES, face_train, face_test)


def draw_outlines(characters: str, box: int) -> Bytes:
    """Every character in every face, centred, its longer side 2 * `box`.  # [C, F, side, side]"""
    from matplotlib import get_data_path  # only here: a cached data set needs no fonts
    from matplotlib.ft2font import FT2Font

    side = 2 * box + 4  # with a dark border
    shapes = np.zeros((len(characters), len(FACES), side, side), np.uint8)
    for index, face in enumerate(FACES):
        font = FT2Font(str(Path(get_data_path(), "fonts", "ttf", f"{face}.ttf")))
        for shape, character in zip(shapes[:, index], characters, strict=True):
            drawn = _draw(font, character, 2 * box)
            top, left = (side - drawn.shape[0]) // 2, (side - drawn.shape[1]) // 2
            shape[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    return shapes


def _draw(font: "FT2Font", character: str, box: int) -> Bytes:
    """A character as grey pixels without hinting, its longer side `box` pixels."""
    large = 100 * 64  # the unit of fonts is 1/64
    height, width = _trimmed(font, character, large).shape
    return _trimmed(font, character, large * box // max(height, width))


def _trimmed(font: "FT2Font", character: str, points: int) -> Bytes:
    """A character at a size in 64ths of a point, without empty rows and columns."""
    from matplotlib.ft2font import LoadFlags

    font.set_size(points / 64, 72)
    font.set_text(character, flags=LoadFlags.NO_HINTING)
    font.draw_glyphs_to_bitmap()
    grey = np.array(font.get_image(), np.uint8)
    rows, columns = np.flatnonzero(grey.any(1)), np.flatnonzero(grey.any(0))
    return grey[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _draw_subset(
    shapes: Bytes, options: Options, subset: int, count: int
) -> tuple[Bytes, Numbers, Numbers]:
    """Images, labels and faces for training or testing, `count` images of every class."""
    size = options.size
    x = np.empty((options.classes, count, 3, size, size), np.uint8)
    faces = np.empty((options.classes, count), np.int64)
    for label in range(options.classes):
        draws = _draw_numbers(options.size, label, subset, count)
        faces[label] = draws[:, 0] % len(FACES)
        if options.face_domains:
            faces[label] = (np.arange(count) + label) % len(FACES)
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            x[label, block] = _render(shapes[label], faces[label, block], draws[block], options)
    return x.reshape(-1, 3, size, size), np.repeat(np.arange(options.classes), count), faces.ravel()


def _draw_numbers(size: int, label: int, subset: int, count: int) -> npt.NDArray[np.uint16]:
    """Random numbers below ONE, a row per image: face, factors, noise."""
    generator = np.random.Generator(np.random.PCG64([0, label, subset]))
    return generator.integers(0, ONE, (count, FACTORS + 3 * size**2), dtype=np.uint16)


def _render(
    shapes: Bytes, faces: Numbers, draws: npt.NDArray[np.uint16], options: Options
) -> Bytes:
    """The images of one class, one per row of `draws`."""
    factors = draws[:, 1:FACTORS].T.astype(np.int64)
    cover = coverage(shapes, faces, *positions(factors[:5], options.size))
    x = _colour(cover, factors[5:])
    draws = draws[:, FACTORS:].reshape(x.shape)
    noise = (draws >> 8).astype(np.int64) + (draws & 255) - 255  # -255..255, mostly small
    return np.clip(x + (noise >> 3), 0, 255).astype(np.uint8)


def positions(factors: Numbers, size: int) -> tuple[Numbers, Numbers]:
    """The position of each quarter pixel in the outline, from its centre, in fixed point."""
    rotation, shear, reduction, right, down = factors  # [N] each
    # tan(angle / 2): sine and cosine from it are exact
    half = _centred(rotation, ONE * 15 // 100)
    cosine = (ONE**2 - half**2) * ONE // (ONE**2 + half**2)
    sine = 2 * half * ONE**2 // (ONE**2 + half**2)
    slant = _centred(shear, ONE // 4)
    zoom = ONE**2 // (ONE - (reduction * (ONE * 35 // 100) >> 16))
    middle = (2 * np.arange(2 * size) + 1 - 2 * size) * (ONE // 2)  # two per pixel
    x = (middle - _centred(right, ONE * size // 5)[:, None]) * zoom[:, None] >> 16
    y = (middle - _centred(down, ONE * size // 5)[:, None]) * zoom[:, None] >> 16
    u = (cosine[:, None] * x >> 16)[:, None, :] + (sine[:, None] * y >> 16)[:, :, None]
    v = (cosine[:, None] * y >> 16)[:, :, None] - (sine[:, None] * x >> 16)[:, None, :]
    return u + (slant[:, None, None] * v >> 16), v  # [N, 2 size, 2 size]


def coverage(shapes: Bytes, faces: Numbers, u: Numbers, v: Numbers) -> Numbers:
    """How much of each pixel the character covers, in 0..ONE: the mean of four quarters."""
    side = shapes.shape[-1]
    flat = shapes.ravel().astype(np.int32)
    u, v = (np.clip(x + ONE * (side - 1) // 2, 0, ONE * (side - 1) - 1) for x in (u, v))
    at = (v >> 16) * side + (u >> 16) + (faces * side**2)[:, None, None]
    u, v = (u >> 8 & 255).astype(np.int32), (v >> 8 & 255).astype(np.int32)
    above = flat[at] * (256 - u) + flat[at + 1] * u
    below = flat[at + side] * (256 - u) + flat[at + side + 1] * u
    quarters = above * (256 - v) + below * v >> 8
    rows = quarters[:, ::2] + quarters[:, 1::2]
    cover: Numbers = (rows[:, :, ::2] + rows[:, :, 1::2] >> 2).astype(np.int64)
    return cover  # [N, size, size]


def _colour(cover: Numbers, factors: Numbers) -> Numbers:
    """The character in a light colour on a dark background with a gradient."""
    size = cover.shape[-1]
    light = 240 - (factors[:3] * 110 >> 16)  # [3, N]
    dark = 15 + (factors[3:6] * 80 >> 16)
    across, down = (_centred(factor, ONE * 30)[:, None] for factor in factors[6:8])
    middle = 2 * np.arange(size) + 1 - size
    slope = (across * middle)[:, None, :] + (down * middle)[:, :, None]  # [N, size, size]
    ground: Numbers = dark.T[:, :, None, None] + (slope // size >> 16)[:, None]
    return ground + ((light.T[:, :, None, None] - ground) * cover[:, None] >> 16)


def _centred(draws: Numbers, limit: int) -> Numbers:
    """Draws below ONE as numbers from -limit to limit."""
    centred: Numbers = (2 * draws - ONE) * limit >> 16
    return centred
