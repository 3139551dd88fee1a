"""Some classes of another source: the same images, numbered from 0; refusals."""

import numpy as np
import pytest
import torch

from stamp_core.config.decode import ParameterError
from stamp_core.data.loading import find_source, load_dataset
from workbench.workflow.synthetic import published_dataset

DIGITS = {"source": "digits"}


def test_images_and_names_are_those_of_the_whole_set():
    whole = load_dataset(DIGITS)
    part = load_dataset({"source": "subset", "of": DIGITS, "classes": "4to7"})
    assert part.classes == whole.classes[4:8] and part.domains == whole.domains
    for subset in ("train", "test"):
        x, y = getattr(whole, f"x_{subset}"), getattr(whole, f"y_{subset}")
        found = getattr(part, f"x_{subset}"), getattr(part, f"y_{subset}")
        right = [index for index, label in enumerate(y.tolist()) if 4 <= label <= 7]
        assert torch.equal(found[0], x[right]) and torch.equal(found[1] + 4, y[right])
    pixels = part.x_train.double() / 255
    np.testing.assert_allclose(part.mean, pixels.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(part.std, pixels.std((0, 2, 3), correction=0), rtol=1e-5)


def test_numbers_of_a_set_without_published_ones_are_counted(raw):
    raw.mkdir()
    own = {"source": "subset", "of": {"source": "npz", "file": "own.npz"}, "classes": "1to2"}
    y = np.array([0, 1, 1, 2, 3])
    images = {"x_train": np.zeros((5, 4, 4), np.uint8), "y_train": y}
    np.savez(raw / "own.npz", **images, x_test=images["x_train"][:4], y_test=y[[0, 1, 3, 4]])
    dataset = published_dataset(own)
    assert dataset.y_train.tolist() == [0, 0, 1] and dataset.y_test.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("classes", "words"), [("4to10", "at most 9"), ("9to4", "rising range"), ("", "rising range")]
)
def test_classes_that_are_not_there_are_refused(classes, words):
    with pytest.raises(ParameterError, match=words):
        load_dataset({"source": "subset", "of": DIGITS, "classes": classes})


def test_a_whole_set_that_is_not_known_is_refused():
    with pytest.raises(ParameterError, match=r"of\.source"):
        find_source({"source": "subset", "of": {"source": "digit"}, "classes": "0to1"})
