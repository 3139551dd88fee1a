"""Data sets and their split: dataset (loading), split (which client learns which classes when),
cache and decoding, sources (one file per data set). May import core, config and results."""
