"""Networks: published sizes, norms, and what a step of training changes."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from small import flat
from torch import Tensor, nn

from stamp_core.config.schema import Network, Training
from stamp_core.coresets.learner import Learner
from stamp_core.models.encoders import Shape
from stamp_core.models.flat import FlatModel, FlatSGD
from stamp_core.models.networks import Classifier, build_network
from workbench.per_sample import per_sample_gradients

CODE = Network("cnn", features=512, channels=(32, 64))  # of the paper's public code
RESNET = Network("resnet18", norm="batch")
SMALL_STEM = Network("resnet18", norm="batch", stem="small")
LENET, SWIN, FCN = Network("lenet"), Network("swin_t"), Network("fcn")
IDENTITY, LAST_BLOCK = Network("identity"), Network("last_block", channels=(10,))
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
    (IDENTITY, (30, 1, 1)),
    (LAST_BLOCK, (6, 4, 3)),
]


def name(network: object) -> str | None:
    if not isinstance(network, Network):
        return None
    return "-".join([network.kind, network.stem, network.norm])


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(network: Network, shape: Shape, classes: int) -> Classifier:
    with torch.device("meta"):
        return build_network(network, shape, classes, seed=0)


def examples(shape: Shape, count: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(count, *shape, generator=draw), torch.arange(count)


def after_a_step(network: Network, shape: Shape) -> FlatModel:
    model = FlatModel(build_network(network, shape, 5, seed=0).train())
    images, labels = examples(shape)
    F.cross_entropy(model.module(images), labels).backward()
    FlatSGD(model, Training(rounds=1, epochs=1, batch_size=2, lr=0.01)).step()
    return model


@dataclass(frozen=True)
class Trained:
    """A network after a step on two images; shared by tests, which must not change it."""

    network: Network
    shape: Shape
    model: FlatModel
    kept_rng_state: bool

    @property
    def images(self) -> Tensor:
        return examples(self.shape)[0]

    @property
    def logits(self) -> Tensor:
        return self.model.module.eval()(self.images)

    def untrained(self, seed: int) -> Classifier:
        return build_network(self.network, self.shape, 5, seed)


@pytest.fixture(scope="module", params=ALL, ids=lambda param: name(param[0]))
def trained(request):
    torch.set_num_threads(1)  # as in a training
    before = torch.get_rng_state()
    model = after_a_step(*request.param)
    return Trained(*request.param, model, torch.equal(torch.get_rng_state(), before))


def test_a_network_for_pixels():
    network, images = build_network(FCN, (1, 32, 32), 6, seed=0), examples((1, 32, 32))[0]
    assert network.encode(images).shape == (2, 64, 16, 16)
    assert network(images).shape == (2, 6, 32, 32)


# --- sizes


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize(
    ("network", "shape", "encoder", "per_class"),
    [
        (Network("mlp", features=7), (1, 8, 8), 64 * 7 + 7, 8),
        (CODE, (3, 32, 32), 873_408, 513),
        (LENET, (1, 32, 32), 60_856, 85),
        (LENET, (1, 28, 28), 43_576, 85),
        (RESNET, (3, 32, 32), 11_176_512, 513),
        (RESNET, (1, 28, 28), 11_170_240, 513),
        (SMALL_STEM, (3, 32, 32), 11_168_832, 513),
        (Network("resnet18", norm="group"), (3, 32, 32), 11_176_512, 513),
        (SWIN, (3, 224, 224), 27_519_354, 769),
        (SWIN, (1, 224, 224), 27_516_282, 769),
        (FCN, (1, 32, 32), 86_944, 65),
        (IDENTITY, (1280, 1, 1), 0, 1281),
        (Network("last_block", channels=(320,)), (192, 4, 4), 1_013_696, 1281),
    ],
    ids=name,
)
def test_sizes_are_the_published_ones(network, shape, encoder, per_class, classes):
    """The public code's CNN: 3 * 25 * 32 + 32 = 2,432; 32 * 25 * 64 + 64 = 51,264; sides 32 -> 14
    -> 5, so 64 * 25 * 512 + 512 = 819,712. LeNet-5 on one channel: 6 * 26 = 156; 16 * 151 = 2,416;
    120 * 401 = 48,120 (28 x 28: 4 x 4 left, 120 * 257 = 30,840); 84 * 121 = 10,164. ResNet-18:
    11,689,512 - 1000 * 513; one channel has 2 * 49 * 64 weights less, a stem of 3 x 3 has
    64 * 3 * (49 - 9) less. Swin-T: 28,288,354 - 1000 * 769; one channel has 2 * 16 * 96 weights
    less. The network for pixels: 160 + 4,640 + 18,496; three dilations of 18,464; 8,256 of the
    joined 128 channels. The last block of EfficientNet-Lite0: 192 * 1152 + 1152; 9 * 1152 + 1152;
    1152 * 320 + 320; 320 * 1280 + 1280."""
    model = on_meta(network, shape, classes)
    assert size(model.encoder) == encoder and size(model) == encoder + per_class * classes


@pytest.mark.parametrize("network", [Network("resnet18", norm="group"), SWIN], ids=name)
def test_without_batch_normalisation_there_are_no_buffers(network):
    """Swin-T's indices are constants: as buffers they would be sent and averaged."""
    model = on_meta(network, (3, 32, 32), 10)
    kinds = {type(m) for m in model.modules() if "Norm" in type(m).__name__}
    assert kinds == {nn.LayerNorm if network is SWIN else nn.GroupNorm}
    assert not list(model.buffers())


