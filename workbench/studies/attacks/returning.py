"""Whether an exemplar that is in the uploads of several rounds leaks more than a new image."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd
import torch

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.params import Params
from stamp_core.core.seeding import generator
from workbench.studies.attacks.capture import Upload, distinct, train_until
from workbench.studies.attacks.inversion import Attack, Target
from workbench.studies.attacks.outcomes import attack_uploads, scores
from workbench.studies.attacks.study import start


def returning(
    setting: str,
    methods: Sequence[str],
    rounds: Sequence[int],
    clients: Sequence[int],
    attack: Attack,
    exemplars_per_class: int = 2,
    params: Params | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Exemplars that are in the uploads of several rounds, which the server inverts together.

    Every upload is one SGD step on new images and on all exemplars, as many of each. A row for
    each method, number of rounds, client, first round and kind of image. The rounds of an
    experience are divided into windows, so that the models of all rounds count equally at every
    number.
    """
    changes = {
        "memory.exemplars_per_class": exemplars_per_class,
        "setting.training.rounds": max(rounds),
    }
    attacked = start(setting, params, seed, changes)
    batch_size = exemplars_per_class * len(attacked.run.plan.clients[0][0].classes)
    workers = {method: attacked.worker(method, batch_size) for method in methods}
    uploads: dict[tuple[str, int], list[Upload]] = {pair: [] for pair in product(methods, clients)}
    for round_ in range(max(rounds)):
        train_until(attacked.run, 1, round_)
        images = slice(round_ * batch_size, (round_ + 1) * batch_size)
        for (method, client), kept in uploads.items():
            kept.append(attacked.upload(workers[method], client, images))
    rows = []
    for count, ((method, client), kept) in product(rounds, uploads.items()):
        for first in range(0, max(rounds), count):
            draw = generator(seed, client, first, count, "returning")
            about = {"method": method, "rounds": count, "client": client, "first": first}
            runtime = workers[method].runtime
            found = joint_scores(runtime, kept[first : first + count], attack, draw)
            rows += [about | row for row in found]
    return pd.DataFrame(rows)


def joint_scores(
    runtime: ClientRuntime, uploads: Sequence[Upload], attack: Attack, draw: torch.Generator
) -> list[dict[str, Any]]:
    """The scores of images that explain several uploads together, an exemplar being one image."""
    images, places = distinct([upload.images for upload in uploads])
    targets = [
        Target(u.received, u.update, u.lr, [own[step] for step in u.steps], u.weights)
        for u, own in zip(uploads, places, strict=True)
    ]
    outcome = attack_uploads(runtime, targets, images.labels, attack, draw)
    cost = {"loss": outcome.loss, "seconds": outcome.seconds}
    return [cost | row for row in scores(runtime, outcome, images, draw)]
