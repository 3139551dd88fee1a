"""Networks: published sizes, seeds, weights from files, and refusals by name."""

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from stamp_core import models, paths, vision
from stamp_core.config import Network, ParameterError, Training
from stamp_core.learner import Learner, gradients
from stamp_core.models import Classifier, Shape
from stamp_core.vectors import Descent, FlatModel, flatten

CODE = Network("cnn", features=512, channels=(32, 64))  # of the paper's public code
RESNET = Network("resnet18", norm="batch")
SMALL_STEM = Network("resnet18", norm="batch", stem="small")
LENET, SWIN = Network("lenet"), Network("swin_t")
SMALL = [
    Network("mlp", features=8),
    Network("cnn", features=8, channels=(4, 6)),
    Network("cnn", features=8, channels=(4, 6), norm="batch"),
    Network("cnn", features=8, channels=(4, 6), norm="group"),
]
ALL: list[tuple[Network, Shape]] = [
    *((network, (3, 20, 20)) for network in SMALL),
    (LENET, (1, 28, 28)),
    (RESNET, (3, 17, 17)),
    (Network("resnet18", norm="group"), (1, 28, 28)),
    (SMALL_STEM, (3, 8, 8)),
    (Network("resnet18", norm="group", stem="small"), (1, 5, 5)),
    (SWIN, (1, 20, 24)),
]


def name(network: object) -> str | None:
    """What a network is called among a test's parameters."""
    if not isinstance(network, Network):
        return None
    return "-".join([network.kind, network.stem, network.norm])


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def described(network: Network, shape: Shape, classes: int) -> Classifier:
    """A network without values."""
    with torch.device("meta"):
        return models.build(network, shape, classes, seed=0)


def weights(network: Network, seed: int) -> torch.Tensor:
    return flatten(list(models.build(network, (3, 20, 20), 5, seed).parameters()))


