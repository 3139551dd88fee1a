"""A data set of labelled images, as all code but the sources uses it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """A data set as all other code uses it; its tensors are shared and must not be written to."""

    name: str
    x_train: Tensor  # uint8 [N, C, H, W]
    y_train: Tensor  # int64 [N]
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    domain_train: Tensor  # int64 [N]
    domain_test: Tensor
    digest: str  # sha256 over all arrays and names
    # float32 [C]: of the training pixels in 0..1, masks left out; of maps of an encoder what undoes
    # their rounding, so that (x / 255 - mean) / std are its values
    mean: Tensor
    std: Tensor  # 1 for a constant channel, so that dividing by it is safe
    # Whether the last channel is no colour but the class of each pixel, or their number L where
    # there is none. Masks for training show the class of an image alone, those for testing all.
    masks: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image without its mask."""
        channels, height, width = self.x_train.shape[1:]
        return channels - self.masks, height, width

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.x_train.shape[1:]))
        return (
            f"{self.name}: {len(self.y_train)} training and {len(self.y_test)} test images of "
            f"{shape}, {len(self.classes)} classes, domains {', '.join(self.domains)}"
        )
