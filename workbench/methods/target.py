"""TARGET (Zhang et al., 2023): distillation on images synthesised from the last global model."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import Positive
from stamp_core.methods.base.method import Log
from stamp_core.models.flat import FlatModel
from workbench.adam import FlatAdam
from workbench.methods.base.data_free import DataFree, DataFreeParams
from workbench.methods.base.generators import BETAS, ImageGenerator, build_seeded
from workbench.methods.base.synthesis import Source, Synthesis


@dataclass(frozen=True)
class TargetParams(DataFreeParams):
    """How images are synthesised and used; the defaults are those published for CIFAR-100."""

    latent_lr: Positive = 0.01  # of Adam on the generator's inputs

    def __post_init__(self) -> None:
        if self.adversarial_weight and self.warmup >= self.saved_rounds:
            rounds = "the rounds that images / synthesis_batch_size need"
            raise invalid("warmup", self.warmup, f"below {self.saved_rounds}, {rounds}")


class MetaSynthesis(Synthesis):
    """Every round trains a copy of the meta-generator with its inputs: first-order MAML."""

    def __init__(
        self, runtime: ClientRuntime, params: TargetParams, source: Source, log: Log
    ) -> None:
        sizes = runtime.shape, params.latent, params.generator_width
        build = partial(ImageGenerator, *sizes)
        both = (build_seeded(build, *source.seed, "generator") for _ in range(2))
        super().__init__(runtime, params, source, next(both), log)
        self.meta = FlatModel(next(both).to(runtime.device))
        lr = params.generator_lr * params.generator_steps
        self.meta_adam = FlatAdam(self.meta, lr, betas=BETAS)

    def start_round(self, targets: Tensor) -> tuple[Tensor, list[FlatAdam]]:
        self.generator.load(self.meta.parameters)
        self.meta.gradients.zero_()
        noise = torch.randn(len(targets), self.params.latent, generator=self.draw)
        latent = FlatModel(nn.ParameterList([noise.to(self.runtime.device)]))
        adam = FlatAdam(self.generator, self.params.generator_lr, betas=BETAS)
        return latent.tensors[0], [adam, FlatAdam(latent, self.params.latent_lr, betas=BETAS)]

    def after_backward(self) -> None:
        self.meta.gradients.add_(self.generator.gradients)

    def end_round(self) -> None:
        super().end_round()
        self.meta_adam.step()


class Target(DataFree):
    """FedAvg with distillation from the last model on images synthesised from it."""

    Params: ClassVar = TargetParams
    fedavg_equivalent: ClassVar = {"kd": 0.0, "ce_classes": "all"}

    def synthesis(self, source: Source, server: Any, log: Log) -> Synthesis:
        return MetaSynthesis(self.runtime, self.params, source, log)