def examples(shape: Shape, count: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(count, *shape, generator=draw), torch.arange(count)


def trained(network: Network, shape: Shape, seed: int = 0) -> FlatModel:
    """A network over five classes after a step on two pictures."""
    model = FlatModel(models.build(network, shape, 5, seed).train())
    pictures, labels = examples(shape)
    F.cross_entropy(model.module(pictures), labels).backward()
    Descent(model, Training(rounds=1, epochs=1, batch=2, rate=0.01)).step()
    return model


@dataclass(frozen=True)
class Lesson:
    """A network and what it is after a step on two pictures; shared, so only looked at."""

    network: Network
    shape: Shape
    model: FlatModel
    left_chance_alone: bool

    @property
    def pictures(self) -> Tensor:
        return examples(self.shape)[0]

    @property
    def answers(self) -> Tensor:
        return self.model.module.eval()(self.pictures)

    def fresh(self, seed: int) -> Classifier:
        return models.build(self.network, self.shape, 5, seed)


@pytest.fixture(scope="module", params=ALL, ids=lambda param: name(param[0]))
def lesson(request: pytest.FixtureRequest) -> Lesson:
    """Every network after a step."""
    torch.set_num_threads(1)  # as in a training
    before = torch.get_rng_state()
    model = trained(*request.param)
    return Lesson(*request.param, model, torch.equal(torch.get_rng_state(), before))


def recorded(model: FlatModel) -> dict[str, Tensor]:
    """A model's tensors as a run record names them."""
    tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    return {name: value.detach().clone() for name, value in tensors.items()}


def refused(network: Network, shape: Shape = (3, 20, 20)) -> str:
    """The message with which a network over five classes is refused."""
    with pytest.raises(ParameterError) as error:
        models.build(network, shape, 5, seed=0)
    return str(error.value)


# --- sizes


@pytest.mark.parametrize("classes", [10, 31, 100, 1000])
@pytest.mark.parametrize(
    ("network", "shape", "encoder", "per_class"),
    [
        (CODE, (3, 32, 32), 873_408, 513),
        (LENET, (1, 32, 32), 60_856, 85),
        (LENET, (3, 32, 32), 61_156, 85),
        (LENET, (1, 28, 28), 43_576, 85),
        (RESNET, (3, 32, 32), 11_176_512, 513),
        (RESNET, (3, 300, 300), 11_176_512, 513),
        (RESNET, (1, 28, 28), 11_170_240, 513),
        (SMALL_STEM, (3, 32, 32), 11_168_832, 513),
        (Network("resnet18", norm="group"), (3, 32, 32), 11_176_512, 513),
        (SWIN, (3, 224, 224), 27_519_354, 769),
        (SWIN, (1, 224, 224), 27_516_282, 769),
    ],
    ids=name,
)
def test_sizes_are_the_published_ones(
    network: Network, shape: Shape, encoder: int, per_class: int, classes: int
) -> None:
    """The public code's CNN: 3 * 25 * 32 + 32 = 2,432; 32 * 25 * 64 + 64 = 51,264; sides 32 -> 14
    -> 5, so 64 * 25 * 512 + 512 = 819,712. LeNet-5 on one channel: 6 * 26 = 156; 16 * 151 = 2,416;
    120 * 401 = 48,120 (28 x 28: 4 x 4 left, 120 * 257 = 30,840); 84 * 121 = 10,164; two channels
    more are 6 * 50. ResNet-18: 11,689,512 - 1000 * 513; one channel has 2 * 49 * 64 weights less,
    a stem of 3 x 3 has 64 * 3 * (49 - 9) less. Swin-T: 28,288,354 - 1000 * 769; one channel has
    2 * 16 * 96 weights less."""
    made = described(network, shape, classes)
    assert size(made.encoder) == encoder and size(made) == encoder + per_class * classes


@pytest.mark.parametrize("network", [RESNET, SMALL_STEM], ids=name)
def test_buffers_are_those_of_batch_normalisation(network: Network) -> None:
    """The 20 norms of ResNet-18, of 64 to 512 channels, hold 4,800 means and as many variances."""
    model = FlatModel(models.build(network, (3, 32, 32), 10, 0))
    assert len(model.buffers) == 9_600 and model.buffers.dtype is torch.float32


@pytest.mark.parametrize("network", [Network("resnet18", norm="group"), SWIN], ids=name)
def test_without_batch_normalisation_there_are_no_buffers(network: Network) -> None:
    """Swin-T's indices are constants: as buffers they would travel and be averaged."""
    made = described(network, (3, 32, 32), 10)
    kinds = {type(m) for m in made.modules() if "Norm" in type(m).__name__}
    assert kinds == {nn.LayerNorm if network is SWIN else nn.GroupNorm}
    assert not list(made.buffers())


@pytest.mark.parametrize(("network", "head"), [(RESNET, "fc."), (SWIN, "head.")], ids=name)
def test_published_networks_have_torchvisions_tensors(network: Network, head: str) -> None:
    """All but the head, and Swin-T's indices, which are constants."""
    with torch.device("meta"):
        theirs = getattr(vision.load().models, network.kind)().state_dict()
    kept = {k: v.shape for k, v in theirs.items() if not k.endswith("index") and head not in k[:5]}
    ours = described(network, (3, 224, 224), 10).encoder.state_dict()
    assert {k: v.shape for k, v in ours.items()} == kept and len(kept) > 100


@pytest.mark.parametrize(
    ("network", "side", "stem", "last"),
    [(RESNET, 32, 8, 1), (RESNET, 224, 56, 7), (SMALL_STEM, 32, 32, 4), (SMALL_STEM, 28, 28, 4)],
)
def test_stems_of_resnet18(network: Network, side: int, stem: int, last: int) -> None:
    """7 x 7 with stride 2 and pooling: a quarter. 3 x 3: as it is. Three stages halve the rest."""
    net = described(network, (3, side, side), 10).encoder
    early = net.maxpool(net.relu(net.bn1(net.conv1(torch.zeros(2, 3, side, side, device="meta")))))
    assert early.shape == (2, 64, stem, stem)
    late = net.layer4(net.layer3(net.layer2(net.layer1(early))))
    assert late.shape == (2, 512, last, last)


def test_the_stem_is_drawn_like_the_other_convolutions() -> None:
    """Variance 2 / (kernel * channels out): 0.0253 for 49 * 64, 0.0589 for 9 * 64; all others keep
    the values that torchvision drew."""
    published, small = (models.build(n, (3, 32, 32), 10, 0).encoder for n in (RESNET, SMALL_STEM))
    assert published.conv1.weight.std().item() == pytest.approx((2 / 49 / 64) ** 0.5, rel=0.03)
    assert small.conv1.weight.std().item() == pytest.approx((2 / 9 / 64) ** 0.5, rel=0.06)
    assert published.conv1.bias is small.conv1.bias is None
    rest = [flatten(list(net.layer1.parameters())) for net in (published, small)]
    assert torch.equal(*rest) and published.layer1[0].conv1.weight.std() > 0.05


def test_mlp_by_hand() -> None:
    """64 * 7 + 7 hidden, 7 * 10 + 10 in the head; no weight depends on the pictures' layout."""
    network = models.build(Network("mlp", features=7), (1, 8, 8), 10, seed=0)
    assert size(network) == 455 + 80
    assert network.encoder(torch.zeros(3, 1, 8, 8)).shape == (3, 7)


def test_lenet_by_hand() -> None:
    network = models.build(LENET, (1, 32, 32), 10, seed=0)
    kinds = [type(layer).__name__ for layer in network.encoder]
    block = ["Conv2d", "ReLU", "MaxPool2d"]
    assert kinds == [*block, *block, "Flatten", "Linear", "ReLU", "Linear", "ReLU"]
    shapes = [list(p.shape) for p in network.parameters() if p.dim() > 1]
    assert shapes == [[6, 1, 5, 5], [16, 6, 5, 5], [120, 400], [84, 120], [10, 84]]


@pytest.mark.parametrize(
    ("norm", "kind", "groups"), [("batch", nn.BatchNorm2d, None), ("group", nn.GroupNorm, [4, 8])]
)
def test_norms_of_the_cnn(norm: Any, kind: type[nn.Module], groups: list[int] | None) -> None:
    """Group norm takes the greatest number of groups up to 8 that parts the channels evenly."""
    network = models.build(Network("cnn", channels=(12, 16), norm=norm), (3, 20, 20), 5, seed=0)
    found: list[Any] = [m for m in network.modules() if isinstance(m, kind)]
    assert [m.weight.numel() for m in found] == [12, 16]
    assert groups is None or [m.num_groups for m in found] == groups
    assert bool(list(network.buffers())) == (norm == "batch")


# --- what every network can do


def test_logits_are_the_head_on_the_encoders_features(lesson: Lesson) -> None:
    net = lesson.model.module.eval()
    features = net.encoder(lesson.pictures)
    assert features.shape == (2, net.head.weight.shape[1])
    assert lesson.network.kind == "swin_t" or (features >= 0).all()
    logits = features @ net.head.weight.T + net.head.bias
    torch.testing.assert_close(lesson.answers, logits)


def test_a_step_reaches_every_tensor_and_draws_nothing(lesson: Lesson) -> None:
    assert lesson.left_chance_alone
    assert all(p.grad.any() for p in lesson.model.module.parameters())
    fresh = FlatModel(lesson.fresh(0))
    assert not torch.equal(lesson.model.parameters, fresh.parameters)
    assert torch.equal(lesson.model.buffers, fresh.buffers) == (lesson.network.norm != "batch")


def test_two_vectors_hold_all_that_a_network_has_learnt(lesson: Lesson) -> None:
    """Loaded into another network they answer bit for bit; a rule's own may forget its steps."""
    learnt = lesson.model.parameters, lesson.model.buffers
    other = FlatModel(lesson.fresh(1))
    other.load(*learnt)
    assert torch.equal(other.module.eval()(lesson.pictures), lesson.answers)
    rule = Learner(other.module, torch.Tensor.float, *learnt)
    rule.descend(*examples(lesson.shape), [torch.arange(2)], rate=0.1)
    assert not torch.equal(rule.network(lesson.pictures), lesson.answers)
    rule.restore()
    assert torch.equal(rule.network(lesson.pictures), lesson.answers)


def test_how_pictures_lie_in_memory_changes_no_answer(lesson: Lesson) -> None:
    last = lesson.pictures.contiguous(memory_format=torch.channels_last)
    found = lesson.model.module.eval()(last)
    torch.testing.assert_close(found, lesson.answers, rtol=1e-4, atol=1e-5)


def test_the_weights_of_a_run_come_back_bit_for_bit(lesson: Lesson, tmp_path: Path) -> None:
    """Whatever the seed."""
    save_file(recorded(lesson.model), tmp_path / "weights.safetensors")
    network = replace(lesson.network, pretrained=str(tmp_path / "weights.safetensors"))
    model = FlatModel(models.build(network, lesson.shape, 5, seed=9))
    assert torch.equal(model.parameters, lesson.model.parameters)
    assert torch.equal(model.buffers, lesson.model.buffers)
    assert torch.equal(model.module.eval()(lesson.pictures), lesson.answers)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("network", [LENET, SMALL_STEM, SWIN], ids=name)
def test_each_picture_has_a_gradient_of_its_own(network: Network) -> None:
    """In evaluation mode their mean is the gradient of the batch."""
    model, (pictures, labels) = trained(network, (3, 20, 20)), examples((3, 20, 20))
    net = model.module.eval()
    each = gradients(net, pictures, labels)
    whole = torch.autograd.grad(F.cross_entropy(net(pictures), labels), list(net.parameters()))
    torch.testing.assert_close(each.mean(0), flatten(whole), rtol=1e-3, atol=1e-5)


def test_training_swin_t_is_without_chance() -> None:
    """Nothing is dropped: a picture has the same features in training and in evaluation."""
    model, (pictures, _) = models.build(SWIN, (3, 20, 20), 5, seed=0), examples((3, 20, 20), 4)
    assert torch.equal(model.train()(pictures), model.eval()(pictures))


@pytest.mark.parametrize("network", [*SMALL, RESNET], ids=name)
def test_the_seed_alone_decides_the_weights(network: Network) -> None:
    first = weights(network, 1)
    torch.rand(3)
    assert torch.equal(weights(network, 1), first)
    assert (weights(network, 2) != first).float().mean() > 0.8


@pytest.mark.parametrize(("network", "shape"), [ALL[2], ALL[5], ALL[9]], ids=name)
def test_building_leaves_global_randomness_alone(network: Network, shape: Shape) -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    models.build(network, shape, 5, seed=1)
    with pytest.raises(ParameterError):
        models.build(network, (3, 3, 3), 5, seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_a_new_network_has_gathered_nothing() -> None:
    network = models.build(SMALL[2], (3, 20, 20), 5, seed=0)
    means = [b for name, b in network.named_buffers() if name.endswith("running_mean")]
    assert len(means) == 2 and not any(mean.any() for mean in means)
    assert network.training


def test_torchvision_loads_whatever_the_build_of_torch() -> None:
    torchvision = vision.load()
    assert torchvision is vision.load() is sys.modules["torchvision"]
    with torch.device("meta"):  # shapes only
        assert size(torchvision.models.swin_t()) == 28_288_354


# --- pictures and parameters that do not fit


TOO_SMALL = [
    (
        Network("cnn", features=8, channels=(4, 6)),
        (3, 24, 15),
        (3, 24, 16),
        "network.channels is [4, 6]; it must be shorter for (3, 24, 15) pictures",
    ),
    (
        LENET,
        (1, 15, 24),
        (1, 16, 24),
        "network.kind is 'lenet'; it must be another for (1, 15, 24) pictures: "
        "their sides must be at least 16",
    ),
    (
        LENET,
        (1, 3, 3),
        (1, 16, 16),
        "network.kind is 'lenet'; it must be another for (1, 3, 3) pictures: "
        "their sides must be at least 16",
    ),
    (
        RESNET,
        (3, 16, 32),
        (3, 17, 32),
        "network.stem is 'published'; it must be 'small' for (3, 16, 32) pictures: "
        "their sides must be at least 17",
    ),
    (
        RESNET,
        (3, 4, 4),
        (3, 17, 17),
        "network.kind is 'resnet18'; it must be another for (3, 4, 4) pictures: "
        "their sides must be at least 5",
    ),
    (
        SMALL_STEM,
        (1, 8, 4),
        (1, 8, 5),
        "network.kind is 'resnet18'; it must be another for (1, 8, 4) pictures: "
        "their sides must be at least 5",
    ),
    (
        SWIN,
        (3, 16, 32),
        (3, 20, 32),
        "network.kind is 'swin_t'; it must be another for (3, 16, 32) pictures: "
        "their sides must be multiples of 4, at least 20",
    ),
    (
        SWIN,
        (3, 32, 30),
        (3, 32, 28),
        "network.kind is 'swin_t'; it must be another for (3, 32, 30) pictures: "
        "their sides must be multiples of 4, at least 20",
    ),
]


@pytest.mark.parametrize(("network", "shape", "fits", "message"), TOO_SMALL, ids=name)
def test_pictures_that_do_not_fit_are_refused_by_name(
    network: Network, shape: Shape, fits: Shape, message: str
) -> None:
    """Convolutions of 5 x 5 with pooling: 16 -> 12 -> 6 -> 2 -> 1 is a picture still, 15 -> 11 ->
    5 -> 1 -> 0 is none. Before its last stage ResNet-18 has halved sides four times, with the small
    stem twice: 17 -> 9 -> 5 -> 3 -> 2 and 5 -> 3 -> 2 can be halved once more, 16 and 4 -> 1 can
    not. Swin-T parts 20 into 5 patches -> 3 -> 2, and 16 into 4 -> 2 -> 1."""
    assert refused(network, shape) == message
    assert models.build(network, fits, 5, seed=0).eval()(torch.zeros(1, *fits)).shape == (1, 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "mlp", "norm": "group"}, "norm is 'group'; it must be 'none', as kind is 'mlp'"),
        (
            {"kind": "lenet", "norm": "batch"},
            "norm is 'batch'; it must be 'none', as kind is 'lenet'",
        ),
        (
            {"kind": "swin_t", "norm": "batch"},
            "norm is 'batch'; it must be 'none', as kind is 'swin_t'",
        ),
        (
            {"kind": "resnet18"},
            "norm is 'none'; it must be 'batch' or 'group', as kind is 'resnet18'",
        ),
        ({"kind": "cnn", "stem": "small"}, "stem is 'small'; it must be absent, as kind is 'cnn'"),
    ],
)
def test_parameters_that_a_kind_has_not_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        Network(**values)
    assert str(error.value) == message


