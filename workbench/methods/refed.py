"""Re-Fed (Li et al., 2024): a cache of the samples that matter to a personalised model."""

from workbench.methods.base.sample_cache import SampleCache


class ReFed(SampleCache):
    """The samples are cached whose gradients are largest along the informative model.

    The authors published no code; third parties cache 200 to 2000 samples and have a `pim_lr` of
    0.001 to 0.01.
    """
