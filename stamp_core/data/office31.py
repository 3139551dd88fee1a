"""Office-31: 31 classes of objects in the pictures of three domains.

In its root lie <domain>/<class>/* or, as it is handed out, <domain>/images/<class>/*.
"""

from dataclasses import dataclass

from stamp_core import paths
from stamp_core.config import at_least
from stamp_core.data import Listing
from stamp_core.data.folder import check_cut, halves, listed, trees

CLASSES = 31


@dataclass(frozen=True)
class Options:
    """What can be chosen."""

    root: str = "office31"  # in data/raw, or an absolute path
    size: int = 300  # pixels a side
    domains: tuple[str, ...] = ("amazon", "dslr", "webcam")  # some of them, in this order
    test_share: float = 0.25  # of each class of a domain

    def __post_init__(self) -> None:
        """Refuse pictures without pixels and domains that cannot be told apart or cut."""
        at_least(self, 1, "size")
        check_cut(self.test_share, self.domains)


def listing(options: Options) -> Listing:
    """The pictures of all classes in each domain."""
    root = paths.RAW / options.root
    inside = [f"{name}/images" for name in options.domains]
    folders = [path if (root / path).is_dir() else path.removesuffix("/images") for path in inside]
    found = trees(root, folders, "<domain>/<class>/* or <domain>/images/<class>/*")
    if len(found[0]) != CLASSES:
        raise ValueError(
            f"{root / folders[0]} holds {len(found[0])} classes; it must hold {CLASSES}"
        )
    cut = halves(root, found, options.test_share)
    return listed(root, *cut, options.domains, options.size, False)