# --- weights from a file


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of downloads."""
    monkeypatch.setattr(paths, "RAW", tmp_path)
    return tmp_path


def theirs(kind: str, classes: int) -> nn.Module:
    """torchvision's network in evaluation mode; its batch normalisation has gathered something."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        net: nn.Module = getattr(vision.load().models, kind)(num_classes=classes)
    for key, buffer in net.named_buffers():
        if key.endswith(("mean", "var")):
            buffer += 0.5
    return net.eval()


def write(values: dict[str, Tensor], path: Path) -> None:
    save_file(values, path) if path.suffix == ".safetensors" else torch.save(values, path)


def mlp(file: str) -> Network:
    """A network of 12 pixels, 3 features and 5 classes with weights from a file."""
    return Network("mlp", features=3, pretrained=file)


def fitting() -> dict[str, Tensor]:
    """Weights that fit it."""
    names = ("encoder.1.weight", "encoder.1.bias", "head.weight", "head.bias")
    shapes = ((3, 12), (3,), (5, 3), (5,))
    return {k: torch.full(shape, 0.5) for k, shape in zip(names, shapes, strict=True)}


@pytest.mark.parametrize(
    ("kind", "file"), [("resnet18", "w.pth"), ("resnet18", "w.safetensors"), ("swin_t", "w.pth")]
)
def test_torchvisions_weights_give_torchvisions_answers(raw: Path, kind: Any, file: str) -> None:
    net, (pictures, _) = theirs(kind, 5), examples((3, 20, 20))
    write(net.state_dict(), raw / file)
    network = Network(kind, norm="batch" if kind == "resnet18" else "none", pretrained=file)
    made = models.build(network, (3, 20, 20), 5, seed=0).eval()
    assert torch.equal(made(pictures), net(pictures))


