"""GEM (facebookresearch/GradientEpisodicMemory): `project2cone2` of model/gem.py."""

from executed import Execution, draws

from workbench.methods.base.gradient_projection import project_gradient

GEM = Execution("gem", "GEM", "34c6b8e", 1e-6)  # float32 in the released code


def test_the_projection() -> None:
    gradient, past = draws(0, 40), draws(1, 3, 40)
    past[0] -= gradient
    projection = project_gradient(
        gradient, list(past), ridge=GEM.params.ridge, margin=GEM.params.margin
    )
    assert projection.added is not None
    GEM.check({"projected": gradient + projection.added})
