"""A federation of machines through Flower: the engine trains, clients stay on their nodes."""

from importlib.util import find_spec

if not find_spec("flwr"):
    text = "a federation needs Flower: run `pip install -e workbench[federation]`"
    raise RuntimeError(text)
