"""Networks in micro-batches and in bfloat16: what changes, and what must not."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
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

from stamp_core.config.schema import Network
from stamp_core.core.paths import ROOT
from stamp_core.core.seeding import generator
from stamp_core.coresets.learner import per_sample_gradients
from stamp_core.methods.base import registry
from stamp_core.models.networks import Classifier, build_network, set_train_mode
from workbench.methods.fedl2p.meta_networks import layer_statistics
from workbench.selection import sre2l

NORMS = ("none", "group", "batch")
SHAPE = (1, 8, 8)
RESNET: Any = {"kind": "resnet18", "stem": "small", "norm": "group"}
FEW = {"images_per_class": 20}
HALF = {"precision": "bfloat16"}
ROUNDING = 2**-8  # of a number in bfloat16, whose fraction has 8 bits with the hidden one


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As in training: the number of threads changes the order of sums."""
    torch.set_num_threads(1)


def net(norm: Any = "none", **options: Any) -> Classifier:
    """A small convolutional network in training mode."""
    network = Network("cnn", features=8, channels=(4,), norm=norm, **options)
    return build_network(network, SHAPE, 10, seed=0).train()


def batch(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Images of noise, with labels of five classes."""
    return torch.randn(count, *(shape or SHAPE), generator=generator(0)), torch.arange(count) % 5


def slope(network: nn.Module, count: int) -> Tensor:
    """The gradient of the loss on a batch."""
    images, labels = batch(count)
    return small.slope(network, F.cross_entropy(network(images), labels))


def buffers(network: nn.Module) -> Tensor:
    """The running statistics of batch normalisation."""
    return small.flat([value for value in network.buffers() if value.is_floating_point()])


def distance(value: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the expected value."""
    return float(((value - expected).norm() / expected.norm()).detach())


def recorded_sizes(network: Classifier) -> list[int]:
    """A list to which every pass of the encoder appends its number of images."""
    sizes: list[int] = []
    network.encoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    return sizes


# --- micro-batches


@pytest.mark.parametrize(
    ("norm", "micro_batch_size", "tolerance"),
    [("none", 7, 0.0), ("batch", 8, 0.0), ("none", 1, 1e-5), ("group", 3, 1e-5)],
)
def test_micro_batches_have_the_gradient_of_the_batch(
    norm: str, micro_batch_size: int, tolerance: float
) -> None:
    """A single one bit for bit."""
    one, other = net(norm, micro_batch_size=micro_batch_size), net(norm)
    assert distance(slope(one, 7), slope(other, 7)) <= tolerance
    assert torch.equal(buffers(one), buffers(other))


def test_micro_batches_are_of_similar_size_and_computed_again_for_the_gradient() -> None:
    """7 images, at most 3 at a time: 3, 2 and 2, not 3, 3 and a single one."""
    network = net(micro_batch_size=3)
    sizes = recorded_sizes(network)
    loss = network(batch(7)[0]).sum()
    assert sizes == [3, 2, 2]
    loss.backward()
    assert sorted(sizes[3:]) == [2, 2, 3]
    network.eval()
    with torch.no_grad():
        features = network.encode(batch(7)[0])
    assert sizes[6:] == [3, 2, 2] and not features.requires_grad
    torch.testing.assert_close(features, net().eval().encode(batch(7)[0]))


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, HALF])
@pytest.mark.parametrize("norm", NORMS)
def test_an_empty_batch_has_empty_features(norm: str, options: Any) -> None:
    features = net(norm, **options).eval().encode(torch.empty(0, *SHAPE))
    assert features.shape == (0, 8) and features.dtype == torch.float32


