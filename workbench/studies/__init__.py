"""Studies beside the comparison: matching in the plane, attacks on uploads, spent privacy."""
