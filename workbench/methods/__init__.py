"""Methods beside those of stamp_core, one file or package each; a new one is a new file here."""
