"""Sources of image folders: the layouts that are read, and the errors for all others."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import DIVIDED, SIDE, WHOLE, all_images, cached, fill, load_error, noise, write_image
from PIL import Image

from stamp_core.data import cache
from stamp_core.data.loading import load_dataset
from workbench.sources import imagenet1k, office31

OFFICE = ("amazon", "dslr", "webcam")
DOMAINS = {**DIVIDED, "domains": ["photo", "art"]}
KINDS = "(.jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp)"


@pytest.mark.parametrize("name", ["test", "val"])
def test_folders_train_and_test_are_read_in_order(raw, images, name):
    (raw / "set" / "test").rename(raw / "set" / name)
    if name == "test":
        fill(raw / "set" / "val", {"cat": 1, "dog": 1})
    found = load_dataset(WHOLE)
    assert np.array_equal(all_images(found), np.stack(images))
    assert found.y_train.tolist() == [0, 0, 0, 0, 1, 1, 1] and found.y_test.tolist() == [0, 0, 1, 1]
    assert found.classes == ("cat", "dog") and found.domains == ("all",)
    assert not found.domain_train.any() and not found.domain_test.any()


def test_test_images_are_evenly_spaced_in_each_class(raw):
    """Of 8 images 2 are for testing, those in the middle of each half; of 3 one, of 2 one."""
    cat, dog, eel = (
        fill(raw / "set", {name: n}, 9 * n) for name, n in (("c", 8), ("e", 3), ("f", 2))
    )
    found = load_dataset(DIVIDED)
    assert np.array_equal(all_images(found)[-4:], [cat[2], cat[6], dog[1], eel[1]])
    train = [*(cat[k] for k in (0, 1, 3, 4, 5, 7)), dog[0], dog[2], eel[0]]
    assert np.array_equal(all_images(found)[:-4], train)
    assert found.classes == ("c", "e", "f")


def test_domains_have_the_order_of_the_option(raw):
    counts = {"photo/cat": 4, "photo/dog": 4, "art/cat": 8, "art/dog": 2, "sketch/cat": 1}
    fill(raw / "set", counts)
    found = load_dataset(DOMAINS)
    assert found.domains == ("photo", "art") and found.classes == ("cat", "dog")
    assert torch.bincount(found.domain_train * 2 + found.y_train).tolist() == [3, 3, 6, 1]
    assert torch.bincount(found.domain_test * 2 + found.y_test).tolist() == [1, 1, 2, 1]
    other = load_dataset({**DOMAINS, "domains": ["art", "photo"]})
    assert other.domains == ("art", "photo")
    for domain in (0, 1):
        here, there = found.domain_train == domain, other.domain_train == 1 - domain
        assert torch.equal(found.x_train[here], other.x_train[there])


def test_all_images_of_subfolders_are_read_and_no_other_files(raw, images):
    more = noise(7)
    write_image(raw / "elsewhere" / "LAST.PNG", more)
    (raw / "set" / "train" / "dog" / "inner").symlink_to(raw / "elsewhere")
    for name in ("dog/notes.txt", "dog/._00.png", "dog/.DS_Store", "list.csv", ".hidden/a.png"):
        path = raw / "set" / "train" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("no image")
    found = load_dataset(WHOLE)
    assert len(found.x_train) == 8 and np.array_equal(all_images(found)[7], more)
    assert found.classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("spec", "link", "target"),
    [
        (WHOLE, "train/cat/loop", "train/cat"),
        (WHOLE, "train/cat/more", "test/cat"),
        (WHOLE, "train/cow", "train/cat"),
        ({**DIVIDED, "domains": ["train", "ink"]}, "ink", "train"),
    ],
)
def test_a_link_by_which_images_would_count_twice_is_refused(raw, images, spec, link, target):
    """Within a class, in two classes, for training and testing, in two domains."""
    root = raw / "set"
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(root / target)
    if link == "train/cow":
        (root / "test" / "cow").symlink_to(root / "test" / "dog")
    first, again = re.fullmatch(
        r"(\S+) is (\S+) again, by a link; remove the link", load_error(spec, ValueError)
    ).groups()
    assert first != again and Path(first).samefile(again) and cached() == []


def test_images_can_be_made_grey(raw, images):
    found = load_dataset({**WHOLE, "grey": True})
    grey = [np.asarray(Image.fromarray(each).convert("L")) for each in images]
    assert found.x_train.shape[1:] == (1, SIDE, SIDE)
    assert np.array_equal(all_images(found)[..., 0], grey)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "readme.txt").write_text("to come")


TRAIN_AND_TEST = "train/<class>/* and test/<class>/* (or val/), unless test_share is set"


@pytest.mark.parametrize(
    ("harm", "where", "right"),
    [
        (shutil.rmtree, ".", "{root} does not exist; {root} must hold " + TRAIN_AND_TEST),
        (shutil.rmtree, "train", "{root}/train does not exist; {root} must hold " + TRAIN_AND_TEST),
        (shutil.rmtree, "train/dog", "{root}/train/dog does not exist, but {root}/test/dog does"),
        (empty, "test/cat", "{root}/test/cat holds no images " + KINDS),
    ],
)
def test_a_missing_folder_is_named(raw, images, harm, where, right):
    harm(raw / "set" / where)
    assert load_error(WHOLE) == right.format(root=raw / "set")
    assert cached() == []


# ------------------------------------------------------------------ ImageNet-1K and Office-31


def test_imagenet_is_read_as_torchvision_lays_it_out_and_counted(raw, monkeypatch):
    """Two classes of five images for training and three for validation."""
    train = fill(raw / "imagenet1k" / "train", {"n01440764": 5, "n01443537": 5})
    val = fill(raw / "imagenet1k" / "val", {"n01440764": 3, "n01443537": 3}, seed=50)
    counts = imagenet1k.expected(imagenet1k.Options())
    assert counts.train.sum() == 1_281_167 and counts.test.sum() == 50_000
    assert counts.train.shape == (1, 1000) and np.ptp(counts.train) == 1
    for name, small_ in {"CLASSES": 2, "TRAIN_IMAGES": 10, "VAL_IMAGES": 3}.items():
        monkeypatch.setattr(imagenet1k, name, small_)
    found = load_dataset({"source": "imagenet1k", "size": SIDE})
    assert np.array_equal(all_images(found), np.stack(train + val))
    assert found.classes == ("n01440764", "n01443537")
    counts = imagenet1k.expected(imagenet1k.Options(size=SIDE))
    assert found.x_train.shape[1:] == counts.shape and counts.domains == ("all",)
    assert counts.train.tolist() == [torch.bincount(found.y_train).tolist()]
    assert counts.test.tolist() == [torch.bincount(found.y_test).tolist()]


@pytest.mark.parametrize(("share", "inner"), [(0.25, ""), (0.6, "/images")])
def test_office_is_read_in_both_layouts_and_counted(raw, share, inner, monkeypatch):
    counts = office31.expected(office31.Options())
    assert (counts.train + counts.test).sum(1).tolist() == [2817, 498, 795]
    counted = [[2 + k % 4 for k in range(31)], [6 - k % 3 for k in range(31)], [4] * 31]
    sizes = dict(zip(OFFICE, counted, strict=True))
    for domain, counted in sizes.items():
        fill(raw / "office31", {f"{domain}{inner}/class{k:02d}": n for k, n in enumerate(counted)})
    texts = {domain: " ".join(map(str, each)) for domain, each in sizes.items()}
    monkeypatch.setattr(office31, "_IMAGES", texts)
    options = {"size": SIDE, "test_share": share}
    found = load_dataset({"source": "office31", **options})
    counts = office31.expected(office31.Options(**options))
    assert found.x_train.shape[1:] == counts.shape and found.domains == counts.domains
    for part in cache.SUBSETS:
        pairs = 31 * getattr(found, f"domain_{part}") + getattr(found, f"y_{part}")
        assert torch.bincount(pairs).tolist() == getattr(counts, part).ravel().tolist()
