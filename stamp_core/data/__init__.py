"""Data sets: sources, one file each, their images on disk, and which client learns what when."""
