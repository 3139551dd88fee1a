"""Office-31: 31 classes of objects in the images of three domains.

The layout is <domain>/<class>/* or, as distributed, <domain>/images/<class>/*.
"""

from dataclasses import dataclass

from stamp_core.config.decode import require_at_least, require_inside
from stamp_core.core import paths
from stamp_core.data.sources.folder import (
    check_domains,
    check_test_share,
    divide,
    find_images,
    make_listing,
)
from stamp_core.data.store.decoding import Listing

_CLASSES = 31


@dataclass(frozen=True)
class Options:
    """Parameters of the source."""

    root: str = "office31"  # in data/raw, or an absolute path
    size: int = 300  # pixels per side
    domains: tuple[str, ...] = ("amazon", "dslr", "webcam")  # some of them, in this order
    test_share: float = 0.25  # of each class of a domain

    def __post_init__(self) -> None:
        """Refuse images without pixels, an empty train or test set, and equal domains."""
        require_at_least(self, 1, "size")
        require_inside(self, "root")
        check_test_share(self.test_share)
        check_domains(self.domains)


def listing(options: Options) -> Listing:
    """The images of all classes in each domain."""
    root = paths.RAW / options.root
    inner = [f"{name}/images" for name in options.domains]
    folders = [path if (root / path).is_dir() else path.removesuffix("/images") for path in inner]
    found = find_images(root, folders, "<domain>/<class>/* or <domain>/images/<class>/*")
    if (count := len(found[0])) != _CLASSES:
        raise ValueError(f"{root / folders[0]} holds {count} classes; it must hold {_CLASSES}")
    train, test = divide(root, found, options.test_share)
    return make_listing(root, train, test, options.domains, options.size)
