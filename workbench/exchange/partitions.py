"""Plans from partitions of PFLlib and Flower Datasets, whose classes are cut into tasks here."""

import hashlib
import io
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stamp_core.config.decode import ParameterError, convert, invalid
from stamp_core.config.limits import NonNegativeInt, PositiveInt, between
from stamp_core.core.seeding import generator
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import array_error
from stamp_core.data.plan import Indices, Plan, Task, read_json
from stamp_core.data.sources.npz import READ_ERRORS
from workbench.exchange import listed_plan
from workbench.exchange.checks import check_owners, check_plan
from workbench.exchange.pickled import read_arrays

Order = Literal["given", "independent"]  # of a client's classes: by number, or drawn by `seed`
Key = tuple[int, bytes]  # the label of an image and the SHA-256 of its pixels [C, H, W]
HEADER = 1 << 16  # bytes, at most, of a client's file besides images and labels
PIXEL_ERROR = 1e-3  # float32 moves a pixel in 0..255 by a tenth of it, another one is 1 away


class ImageFinder:
    """Finds images from elsewhere among the training images of a data set, each of them once."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.name = dataset.name
        self.shape = tuple(dataset.x_train.shape[1:])  # C, H, W
        self.indices: dict[Key, list[int]] = defaultdict(list)  # of images not found so far
        for index, key in enumerate(_keys(dataset.x_train.numpy(), dataset.y_train.numpy())):
            self.indices[key].append(index)
        self.tests = set(_keys(dataset.x_test.numpy(), dataset.y_test.numpy()))

    def find(self, where: str, x: NDArray[Any], y: NDArray[Any], drop_tests: bool) -> Indices:
        """The indices of images; with `drop_tests` those of the test set are left out.  # [n]"""
        found = []
        if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
            raise array_error(where, "y", y, "whole numbers [n], one for each image")
        for k, key in enumerate(_keys(_channels_first(where, x, self.shape), y)):
            if self.indices.get(key):
                found.append(self.indices[key].pop(0))
            elif not (drop_tests and key in self.tests):
                raise ParameterError(f"{where}: image {k} of class {key[0]} {self._reason(key)}")
        return np.array(found, np.int64)

    def _reason(self, key: Key) -> str:
        if key in self.indices:
            return "was there before; an image must be of one client, and once"
        if key in self.tests:
            return "is a test image of the data; import_pfllib can leave such out: drop_tests=True"
        return f"must be a training image of {self.name}, with the same pixels and class"


def find_images(dataset: ImageDataset, x: NDArray[Any], y: NDArray[Any]) -> Indices:
    """The indices of the training images `x`, uint8 [N, C, H, W], [N, H, W, C] or [N, H, W]."""
    return ImageFinder(dataset).find("the images", x, y, drop_tests=False)


def import_pfllib(
    folder: str | Path,
    dataset: ImageDataset,
    tasks: int,
    order: Order = "given",
    seed: int = 0,
    drop_tests: bool = False,
) -> Plan:
    """The plan of PFLlib's config.json and train/0.npz, ...; `drop_tests` omits our test images."""
    path = Path(folder) / "config.json"
    config = convert(read_json(path), Mapping[str, object], str(path))
    assert isinstance(config, Mapping)
    limit = between(1, len(dataset.y_train))  # each client has an image
    count: Any = convert(config.get("num_clients"), Annotated[int, limit], f"{path}: num_clients")
    files = [path.parent / "train" / f"{client}.npz" for client in range(count)]
    finder = ImageFinder(dataset)
    images = len(dataset.y_train) + len(dataset.y_test)
    size = 8 * images * (dataset.x_train[0].numel() + 1) + HEADER
    parts = [finder.find(str(file), *_read_client(file, size), drop_tests) for file in files]
    return _cut_into_tasks(str(folder), parts, dataset, tasks, order, seed)


def import_flwr(
    path: str | Path,
    dataset: ImageDataset,
    tasks: int,
    order: Order = "given",
    seed: int = 0,
    rows: Indices | None = None,
) -> Plan:
    """The plan of a JSON file {partition: [index, ...]}, or of positions in the images `rows`."""
    content = convert(read_json(Path(path)), Mapping[str, object], str(path))
    assert isinstance(content, Mapping)
    count = len(dataset.y_train)
    rows = np.arange(count) if rows is None else np.asarray(rows)
    known = rows.dtype.kind in "iu" and rows.ndim == 1 and np.isin(rows, np.arange(count)).all()
    if not known or len(np.unique(rows)) < len(rows):
        right = f"whole numbers [n] from 0 and below {count}, each once"
        raise array_error(path, "rows", rows, right)
    parts = [
        _read_part(f"{path}: {c}", content.get(str(c)), len(rows)) for c in range(len(content))
    ]
    found = [rows[np.array(part, np.int64)] for part in parts]
    check_owners(str(path), (part.tolist() for part in found))
    return _cut_into_tasks(str(path), found, dataset, tasks, order, seed)


