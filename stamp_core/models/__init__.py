"""Networks: an encoder and a linear head over all classes, fresh or with weights from a file."""

from stamp_core.models.networks import ENCODERS, Classifier, build, train_mode
from stamp_core.models.plain import Shape
from stamp_core.models.pretrained import digest

__all__ = ["ENCODERS", "Classifier", "Shape", "build", "digest", "train_mode"]