@pytest.mark.parametrize("names", ["theirs", "ours", "without a head"])
def test_a_head_over_other_classes_stays_fresh(raw: Path, names: str) -> None:
    """The encoder is the file's whatever the seed; the head is that of the seed."""
    found = recorded(FlatModel(models.build(SMALL_STEM, (3, 8, 8), 7, seed=5)))
    stored = {k: v for k, v in found.items() if k.startswith("encoder.")}
    if names == "theirs":
        found = {k.replace("encoder.", "").replace("head.", "fc."): v for k, v in found.items()}
    torch.save(stored if names == "without a head" else found, raw / "w.pt")
    network = Network("resnet18", norm="batch", stem="small", pretrained="w.pt")
    for seed in (0, 1):
        made, fresh = (
            recorded(FlatModel(models.build(each, (3, 8, 8), 5, seed)))
            for each in (network, SMALL_STEM)
        )
        assert len(stored) == len(made) - 2 == 100
        assert all(torch.equal(made[k], v) for k, v in stored.items())
        assert all(torch.equal(made[k], fresh[k]) for k in ("head.weight", "head.bias"))


def test_numbers_of_another_precision_are_read_as_float32(raw: Path) -> None:
    torch.save({name: value.half() for name, value in fitting().items()}, raw / "w.pth")
    made = models.build(mlp("w.pth"), (3, 2, 2), 5, seed=0)
    assert all(p.dtype is torch.float32 and (p == 0.5).all() for p in made.parameters())


