"""torchvision, imported here and nowhere else in the project."""

from typing import Any

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARIES: list[torch.library.Library] = []  # declared operators live as long as these


def load_torchvision() -> Any:
    """The torchvision module; the import also works with a CPU build of torch.

    Its compiled operators need CUDA libraries. Without these the import fails, because two
    operators that it registers do not exist. Once they are declared by name, everything else works;
    calling them still fails. Declared before the import, they would clash with the real ones.
    """
    try:
        import torchvision
    except RuntimeError:
        _LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        _LIBRARIES[0].define("nms" + _SIGNATURE)
        _LIBRARIES[0].define("qnms" + _SIGNATURE)
        import torchvision
    return torchvision
