"""The server of one run: what it is handed of the clients' replies, and its next state."""

from stamp_core.config.decode import invalid
from stamp_core.core.seeding import generator
from stamp_core.engine.privacy import PURPOSE, refused, share_noisy_mean
from stamp_core.methods.base.method import Log, Method, Reply, State
from stamp_core.models.sealed import SingleUploadError


class Aggregator:
    """Aggregates by a method; privacy and secure sums hide single uploads from it."""

    def __init__(self, method: Method, preset: str, seed: int) -> None:
        self.method = method
        self.preset = preset
        self.seed = seed
        self.privacy = method.runtime.setting.privacy
        if self.privacy and self.privacy.is_central and not method.averages:
            raise refused(method, "averages on the server, as privacy.noise is central")

    def gather(self, replies: list[Reply], log: Log) -> list[Reply]:
        """The replies that the server is handed, on the device where there is room for all."""
        return self.method.to_device(self.method.seal(replies, log))

    def aggregate(
        self, server: State, replies: list[Reply], address: tuple[int, int], log: Log
    ) -> State:
        """The server's next state at (experience, round), of the noisy mean if noise is central."""
        sent = [reply for reply in replies if reply.message]
        try:
            if self.privacy and self.privacy.is_central and sent:
                draw = generator(self.seed, *address, PURPOSE)
                replies = share_noisy_mean(self.method.runtime, self.privacy, sent, draw)
            return self.method.aggregate(server, replies, log)
        except SingleUploadError as error:
            right = f"false for {self.preset}, whose server reads single uploads: {error}"
            raise invalid("training.secure_sums", True, right) from error
