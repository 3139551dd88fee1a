"""Images beside what a gradient inversion made of uploads."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stamp_core.report.figures.style import add_caption, draw_images, panels, plain_text

_Pixels = NDArray[np.uint8]  # [n, C, H, W]


def reconstructions(pairs: Mapping[str, tuple[_Pixels, _Pixels]], most: int = 16) -> Figure:
    """For every named upload a row of its images above a row of their reconstructions."""
    rows, names = [], []
    for name, (true, found) in pairs.items():
        rows += [true[:most], found[:most]]
        names += [plain_text(name), "reconstructed"]
    figure, (axis,) = panels(1, height=0.5 * len(rows))
    draw_images(axis, rows, max(map(len, rows)), names)
    caption = f"at most {most} images of an upload, in pairs with the least squared error"
    add_caption(figure, "Images of clients and what the server reconstructs", caption)
    return figure