def test_reading_weights_leaves_global_randomness_alone(raw: Path) -> None:
    torch.save(fitting(), raw / "w.pth")
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    models.build(mlp("w.pth"), (3, 2, 2), 5, seed=0)
    assert torch.equal(torch.rand(4), expected)


def without(key: str) -> dict[str, Tensor]:
    return {name: value for name, value in fitting().items() if name != key}


MISFITS: list[tuple[object, str]] = [
    (without("encoder.1.bias"), "lacks 'encoder.1.bias', float32 [3]"),
    (without("head.bias"), "lacks 'head.bias', float32 [5]"),
    (
        {**fitting(), "encoder.3.weight": torch.zeros(3)},
        "has 'encoder.3.weight', which is not in this network",
    ),
    (
        {**fitting(), "encoder.1.weight": torch.zeros(3, 13)},
        "has 'encoder.1.weight' as float32 [3, 13] instead of float32 [3, 12]",
    ),
    (
        {**fitting(), "head.weight": torch.zeros(5, 4)},
        "has 'head.weight' as float32 [5, 4] instead of float32 [5, 3]",
    ),
    (
        {**fitting(), "encoder.1.bias": torch.zeros(3, dtype=torch.int64)},
        "has 'encoder.1.bias' as int64 [3] instead of float32 [3]",
    ),
    (
        {**fitting(), "encoder.1.bias": torch.tensor([0.0, float("nan"), 0.0])},
        "has 'encoder.1.bias' with values that are not finite",
    ),
    ({"epoch": 3, "model": fitting()}, "has 'epoch' instead of tensors by name alone"),
    ({1: torch.zeros(3)}, "has 1 instead of tensors by name alone"),
    ([torch.zeros(3)], "holds list instead of tensors by name"),
]


