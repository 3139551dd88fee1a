"""Images on disk: the decoded cache, decoding of image files, downloads with checksums.
Part of data."""
