"""The server of one run: what it is handed of the clients' replies, and its next state."""

from stamp_core.config.decode import invalid
from stamp_core.core.seeding import generator
from stamp_core.engine.privacy import PURPOSE, refused, share_mean, share_noisy_mean, with_model
from stamp_core.engine.trees import flatten, tree_digest
from stamp_core.methods.base.method import Log, Method, Reply, State
from stamp_core.methods.base.secure_sums import seal_replies
from stamp_core.models.sealed import SingleUploadError


class Server:
    """Aggregates by a method; privacy and secure sums of the setting hide single uploads from it.

    Its states are given and returned. `preset` is named where a method is refused.
    """

    def __init__(self, method: Method, preset: str, seed: int) -> None:
        self.method = method
        self.preset = preset
        self.seed = seed
        self.privacy = method.runtime.setting.privacy
        self.averages = False  # whether the method was seen to average

    def gather(self, server: State, replies: list[Reply], log: Log) -> list[Reply]:
        """The replies that the server is handed, on the device where there is room for all."""
        if self.privacy and self.privacy.is_central:
            self._require_averaging(server, replies)
        return self.method.gather(seal_replies(self.method, replies, log))

    def aggregate(
        self, server: State, replies: list[Reply], place: tuple[int, int], log: Log
    ) -> State:
        """The server's next state; with central noise it comes from the noisy mean alone.

        Refused where a method reads what secure sums hide. `place` is experience and round.
        """
        sent = [reply for reply in replies if reply.message]
        try:
            if self.privacy and self.privacy.is_central and sent:
                draw = generator(self.seed, *place, PURPOSE)
                replies = share_noisy_mean(self.method.runtime, self.privacy, sent, draw)
            return self.method.aggregate(server, replies, log)
        except SingleUploadError as error:
            right = f"false for {self.preset}, whose server reads single uploads: {error}"
            raise invalid("training.secure_sums", True, right) from error

    def _require_averaging(self, server: State, replies: list[Reply]) -> None:
        """Refuse a method whose server makes other use of several models than of their mean."""
        sent = [reply for reply in replies if reply.message]
        if self.averages or len(sent) < 2:
            return
        equal = [with_model(reply, reply.message["parameters"]) for reply in sent]
        states = [
            self.method.aggregate(server, each, Log())
            for each in (equal, share_mean(self.method.runtime, sent))
        ]
        each, shared = (tree_digest(*flatten(state)) for state in states)
        if each != shared:
            raise refused(self.method, "averages on the server, as privacy.noise is central")
        self.averages = True