@pytest.mark.parametrize(("held", "what"), MISFITS, ids=[what for _, what in MISFITS])
def test_weights_that_do_not_fit_are_refused_by_name(raw: Path, held: object, what: str) -> None:
    torch.save(held, raw / "w.pth")
    assert refused(mlp("w.pth"), (3, 2, 2)) == (
        "network.pretrained is 'w.pth'; it must be a file of weights of this mlp: "
        f"{raw / 'w.pth'} {what}"
    )


@pytest.mark.parametrize(
    ("network", "shape", "what"),
    [
        (
            Network("resnet18", norm="batch", pretrained="w.pth"),
            (1, 28, 28),
            "has 'conv1.weight' as float32 [64, 3, 7, 7] instead of float32 [64, 1, 7, 7]",
        ),
        (
            Network("resnet18", norm="batch", stem="small", pretrained="w.pth"),
            (3, 32, 32),
            "has 'conv1.weight' as float32 [64, 3, 7, 7] instead of float32 [64, 3, 3, 3]",
        ),
        (
            Network("resnet18", norm="group", pretrained="w.pth"),
            (3, 32, 32),
            "has 'bn1.running_mean', which is not in this network",
        ),
        (
            Network("swin_t", pretrained="w.pth"),
            (3, 32, 32),
            "lacks 'features.0.0.weight', float32 [96, 3, 4, 4]",
        ),
    ],
    ids=name,
)
def test_weights_of_another_network_are_refused_by_torchvisions_names(
    raw: Path, network: Network, shape: Shape, what: str
) -> None:
    torch.save(theirs("resnet18", 5).state_dict(), raw / "w.pth")
    assert refused(network, shape) == (
        f"network.pretrained is 'w.pth'; it must be a file of weights of this {network.kind}: "
        f"{raw / 'w.pth'} {what}"
    )


