"""torchvision, imported here and nowhere else in the project."""

from typing import Any

import torch

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
KEPT: list[torch.library.Library] = []  # declared operators live as long as this reference


def load() -> Any:
    """The torchvision module, also beside a CPU build of torch.

    Its compiled operators need CUDA libraries; without them the import fails as two operators
    that it describes do not exist. Declared by name only, they let everything else work; calling
    them still fails. They must not be declared first: that clashes with the real ones.
    """
    try:
        import torchvision
    except RuntimeError:
        KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        KEPT[0].define("nms" + SIGNATURE)
        KEPT[0].define("qnms" + SIGNATURE)
        import torchvision
    return torchvision
