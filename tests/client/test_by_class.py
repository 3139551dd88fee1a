"""Images by class: the first ones, a balanced sample, class means."""

import torch

from stamp_core.client.by_class import class_means, first_per_class, sample_balanced
from stamp_core.core.seeding import generator


def test_the_first_images_of_each_class() -> None:
    """All of a class that has fewer."""
    labels = torch.tensor([2, 0, 2, 2, 1, 0])
    assert first_per_class(labels, 2).tolist() == [0, 1, 2, 4, 5]
    assert first_per_class(labels, 0).tolist() == first_per_class(labels[:0], 2).tolist() == []


def test_class_means_by_hand() -> None:
    """Classes may come in any order and number: (1 + 5) / 2, 3 and (0 + 2 + 4) / 3."""
    values = torch.tensor([[3.0], [0.0], [1.0], [2.0], [5.0], [4.0]])
    labels = torch.tensor([4, 9, 1, 9, 1, 9])
    means, classes = class_means(values, labels)
    assert (means.flatten().tolist(), classes.tolist()) == ([3.0, 3.0, 2.0], [1, 4, 9])
    assert class_means(values.view(6, 1, 1, 1), labels)[0].shape == (3, 1, 1, 1)


def test_a_balanced_sample_has_as_many_images_of_each_class() -> None:
    """Of 9, 2 and 5 images, 8 are 3, 2 and 3; each is there once."""
    order = torch.randperm(16, generator=generator("order"))
    labels = torch.tensor([0] * 9 + [1] * 2 + [2] * 5)[order]
    sample = sample_balanced(labels, 8, generator("balanced"))
    assert len(sample.unique()) == 8
    assert sorted(labels[sample].bincount().tolist()) == [2, 3, 3]
    assert sample_balanced(labels, 16, generator("balanced")).tolist() == [*range(16)]
    another = sample_balanced(labels, 8, generator("balanced", 1))
    assert sorted(another.tolist()) != sorted(sample.tolist())
