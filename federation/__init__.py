"""A federation of machines through Flower: the engine trains, clients stay on their nodes."""
