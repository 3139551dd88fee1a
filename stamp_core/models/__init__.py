"""Networks as encoder and head, a model as one flat vector with SGD on it."""
