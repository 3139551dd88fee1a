"""Selection rules beside those of stamp_core, one file each."""
