"""MixStyle (KaiyangZhou/mixstyle-release): `MixStyle.forward` of reid/models/mixstyle.py.

Its variances are unbiased, which is most of the difference. Left out: clipping and rounding.
"""

from executed import Execution, draws

from stamp_core.coresets.memory import mix_statistics

MIXSTYLE = Execution("mixstyle", "mixstyle-release", "16f7cf1", 1e-5)


def test_mixed_styles() -> None:
    images = (draws(0, 5, 3, 8, 8) + draws(3, 5, 3, 1, 1)).sigmoid()
    styles, weights = images[draws(1, 5).argsort()], draws(2, 5).sigmoid()
    MIXSTYLE.check({"images": mix_statistics(images, styles, weights)})