def test_the_stem_is_initialised_like_the_other_convolutions():
    """Variance 2 / (kernel * channels out): 0.0253 for 49 * 64, 0.0589 for 9 * 64; all others keep
    the values that torchvision drew."""
    published, small = (build_network(n, (3, 32, 32), 10, 0).encoder for n in (RESNET, SMALL_STEM))
    assert published.conv1.weight.std().item() == pytest.approx((2 / 49 / 64) ** 0.5, rel=0.03)
    assert small.conv1.weight.std().item() == pytest.approx((2 / 9 / 64) ** 0.5, rel=0.06)
    assert published.conv1.bias is small.conv1.bias is None
    rest = [flat(list(net.layer1.parameters())) for net in (published, small)]
    assert torch.equal(*rest) and published.layer1[0].conv1.weight.std() > 0.05


def test_group_norms_of_the_cnn():
    """They have the largest number of groups up to 8 that divides the channels."""
    network = build_network(Network("cnn", channels=(12, 16), norm="group"), (3, 20, 20), 5, seed=0)
    groups = [m.num_groups for m in network.modules() if isinstance(m, nn.GroupNorm)]
    assert groups == [4, 8]


# --- properties of every network


def test_a_step_reaches_every_tensor_and_draws_no_random_number(trained):
    assert trained.kept_rng_state
    assert all(p.grad.any() for p in trained.model.module.parameters())
    untrained = FlatModel(trained.untrained(0))
    assert not torch.equal(trained.model.parameters, untrained.parameters)
    assert torch.equal(trained.model.buffers, untrained.buffers) == (
        trained.network.norm != "batch"
    )


def test_two_vectors_hold_the_whole_state_of_a_network(trained):
    """Another network with them has bit-identical logits; a selection rule can undo its steps."""
    vectors = trained.model.parameters, trained.model.buffers
    other = FlatModel(trained.untrained(1))
    other.load(*vectors)
    assert torch.equal(other.module.eval()(trained.images), trained.logits)
    learner = Learner(other.module, torch.Tensor.float, *vectors)
    learner.train(*examples(trained.shape), [torch.arange(2)], lr=0.1)
    assert not torch.equal(learner.network(trained.images), trained.logits)
    learner.load_client_weights()
    assert torch.equal(learner.network(trained.images), trained.logits)


def test_the_memory_format_of_images_changes_no_logit(trained):
    last = trained.images.contiguous(memory_format=torch.channels_last)
    logits = trained.model.module.eval()(last)
    torch.testing.assert_close(logits, trained.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("network", [SMALL_STEM, SWIN], ids=name)
def test_the_mean_of_per_sample_gradients_is_that_of_the_batch(network):
    model, (images, labels) = after_a_step(network, (3, 20, 20)), examples((3, 20, 20))
    net = model.module.eval()
    each = per_sample_gradients(net, images, labels)
    whole = torch.autograd.grad(F.cross_entropy(net(images), labels), list(net.parameters()))
    torch.testing.assert_close(each.mean(0), flat(whole), rtol=1e-3, atol=1e-5)