def _read_part(where: str, values: object, count: int) -> Sequence[int]:
    part = convert(values, tuple[int, ...], where)
    assert isinstance(part, tuple)
    for k, row in enumerate(part):
        if not 0 <= row < count:
            raise invalid(f"{where}[{k}]", row, f"from 0 and below {count}, the number of rows")
    return part


def _read_client(path: Path, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """x and y of one client, whose file may unpack to at most `size` bytes."""
    try:
        with zipfile.ZipFile(path) as file:
            if (found := file.getinfo("data.npy").file_size) > size:
                raise ValueError(f"it unpacks to {found:,} bytes, all images have at most {size:,}")
            stream = io.BytesIO(file.read("data.npy"))
        np.lib.format.read_magic(stream)
        np.lib.format.read_array_header_1_0(stream)
        x, y = read_arrays(stream.read())
    except (*READ_ERRORS, LookupError, AttributeError) as error:
        right = "it must be an .npz file with data = {'x': images, 'y': labels}"
        raise ParameterError(f"{path} is not a client's file of PFLlib: {error}; {right}") from None
    return _to_pixels(f"{path}: x", x), y


def _to_pixels(where: str, x: NDArray[Any]) -> NDArray[Any]:
    """Floats after ToTensor and Normalize(0.5, 0.5) as the uint8 that they were."""
    if x.dtype.kind != "f":
        return x
    pixels = (x.astype(np.float64) * 0.5 + 0.5) * 255
    near = pixels.round().clip(0, 255)
    for index in np.argwhere(~(np.abs(pixels - near) < PIXEL_ERROR))[:1].tolist():
        right = "k / 127.5 - 1 with a whole k from 0 to 255: ToTensor, then Normalize(0.5, 0.5)"
        raise invalid(f"{where}{index}", float(x[tuple(index)]), right)
    return near.astype(np.uint8)


def _channels_first(where: str, x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Images of a shape [C, H, W], whose channels may be last or left out.  # [N, C, H, W]"""
    channels, *size = shape
    if x.shape[1:] == (*size, channels) != shape:
        x = x.transpose(0, 3, 1, 2)
    if channels == 1 and x.shape[1:] == (*size,):
        x = x[:, None]
    if x.dtype != np.uint8 or x.shape[1:] != shape:
        raise array_error(where, "x", x, f"uint8 [n, {', '.join(map(str, shape))}]")
    return x


def _keys(x: NDArray[Any], y: NDArray[Any]) -> Iterator[Key]:
    for image, label in zip(x, y.tolist(), strict=True):
        yield label, hashlib.sha256(image.tobytes()).digest()


def _cut_into_tasks(
    where: str, parts: Sequence[Indices], dataset: ImageDataset, tasks: int, order: Order, seed: int
) -> Plan:
    """The plan in which each client's classes are cut into tasks, of equal sizes where they can."""
    convert(order, Order, "order")
    convert(tasks, PositiveInt, "tasks")
    convert(seed, NonNegativeInt, "seed")
    clients = []
    for client, images in enumerate(parts):
        labels = dataset.y_train.numpy()[images]
        classes = np.unique(labels)
        if not 1 <= tasks <= len(classes):
            right = f"from 1 to {len(classes)}, the number of classes of client {client} in {where}"
            raise invalid("tasks", tasks, right)
        if order == "independent":
            draw = generator(seed, client, 0, 0, "order of classes")
            classes = classes[torch.randperm(len(classes), generator=draw).numpy()]
        groups = np.array_split(classes, tasks)
        clients.append(tuple(_to_task(each, images[np.isin(labels, each)]) for each in groups))
    plan = listed_plan(where, tuple(clients), dataset, seed)
    check_plan(f"{where}: plan", plan, dataset)
    return plan


def _to_task(classes: Indices, images: Indices) -> Task:
    return Task(tuple(sorted(classes.tolist())), None, tuple(sorted(images.tolist())))
