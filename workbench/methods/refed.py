"""Re-Fed (Li et al., 2024): a cache of the samples that matter to a personalised model."""

from workbench.methods.base.sample_cache import SampleCache


class ReFed(SampleCache):
    """The samples are cached whose gradients are largest along the informative model."""
