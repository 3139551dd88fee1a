"""Which share of the global update lies in the subspaces that a client protects."""

from stamp_core.client.subspaces import Bases, Layers, share_inside
from stamp_core.methods.base.method import ClientRound, State


def received(client_round: ClientRound) -> State:
    """What a client keeps for `log_drift`: the received model, four bytes per parameter."""
    model = client_round.message["parameters"].clone()
    return {"received": {"parameters": model, "experience": client_round.experience}}


def log_drift(client_round: ClientRound, layers: Layers, bases: Bases) -> None:
    """Log the share of the update since the client's last round, if it had the same bases then."""
    before = client_round.state.get("received")
    if before and before["experience"] == client_round.experience:
        move = client_round.message["parameters"] - before["parameters"]
        basis = next(iter(bases.values()))
        client_round.log.numbers["drift"] = share_inside(move.to(basis.device), layers, bases)
