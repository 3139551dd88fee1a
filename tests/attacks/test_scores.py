"""Scores of reconstructions by hand, by naive loops, and who belongs to whom."""

import numpy as np
import pytest
import torch
from small import tiny

from workbench.studies.attacks.scores import (
    WINDOW,
    identified,
    other_images,
    pair,
    psnr,
    ssim,
    strangers,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_psnr_by_hand():
    black = torch.zeros(3, 1, 2, 2)
    other = torch.tensor([0.1, 1.0, 0.0])[:, None, None, None].expand(-1, 1, 2, 2)
    assert psnr(black, other).tolist() == pytest.approx([20, 0, 100])  # 100 dB: no error


def test_ssim_is_that_of_a_loop_over_windows():
    one, other = noise(2, 3, 10, 9), noise(2, 3, 10, 9, seed=1)
    other = 0.7 * one + 0.3 * other
    found = ssim(one, other)
    for k in range(2):
        values = []
        for c, i, j in np.ndindex(3, 10 - WINDOW + 1, 9 - WINDOW + 1):
            x, y = (
                each[k, c, i : i + WINDOW, j : j + WINDOW].double().numpy() for each in (one, other)
            )
            covariance = np.mean((x - x.mean()) * (y - y.mean()))
            luminance = (2 * x.mean() * y.mean() + 1e-4) / (x.mean() ** 2 + y.mean() ** 2 + 1e-4)
            values.append(luminance * (2 * covariance + 9e-4) / (x.var() + y.var() + 9e-4))
        assert float(found[k]) == pytest.approx(np.mean(values), abs=1e-5)
    assert ssim(one, one).tolist() == pytest.approx([1, 1])


def test_pairs_are_the_nearest_and_of_one_label_where_they_can_be():
    images = noise(6, 1, 4, 4)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    found = images[order] + 0.01 * noise(6, 1, 4, 4, seed=1)
    rows, columns = pair(found, labels[order], images, labels)
    assert torch.equal(columns, order[rows])
    swapped = torch.tensor([1, 1, 0, 0, 2, 2])  # what looks like an image of class 0 has label 1
    rows, columns = pair(images, swapped, images, labels)
    assert torch.equal(swapped[rows], labels[columns])
    rows, columns = pair(images[:2], torch.tensor([1, 1]), images, labels)  # fewer than images
    assert set(columns.tolist()) == {2, 3}


def test_strangers_are_no_candidates_of_the_other_half():
    dataset = tiny().dataset()
    halves = [strangers(dataset, 3, half) for half in (0, 1)]
    assert sum(map(len, halves)) == int((dataset.y_test == 3).sum())
    labels = torch.full((2,), 3)
    truth = dataset.x_train[dataset.y_train == 3][:2].float() / 255
    assert identified(truth, truth, labels, dataset).all()
    assert not identified(halves[1][:2], truth, labels, dataset).any()
    drawn = other_images(dataset, labels, torch.Generator().manual_seed(0))
    assert all((halves[0] == each).flatten(1).all(1).any() for each in drawn)
    assert not torch.equal(drawn[0], drawn[1])
