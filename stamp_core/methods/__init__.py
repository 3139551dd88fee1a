"""The methods, one file each, found by its name; what several share is in `base`."""
