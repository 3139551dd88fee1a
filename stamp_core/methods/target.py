"""TARGET (Zhang et al., 2023): distillation on images synthesised from the last global model."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stamp_core.config.decode import invalid, require_above
from stamp_core.methods.base.inversion import BETAS, Inversion, InversionParams, Synthesis
from stamp_core.methods.base.method import Log, State
from stamp_core.models.generators import ImageGenerator, build_seeded


@dataclass(frozen=True)
class TargetParams(InversionParams):
    """How images are synthesised and used; the defaults are those published for CIFAR-100."""

    latent_lr: float = 0.01  # of Adam on the generator's inputs

    def __post_init__(self) -> None:
        """Refuse a student that would never be trained."""
        super().__post_init__()
        require_above(self, 0, "latent_lr")
        if self.adversarial_weight and self.warmup >= self.saved_rounds:
            rounds = (
                f"below {self.saved_rounds}, the rounds that images / synthesis_batch_size need"
            )
            raise invalid("warmup", self.warmup, rounds)


class MetaSynthesis(Synthesis):
    """Every round trains a copy of the meta-generator together with its inputs.

    The sum of the copy's gradients is the gradient of the meta-generator: first-order MAML.
    """

    def __init__(self, method: Inversion, server: State, log: Log) -> None:
        super().__init__(method, server, log)
        self.meta = self.generator.parameters.clone()  # [G]
        self.meta.grad = torch.zeros_like(self.meta)
        lr = self.params.generator_lr * self.params.generator_steps
        self.meta_adam = torch.optim.Adam([self.meta], lr, BETAS)

    def new_generator(self, server: State, *seed: int) -> nn.Module:
        """A generator whose inputs are noise."""
        sizes = self.runtime.shape, self.params.latent, self.params.generator_width
        return build_seeded(partial(ImageGenerator, *sizes), *seed, "generator")

    def start_round(self, targets: Tensor) -> tuple[Tensor, torch.optim.Optimizer]:
        """New noise, which is trained too, and a copy of the meta-generator."""
        self.generator.load(self.meta)
        self.meta_adam.zero_grad(set_to_none=False)
        noise = torch.randn(len(targets), self.params.latent, generator=self.draw)
        latent = noise.to(self.runtime.device).requires_grad_()
        groups: list[dict[str, Any]] = [
            {"params": [self.generator.parameters]},
            {"params": [latent], "lr": self.params.latent_lr},
        ]
        return latent, torch.optim.Adam(groups, self.params.generator_lr, BETAS)

    def after_backward(self) -> None:
        """Add the gradient of a step to that of the meta-generator."""
        assert self.meta.grad is not None
        self.meta.grad.add_(self.generator.gradients)

    def end_round(self) -> None:
        """One step of the meta-generator."""
        super().end_round()
        self.meta_adam.step()


class Target(Inversion):
    """FedAvg with distillation from the last model on images synthesised from it."""

    Params: ClassVar = TargetParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"kd": 0.0, "ce_classes": "all"}
    synthesis = MetaSynthesis
