"""The sources of data sets: one file each, found by its file name (`data: {source: <file name>}`).

A new source is a new file here; nothing else changes. It defines

- `Options`: a frozen dataclass, the parameters that `data` may hold in addition to `source`;

and either, for images that fit into memory,

- `make(options)`: returns `ImageArrays` (stamp_core.data.images);
- `PACKAGES`: the names of the packages whose versions can change the images;
- `inputs(options)`, only where images come from files: the paths of these files or folders;

or, for image files of any number,

- `listing(options)`: returns a `Listing` (stamp_core.data.decoding) of the files.

A source of published files may also define `expected(options)`, which returns the `Counts`
(stamp_core.data.images) of its images before they are there.

The images are made again when the options, the code, a package or an input file has changed.
"""

SETS = dict.fromkeys(  # sources that share a file, with its name
    ("cifar10", "cifar100", "mnist", "emnist_digits", "usps", "svhn"), "torchvision_sets"
)
