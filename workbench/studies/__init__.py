"""Studies of questions beside the comparison: attacks on uploads, accounting of privacy."""
