"""Sources of data sets beside those of stamp_core, one file each."""