@pytest.mark.parametrize(("count", "parts"), [(7, [3, 2, 2]), (3, [2, 1]), (2, [1, 1])])
def test_batch_normalisation_of_micro_batches_is_that_of_smaller_batches(
    count: int, parts: list[int]
) -> None:
    """With the loss of all; computing them again updates no statistics. A single image has no
    variance of its own and is normalised by the running statistics."""
    micro, other = net("batch", micro_batch_size=max(parts)), net("batch")
    images, labels = batch(count)
    logits = []
    for part in images.split(parts):
        set_train_mode(other, update_norms=len(part) > 1)
        logits.append(other(part))
    expected = small.slope(other, F.cross_entropy(torch.cat(logits), labels))
    assert distance(slope(micro, count), expected) < 1e-5
    assert torch.equal(buffers(micro), buffers(other))
    assert distance(expected, slope(net("batch"), count)) > 0.01  # not that of the whole batch
    assert all(norm.training for norm in micro.modules())  # as before


def test_second_derivatives_are_those_of_the_batch() -> None:
    """Each of three gradients computes the micro-batches again, without updating statistics."""

    def flat(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    def hessian_products(network: Classifier) -> Tensor:
        """H 1 + H H 1 of the loss."""
        images, labels = batch(7)
        weights = list(network.parameters())
        first = F.cross_entropy(network(images), labels)
        statistics = buffers(network).clone()
        gradient = flat(grad(first, weights, create_graph=True))
        once = flat(grad(gradient, weights, torch.ones_like(gradient), retain_graph=True))
        twice = flat(grad(gradient, weights, once))
        assert torch.equal(buffers(network), statistics)
        return once + twice

    for norm in ("none", "group"):
        products = hessian_products(net(norm, micro_batch_size=3))
        assert distance(products, hessian_products(net(norm))) < 1e-4
    hessian_products(net("batch", micro_batch_size=3))


def test_with_replaced_parameters_a_batch_passes_whole() -> None:
    """They, and hooks with them, are gone when the gradient is computed."""

    def gradient(network: Classifier) -> Tensor:
        share, (images, labels) = torch.tensor(0.5, requires_grad=True), batch(7)
        values = {name: share * value for name, value in network.named_parameters()}
        layer = dict(network.encoder.named_children())["0"]
        with layer.register_forward_hook(lambda module, args, maps: maps * share):
            loss = F.cross_entropy(functional_call(network, values, (images,)), labels)
        return grad(loss, share)[0]

    network = net(micro_batch_size=3)
    sizes = recorded_sizes(network)
    assert gradient(network).abs() > 1e-3 and sizes == [7]
    assert torch.equal(gradient(network), gradient(net()))


def test_dropout_is_the_same_when_a_micro_batch_is_computed_again() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5))
    network, (images, labels) = Classifier(encoder, 8, 10, micro_batch_size=3).train(), batch(7)

    def loss(encode: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(3)
        return F.cross_entropy(network.head(encode(images)), labels)

    def by_hand(images: Tensor) -> Tensor:
        return torch.cat([encoder(part) for part in images.split([3, 2, 2])])

    expected = small.slope(network, loss(by_hand))
    micro = loss(network.encode)
    state = torch.get_rng_state()
    assert distance(small.slope(network, micro), expected) < 1e-5
    assert torch.equal(torch.get_rng_state(), state)


SCRIPT = """
import torch
from stamp_core.config.schema import Network
from stamp_core.engine.worker import peak_memory
from stamp_core.models.networks import build_network
torch.set_num_threads(1)
images = torch.randn(64, 3, 48, 48)
network = build_network(Network("cnn", features=8, channels=(64,)), (3, 48, 48), 10, 0)
for count, network.micro_batch_size in ((16, 8), (64, 8), (64, None)):
    network(images[:count]).sum().backward()
    print(peak_memory())
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the peak of one process is in Linux's /proc alone",
)
def test_many_micro_batches_take_little_more_memory_than_two() -> None:
    """The maps of 64 images take 32 MB before and after the ReLU; only one micro-batch has its."""
    command, env = [sys.executable, "-c", SCRIPT], {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=env)
    two, eight, whole_batch = map(int, done.stdout.split())
    assert whole_batch - two > 50e6 and eight - two < 0.2 * (whole_batch - two)


# --- bfloat16


def test_features_are_those_of_a_layer_in_bfloat16_by_hand() -> None:
    """Images, weights, bias and product are rounded; the head multiplies in float32."""
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    network, (images, _) = Classifier(encoder, 8, 10, precision="bfloat16"), batch(6)
    weight, bias = (value.bfloat16() for value in encoder[1].parameters())
    expected = F.linear(images.flatten(1).bfloat16(), weight, bias).float()
    assert torch.equal(network.encode(images), expected)
    assert torch.equal(network(images), F.linear(expected, *network.head.parameters()))


@pytest.mark.parametrize("norm", NORMS)
def test_features_loss_weights_and_gradients_stay_in_float32(norm: str) -> None:
    network, types = net(norm, **HALF), list[torch.dtype]()
    first = dict(network.encoder.named_children())["0"]
    first.register_forward_hook(lambda module, args, maps: types.append(maps.dtype))
    network.head.register_forward_pre_hook(lambda module, args: types.append(args[0].dtype))
    (images, labels), single = batch(6), torch.float32
    loss = F.cross_entropy(network(images), labels)
    loss.backward()
    assert types == [torch.bfloat16, single] and loss.dtype == single
    held = [*network.parameters(), *(p.grad for p in network.parameters()), *network.buffers()]
    assert {value.dtype for value in held if value is not None} <= {single, torch.int64}


@pytest.mark.parametrize("norm", NORMS)
def test_features_and_gradients_differ_from_float32_by_rounding(norm: str) -> None:
    """Gradients by more: after rounding a ReLU or a pooling may choose another element."""
    half, single, (images, _) = net(norm, **HALF), net(norm), batch(64)
    with torch.no_grad():
        error = distance(half.encode(images), single.encode(images))
    assert ROUNDING / 16 < error < 4 * ROUNDING
    one, other = slope(half, 64), slope(single, 64)
    assert not torch.equal(one, other)
    assert float(F.cosine_similarity(one, other, dim=0)) > 0.99


@pytest.mark.parametrize("norm", NORMS)
def test_per_sample_gradients_are_computed_in_float32(norm: str) -> None:
    """vmap cannot mix types in batch normalisation; the precision is restored afterwards."""
    half, single, (images, labels) = net(norm, **HALF), net(norm), batch(5)
    gradients = per_sample_gradients(half, images, labels)
    assert torch.equal(gradients, per_sample_gradients(single, images, labels))
    assert half.precision == "bfloat16" and distance(half(images), single(images)) > 0
    alone = [
        small.slope(single, F.cross_entropy(single(image[None]), label[None]))
        for image, label in zip(images, labels, strict=True)
    ]
    torch.testing.assert_close(gradients, torch.stack(alone), rtol=1e-4, atol=1e-6)


# --- methods, selection rules and whole runs


METHODS = sorted(set(registry.method_names()) - {"local"})
RULES: dict[str, dict[str, Any]] = {
    "bcsr": {"batch_size": 20, "outer_steps": 2},
    "csrel": {"reference_epochs": 2, "selection_steps": 5, "train_steps": 2},
    "ocs": {},
    "sre2l": {"squeeze_epochs": 1, "iterations": 3},
}


def sent(kind: str, norm: str, options: dict[str, Any], **params: Any) -> Tensor:
    """All numbers that a client sends after its second task, on 20 images a class."""
    experiment = whole(kind, network={**BATCH_NORM, "norm": norm, **options}, split=FEW, **params)
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    arrived = small.arrived(worker, plan_, 1)
    reply = worker.train_client(arrived, arrived.state, arrived.message).reply
    return small.flat([value.float() for _, value in small.tensors(reply.message)])


def rule(selection: str, **options: Any) -> dict[str, Any]:
    """The parameters of replay with a selection rule that trains a network."""
    memory = kept(3, selection=selection, options={**RULES[selection], **options})
    return {"memory": memory, "weight": 1.0}


EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in METHODS},
    **{selection: ("replay", rule(selection)) for selection in RULES},
}


@pytest.mark.parametrize(("kind", "params"), EVERY.values(), ids=EVERY)
def test_every_method_and_selection_rule_trains_in_micro_batches(
    kind: str, params: dict[str, Any]
) -> None:
    """Batches of 16 as four times 4; only the order of sums differs."""
    micro, expected = (
        sent(kind, "none", options, **params) for options in ({"micro_batch_size": 4}, {})
    )
    torch.testing.assert_close(micro, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "params"), EVERY.values(), ids=EVERY)
def test_every_method_and_selection_rule_trains_in_bfloat16(
    kind: str, params: dict[str, Any]
) -> None:
    """With batch normalisation, which mixes types."""
    half, single = (sent(kind, "batch", options, **params) for options in (HALF, {}))
    assert half.isfinite().all() and distance(half, single) > 0
    assert params or distance(half, single) < 0.05  # a rule may choose other images


@pytest.mark.parametrize(("norm", "groups"), [("none", [3, 3]), ("batch", [2, 2, 2])])
def test_sre2l_matches_statistics_of_whole_groups(
    norm: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks see a micro-batch: with batch normalisation a group is no larger than that."""
    sizes, recover = list[int](), sre2l._recover

    def counted(task: Any, labels: Tensor) -> Tensor:
        sizes.append(len(labels))
        return recover(task, labels)

    monkeypatch.setattr(sre2l, "_recover", counted)
    sent("replay", norm, {"micro_batch_size": 2}, **rule("sre2l", group_size=5))
    assert sizes == 2 * groups  # six images of each of two tasks


def test_statistics_for_meta_networks_are_not_rounded_twice() -> None:
    """Maps of 3 and of 3 + 1/64 are exact in bfloat16, their mean is not."""
    experiment = tiny("fedl2p", network={**BATCH_NORM, **HALF})
    runtime = small.worker(experiment, plan(experiment)).runtime
    convolution, norm = runtime.classifier.encoder[0], runtime.classifier.encoder[1]
    convolution.weight.data.zero_()
    convolution.bias.data.copy_(torch.tensor([3.0, 3.015625, 3.0, 3.015625]))
    statistics = layer_statistics(runtime, runtime.classifier.norms, torch.arange(8))
    assert float(statistics.inputs[2]) == pytest.approx(3.0078125, abs=1e-4)  # a mean
    assert norm.running_mean.tolist() == 4 * [0.0]


WHOLE: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "replay": {"memory": kept(5)},
    "stamp": {"memory": {"exemplars_per_class": 5}},
}


def trained(kind: str, **options: Any) -> small.Record:
    """The record of a whole run on 20 images a class."""
    network = {**BATCH_NORM, "norm": "none", **options}
    return run(whole(kind, network=network, split=FEW, **WHOLE[kind]))


@cache
def plain(kind: str) -> small.Record:
    """The same in float32, and without micro-batches."""
    return trained(kind)


def weights(record: small.Record) -> np.ndarray:
    """All final weights in one vector."""
    return np.concatenate([value.ravel() for value in record.weights.values()])


@pytest.mark.parametrize("kind", WHOLE)
def test_a_run_in_micro_batches_of_whole_batches_is_bit_identical(kind: str) -> None:
    """Replay adds as many exemplars to the 16 of a batch; temporal matching takes 20 of a task."""
    small.assert_same(trained(kind, micro_batch_size=40), plain(kind))


@pytest.mark.parametrize("kind", WHOLE)
def test_a_run_in_bfloat16_is_close_and_reproducible(kind: str) -> None:
    half, single = trained(kind, **HALF), weights(plain(kind))
    assert 1e-4 < np.linalg.norm(weights(half) - single) / np.linalg.norm(single) < 0.1
    small.assert_same(half, trained(kind, **HALF))
