"""Selection rules, one file per rule; base.py is the interface they implement. Part of coresets."""