class Harmful:
    """A pickle of it makes a folder where it is read without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def damaged(raw: Path) -> Iterator[tuple[str, str]]:
    """Files that hold no weights, and what they should be."""
    for file, kind in (("w.pth", "torch"), ("w.safetensors", "safetensors")):
        write(fitting(), raw / file)
        whole = (raw / file).read_bytes()
        for end in (0, 1, 100, len(whole) // 2, len(whole) - 1):
            (raw / f"{end}{file}").write_bytes(whole[:end])
            yield f"{end}{file}", kind
        (raw / f"text{file}").write_text("<html>no such file</html>")
        yield f"text{file}", kind
    torch.save({"w": Harmful(raw / "harm")}, raw / "harmful.pth")
    yield "harmful.pth", "torch"


def test_damaged_files_are_refused_and_run_no_code(raw: Path) -> None:
    for file, kind in damaged(raw):
        assert refused(mlp(file), (3, 2, 2)) == (
            f"network.pretrained is '{file}'; it must be a whole {kind} file of tensors alone: "
            f"{raw / file} cannot be read as one"
        )
    assert not (raw / "harm").exists()


@pytest.mark.parametrize("file", ["w.pth", "", "/nowhere/w.pth"])
def test_a_missing_file_is_refused(raw: Path, file: str) -> None:
    message = f"network.pretrained is '{file}'; it must be a file: there is none at {raw / file}"
    assert refused(mlp(file), (3, 2, 2)) == message
    with pytest.raises(ParameterError) as error:
        models.digest(mlp(file))
    assert str(error.value) == message


def test_the_digest_is_that_of_the_file(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(content: bytes, time: int) -> bool:
        (raw / "w.pth").write_bytes(content)
        os.utime(raw / "w.pth", ns=(time, time))
        return models.digest(mlp("w.pth")) == hashlib.sha256(content).hexdigest()

    assert models.digest(SMALL[0]) is None
    assert found(b"abc", time=1) and models.digest(mlp(str(raw / "w.pth")))
    monkeypatch.setattr(hashlib, "file_digest", None)  # it is not computed a second time
    assert found(b"abc", time=1)
    monkeypatch.undo()
    monkeypatch.setattr(paths, "RAW", raw)
    assert found(b"abcd", time=1) and found(b"dcba", time=2)
