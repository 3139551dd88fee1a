"""Networks in bfloat16, and batches that pass in parts: what changes, and what must not."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, kept, plan, run, tiny, whole
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

from stamp_core import methods, models, personal
from stamp_core.config import Network
from stamp_core.coresets import sre2l
from stamp_core.coresets.mixstyle import mixed_styles
from stamp_core.learner import gradients
from stamp_core.models import Classifier, train_mode
from stamp_core.paths import ROOT
from stamp_core.seeding import generator
from stamp_core.vectors import flatten

NORMS = ("none", "group", "batch")
SHAPE = (1, 8, 8)
RESNET: Any = {"kind": "resnet18", "stem": "small", "norm": "group"}
FEW = {"images_per_class": 20}
ROUNDING = 2**-8  # of a number in bfloat16, whose fraction has 8 bits with the hidden one


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As in a training: sums are split by threads."""
    torch.set_num_threads(1)


def net(norm: Any = "none", seed: int = 0, **how: Any) -> Classifier:
    """A small convolutional network, in training mode."""
    network = Network("cnn", features=8, channels=(4,), norm=norm, **how)
    return models.build(network, SHAPE, 10, seed).train()


def batch(count: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pictures of noise and labels that come again."""
    return torch.randn(count, *(shape or SHAPE), generator=generator(seed)), torch.arange(count) % 5


def slope(network: nn.Module, count: int) -> Tensor:
    """The gradient of a batch's loss."""
    pictures, labels = batch(count)
    return small.slope(network, F.cross_entropy(network(pictures), labels))


def buffers(network: nn.Module) -> Tensor:
    """All that batch normalisation has gathered."""
    return flatten([value for value in network.buffers() if value.is_floating_point()])


def apart(found: Tensor, wanted: Tensor) -> float:
    """How long the difference is, as a share of what is wanted."""
    return float(((found - wanted).norm() / wanted.norm()).detach())


def passing(network: Classifier) -> list[int]:
    """A list that notes how many pictures pass the encoder, each time that they do."""
    sizes: list[int] = []
    network.encoder.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    return sizes


# ------------------------------------------------------------------ parts of a batch


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("at_once", [7, 8])
def test_a_part_as_large_as_the_batch_changes_no_bit(norm: str, at_once: int) -> None:
    one, other = net(norm, at_once=at_once), net(norm)
    assert torch.equal(slope(one, 7), slope(other, 7))
    assert torch.equal(buffers(one), buffers(other))


@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
def test_parts_have_the_gradient_of_the_whole_batch(norm: str, at_once: int) -> None:
    assert apart(slope(net(norm, at_once=at_once), 7), slope(net(norm), 7)) < 1e-5


def test_parts_are_of_about_the_same_size_and_each_is_computed_twice() -> None:
    """7 pictures, at most 3 at once: 3, 2 and 2, not 3, 3 and a single one; then for gradients."""
    network = net(at_once=3)
    sizes = passing(network)
    loss = network(batch(7)[0]).sum()
    assert sizes == [3, 2, 2]
    loss.backward()
    assert sorted(sizes[3:]) == [2, 2, 3]


def test_without_gradients_too_no_more_pictures_pass_at_once() -> None:
    network, (pictures, _) = net(at_once=3).eval(), batch(7)
    sizes = passing(network)
    with torch.no_grad():
        found = network.encode(pictures)
    assert sizes == [3, 2, 2] and not found.requires_grad
    torch.testing.assert_close(found, net().eval().encode(pictures))


@pytest.mark.parametrize("how", [{}, {"at_once": 2}, {"precision": "bfloat16"}])
def test_no_pictures_have_no_features(how: Any) -> None:
    """Whatever there is to normalise them by."""
    for norm in NORMS:
        features = net(norm, **how).eval().encode(torch.empty(0, *SHAPE))
        assert features.shape == (0, 8) and features.dtype == torch.float32


def test_batch_normalisation_of_parts_is_that_of_smaller_batches_gathered_once() -> None:
    """7 pictures as 3, 2 and 2, with the loss of all of them; computed again, nothing moves."""
    parted, other, (pictures, labels) = net("batch", at_once=3), net("batch"), batch(7)
    answers = torch.cat([other(part) for part in pictures.split([3, 2, 2])])
    wanted = small.slope(other, F.cross_entropy(answers, labels))
    assert apart(slope(parted, 7), wanted) < 1e-5
    assert torch.equal(buffers(parted), buffers(other))
    assert apart(wanted, slope(net("batch"), 7)) > 0.01  # which is not that of the whole


def test_a_part_of_one_picture_is_normalised_by_what_is_gathered_by_then() -> None:
    """It has no spread of its own: 3 pictures as 2 and 1, the last by what the first two left."""
    parted, other, (pictures, labels) = net("batch", at_once=2), net("batch"), batch(3)
    first = other(pictures[:2])
    train_mode(other, gathers=False)
    answers = torch.cat([first, other(pictures[2:])])
    found, wanted = (F.cross_entropy(each, labels) for each in (parted(pictures), answers))
    assert torch.equal(buffers(parted), buffers(other))
    assert apart(small.slope(parted, found), small.slope(other, wanted)) < 1e-5
    assert torch.equal(buffers(parted), buffers(other))
    assert all(norm.training for norm in parted.modules())  # as it was before


def test_one_picture_at_once_never_gathers() -> None:
    """As a batch of one does; then batch normalisation stays what it started from."""
    parted, other = net("batch", at_once=1), net("batch")
    before = buffers(parted).clone()
    train_mode(other, gathers=False)
    assert apart(slope(parted, 5), slope(other, 5)) < 1e-5
    assert torch.equal(buffers(parted), before)


def test_second_derivatives_are_those_of_the_whole_batch() -> None:
    """Each of three gradients computes the parts again, and none of them gathers anything."""

    def curved(network: Classifier) -> Tensor:
        """H 1 + H H 1 of the loss."""
        pictures, labels = batch(7)
        weights = list(network.parameters())
        first = F.cross_entropy(network(pictures), labels)
        gathered = buffers(network).clone()
        downhill = flat(grad(first, weights, create_graph=True))
        once = flat(grad(downhill, weights, torch.ones_like(downhill), retain_graph=True))
        twice = flat(grad(downhill, weights, once))
        assert torch.equal(buffers(network), gathered)
        return once + twice

    def flat(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    for norm in ("none", "group"):
        assert apart(curved(net(norm, at_once=3)), curved(net(norm))) < 1e-4
    curved(net("batch", at_once=3))


def test_with_weights_put_in_for_one_pass_a_batch_passes_whole() -> None:
    """They, and hooks beside them, are gone when the gradient is computed."""

    def put_in(network: Classifier) -> Tensor:
        share, (pictures, labels) = torch.tensor(0.5, requires_grad=True), batch(7)
        values = {name: share * value for name, value in network.named_parameters()}
        layer = dict(network.encoder.named_children())["0"]
        with layer.register_forward_hook(lambda module, given, maps: maps * share):
            loss = F.cross_entropy(functional_call(network, values, (pictures,)), labels)
        return grad(loss, share)[0]

    network = net(at_once=3)
    sizes = passing(network)
    found = put_in(network)
    assert sizes == [7] and found.abs() > 1e-3
    assert torch.equal(found, put_in(net()))


def test_what_a_part_draws_is_drawn_again() -> None:
    """Dropout: the same pictures are left out when a part is computed again."""
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5))
    network, (pictures, labels) = Classifier(encoder, 8, 10, at_once=3).train(), batch(7)

    def loss(encode: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(3)
        return F.cross_entropy(network.head(encode(pictures)), labels)

    def by_hand(pictures: Tensor) -> Tensor:
        return torch.cat([encoder(part) for part in pictures.split([3, 2, 2])])

    wanted = small.slope(network, loss(by_hand))
    found = loss(network.encode)
    left = torch.get_rng_state()
    assert apart(small.slope(network, found), wanted) < 1e-5
    assert torch.equal(torch.get_rng_state(), left)


@pytest.mark.parametrize("how", [{"at_once": 3}, {"precision": "bfloat16"}])
def test_global_chance_is_left_alone(how: Any) -> None:
    before = torch.get_rng_state()
    slope(net("batch", **how), 7)
    assert torch.equal(torch.get_rng_state(), before)


SCRIPT = """
import torch
from stamp_core import models
from stamp_core.config import Network
from stamp_core.executor import peak_memory
torch.set_num_threads(1)
pictures = torch.randn(64, 3, 48, 48)
network = models.build(Network("cnn", features=8, channels=(64,)), (3, 48, 48), 10, 0)
for count, network.at_once in ((16, 8), (64, 8), (64, None)):
    network(pictures[:count]).sum().backward()
    print(peak_memory())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs this process's own peak")
def test_many_parts_take_little_more_memory_than_two() -> None:
    """The maps of 64 pictures take 32 MB before and after the ReLU; of parts only one has its."""
    command, env = [sys.executable, "-c", SCRIPT], {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=env)
    two, eight, whole = map(int, done.stdout.split())
    assert whole - two > 50e6 and eight - two < 0.2 * (whole - two)


# ------------------------------------------------------------------ hooks: MixStyle


def mixed(network: Classifier, cuts: list[int], pictures: Tensor, labels: Tensor) -> Tensor:
    """Features of a batch in styles that are mixed inside pieces of it, one by one."""
    draw, found = generator("styles"), []
    for part, own in zip(pictures.split(cuts), labels.split(cuts), strict=True):
        with mixed_styles(network.encoder, own, 0.7, draw):
            found.append(network.encode(part))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("values", "shape"),
    [({"kind": "cnn", "features": 8, "channels": (4, 6)}, (3, 20, 20)), (RESNET, (3, 9, 9))],
)
def test_a_part_that_is_computed_again_takes_on_the_same_styles(
    values: Any, shape: tuple[int, int, int]
) -> None:
    """Partners are those of its own class in its own part; after one layer or after two."""
    (pictures, _), labels = batch(7, *shape), torch.tensor([0, 1, 0, 1, 0, 1, 1])
    one, other = (models.build(Network(**values, at_once=at), shape, 10, 0) for at in (3, None))
    wanted = mixed(other, [3, 2, 2], pictures, labels)
    with mixed_styles(one.encoder, labels, 0.7, generator("styles")):
        found = one.encode(pictures)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        ours = small.slope(one.encoder, found.square().mean())
    theirs = grad(other.encode(pictures).square().mean(), list(other.encoder.parameters()))
    plain = torch.cat([each.flatten() for each in theirs])
    assert apart(ours, mixed_slope(other, pictures, labels)) < 1e-4
    assert apart(ours, plain) > 1e-3


def mixed_slope(network: Classifier, pictures: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean squared feature, in styles mixed inside 3, 2 and 2 pictures."""
    return small.slope(network.encoder, mixed(network, [3, 2, 2], pictures, labels).square().mean())


def test_styles_of_a_whole_batch_are_drawn_as_without_parts() -> None:
    (pictures, labels), found = batch(7), []
    for at_once in (7, None):
        network = net(at_once=at_once)
        found.append(mixed(network, [7], pictures, labels))
    assert torch.equal(*found)


def test_styles_are_mixed_in_float32_and_given_back_in_bfloat16() -> None:
    """Alone in its class a picture keeps its style, but for the rounding of its maps."""
    network, (pictures, _) = net(precision="bfloat16"), batch(5)
    types: list[torch.dtype] = []
    with mixed_styles(network.encoder, torch.arange(5), 0.7, generator("styles")):
        layer = dict(network.encoder.named_children())["3"]  # after the pooling, where they mix
        layer.register_forward_pre_hook(lambda module, given: types.append(given[0].dtype))
        found = network.encode(pictures)
    assert types == [torch.bfloat16]
    plain = net(precision="bfloat16").encode(pictures)
    assert (found - plain).abs().max() < 2 * ROUNDING * plain.abs().max()


# ------------------------------------------------------------------ bfloat16


def test_features_are_those_of_a_layer_in_bfloat16_by_hand() -> None:
    """Pictures, weights and bias rounded, and their product; the head multiplies in float32."""
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    network, (pictures, _) = Classifier(encoder, 8, 10, precision="bfloat16"), batch(6)
    weight, bias = (value.bfloat16() for value in encoder[1].parameters())
    wanted = F.linear(pictures.flatten(1).bfloat16(), weight, bias).float()
    assert torch.equal(network.encode(pictures), wanted)
    assert torch.equal(network(pictures), F.linear(wanted, *network.head.parameters()))


@pytest.mark.parametrize("norm", NORMS)
def test_features_loss_weights_and_their_gradients_stay_in_float32(norm: str) -> None:
    network, types = net(norm, precision="bfloat16"), list[torch.dtype]()
    first = dict(network.encoder.named_children())["0"]
    first.register_forward_hook(lambda module, given, maps: types.append(maps.dtype))
    network.head.register_forward_pre_hook(lambda module, given: types.append(given[0].dtype))
    (pictures, labels), single = batch(6), torch.float32
    loss = F.cross_entropy(network(pictures), labels)
    loss.backward()
    assert types == [torch.bfloat16, single] and loss.dtype == single
    held = [*network.parameters(), *(p.grad for p in network.parameters()), *network.buffers()]
    assert {value.dtype for value in held if value is not None} <= {single, torch.int64}


@pytest.mark.parametrize("norm", NORMS)
def test_answers_and_gradients_are_those_of_float32_but_for_rounding(norm: str) -> None:
    """A few roundings one after the other; gradients also pass those of the maps, where a ReLU or
    a pooling may choose another one."""
    half, single, (pictures, _) = net(norm, precision="bfloat16"), net(norm), batch(64)
    with torch.no_grad():
        away = apart(half.encode(pictures), single.encode(pictures))
    assert ROUNDING / 16 < away < 4 * ROUNDING
    ours, theirs = slope(half, 64), slope(single, 64)
    assert not torch.equal(ours, theirs)
    assert float(F.cosine_similarity(ours, theirs, dim=0)) > 0.99


def test_outside_of_the_encoder_nothing_is_rounded() -> None:
    """Autocast ends with the pass, also where that fails."""
    network = net(precision="bfloat16")
    with pytest.raises(RuntimeError, match=r"shape|size"):
        network.encode(torch.ones(2, 1, 3, 3))
    assert not torch.is_autocast_enabled("cpu")
    slope(network, 6)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("norm", NORMS)
def test_the_gradient_of_each_picture_is_made_in_float32(norm: str) -> None:
    """vmap cannot mix types in batch normalisation; the network is as it was afterwards."""
    half, single, (pictures, labels) = net(norm, precision="bfloat16"), net(norm), batch(5)
    found = gradients(half, pictures, labels)
    assert torch.equal(found, gradients(single, pictures, labels))
    assert half.precision == "bfloat16" and apart(half(pictures), single(pictures)) > 0
    alone = [small.slope(single, F.cross_entropy(single(p[None]), y[None]))
             for p, y in zip(pictures, labels, strict=True)]  # fmt: skip
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ methods and whole trainings


def sent(kind: str, norm: str, how: dict[str, Any], **params: Any) -> Tensor:
    """All numbers that a client sends after its second task, in pictures of 20 a class."""
    network = {**BATCH_NORM, "norm": norm, **how}
    cell = whole(kind, network=network, split=FEW, **params)
    plan_ = plan(cell)
    here = small.worker(cell, plan_)
    turn = small.arrived(here, plan_, 1)
    reply = here.attend(turn.visit, turn.state, turn.message).reply
    return flatten([value.float() for _, value in small.tensors(reply.message)])


OPTIONS: dict[str, dict[str, Any]] = {
    "bcsr": {"candidates": 20, "outer": 2},
    "csrel": {},
    "ocs": {},
    "sre2l": {"squeeze_epochs": 1, "iterations": 3},
}


@pytest.mark.parametrize("kind", sorted(set(methods.names()) - {"local"}))
def test_every_method_learns_the_same_in_parts(kind: str) -> None:
    """Batches of 16 as four times 4; nothing but the order of sums differs."""
    found, wanted = (sent(kind, "none", how) for how in ({"at_once": 4}, {}))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rule", OPTIONS)
def test_every_rule_that_trains_a_network_chooses_the_same_in_parts(rule: str) -> None:
    """What it has chosen is learnt on the second task."""
    memory = kept(3, rule=rule, options=OPTIONS[rule])
    how: dict[str, Any] = {"memory": memory, "weight": 1.0}
    found, wanted = (sent("replay", "none", each, **how) for each in ({"at_once": 4}, {}))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", sorted(set(methods.names()) - {"local"}))
def test_every_method_learns_in_bfloat16(kind: str) -> None:
    """With batch normalisation, which is a mixture of types."""
    found, wanted = (sent(kind, "batch", how) for how in ({"precision": "bfloat16"}, {}))
    assert found.isfinite().all() and 0 < apart(found, wanted) < 0.05


@pytest.mark.parametrize("rule", OPTIONS)
def test_every_rule_that_trains_a_network_does_so_in_bfloat16(rule: str) -> None:
    memory = kept(3, rule=rule, options=OPTIONS[rule])
    half = {"precision": "bfloat16", "at_once": 5}
    assert sent("replay", "batch", half, memory=memory, weight=1.0).isfinite().all()


@pytest.mark.parametrize(("norm", "groups"), [("none", [3, 3]), ("batch", [2, 2, 2])])
def test_moments_that_sre2l_matches_are_those_of_all_pictures_made_at_a_time(
    norm: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks see a part of a batch: with batch normalisation no more are made than pass at once."""
    made, recover = list[int](), sre2l.recover

    def counted(task: Any, labels: Tensor) -> Tensor:
        made.append(len(labels))
        return recover(task, labels)

    monkeypatch.setattr(sre2l, "recover", counted)
    memory = kept(3, rule="sre2l", options={**OPTIONS["sre2l"], "together": 5})
    sent("replay", norm, {"at_once": 2}, memory=memory, weight=1.0)
    assert made == 2 * groups  # six pictures of each of two tasks


def test_what_meta_networks_see_is_not_rounded_twice() -> None:
    """Maps of 3 and of 3 + 1/64 are numbers in bfloat16, their mean is none."""
    cell = tiny("fedl2p", network={**BATCH_NORM, "precision": "bfloat16"})
    work = small.worker(cell, plan(cell)).work
    convolution, norm = work.classifier.encoder[0], work.classifier.encoder[1]
    convolution.weight.data.zero_()
    convolution.bias.data.copy_(torch.tensor([3.0, 3.015625, 3.0, 3.015625]))
    seen = personal.look(work, work.classifier.norms, torch.arange(8))
    assert float(seen.inputs[2]) == pytest.approx(3.0078125, abs=1e-4)  # the mean of what it gets
    assert norm.running_mean.tolist() == 4 * [0.0]


WHOLE: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "replay": {"memory": kept(5)},
    "stamp": {"memory": {"per_class": 5, "space": "feature"}},
}


def trained(kind: str, how: dict[str, Any], **options: Any) -> small.Record:
    """The record of a whole training on 20 pictures a class."""
    network = {**BATCH_NORM, "norm": "none", **how}
    return run(whole(kind, network=network, split=FEW, **WHOLE[kind]), **options)


def weights(record: small.Record) -> np.ndarray:
    """All final weights in one vector."""
    return np.concatenate([value.ravel() for value in record.weights.values()])


@pytest.mark.parametrize("kind", ["fedavg", "replay"])
def test_a_whole_training_in_parts_is_the_same_but_for_rounding(kind: str) -> None:
    found, wanted = (trained(kind, how) for how in ({"at_once": 4}, {}))
    np.testing.assert_allclose(weights(found), weights(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_training_by_parts_as_large_as_any_batch_is_the_same_bit_for_bit(kind: str) -> None:
    """Replay adds as many remembered pictures to the 16 of a batch; a match looks at 20 a task."""
    found, wanted = (trained(kind, how) for how in ({"at_once": 40}, {}))
    small.assert_same(found, wanted)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_training_in_bfloat16_is_another_but_not_far(kind: str) -> None:
    found, wanted = (trained(kind, how) for how in ({"precision": "bfloat16"}, {}))
    away = np.linalg.norm(weights(found) - weights(wanted)) / np.linalg.norm(weights(wanted))
    assert 1e-4 < away < 0.1
    again = trained(kind, {"precision": "bfloat16"})
    small.assert_same(found, again)


@pytest.mark.parametrize("how", [{"precision": "bfloat16"}, {"at_once": 4}])
def test_another_precision_or_other_parts_are_another_experiment(how: Any, tmp_path: Path) -> None:
    """A checkpoint of one is not taken up by the other, and the record says which it was."""
    first, second = (tiny(network={**BATCH_NORM, **each}, split=FEW) for each in ({}, how))
    before, after = (cell.identity(plan(cell), "cpu") for cell in (first, second))
    assert {key for key in before if before[key] != after[key]} == {"parameters"}
    run(first, resume=tmp_path)
    with pytest.warns(UserWarning, match="belongs to other parameters"):
        record = run(second, resume=tmp_path)
    small.assert_same(record, run(second))
    assert how.items() <= record.about["setting"]["network"].items()


def test_bfloat16_is_as_accurate_as_float32_but_for_chance() -> None:
    """Three seeds; those of one precision differ by a deviation of a hundredth."""

    def finals(how: dict[str, Any]) -> list[tuple[float, float]]:
        cell = tiny(network={**small.NETWORK, **how}, split={"order": "common"})
        records = [run(cell, plan(cell, seed)) for seed in range(3)]
        return [
            (np.nanmean(r.accuracy(scoring="task")[-1]), r.history[-1]["loss"]) for r in records
        ]

    half, single = (np.array(finals(how)) for how in ({"precision": "bfloat16"}, {}))  # [seeds, 2]
    assert single[:, 0].mean() > 0.9 and abs((half - single)[:, 0].mean()) < 0.02
    assert (half[:, 1] != single[:, 1]).all()  # the losses: it is not the same training
