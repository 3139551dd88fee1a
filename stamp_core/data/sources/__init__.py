"""The sources of data sets, one file each, found by its name; docs/data_source.md says how."""

SETS = dict.fromkeys(  # sources that share a file, with its name
    ("cifar10", "cifar100", "mnist", "emnist_digits", "usps", "svhn"), "torchvision_sets"
)
