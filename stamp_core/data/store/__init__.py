"""Images on disk: the cache of decoded images, decoding of image files. Part of data."""
