"""One process that trains and evaluates clients: its workspace, its method, all plans."""

import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from stamp_core.client.diagnostics import temporal_angles
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.client.scoring import Part, count_correct, local_scores, mask_scores, score
from stamp_core.config.schema import Setting
from stamp_core.core.devices import device_peak, has_own_memory, reset_device_peak
from stamp_core.data.plan import Plans
from stamp_core.engine.checkpoint import FLUSH_AFTER, state_store
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.privacy import protect_upload
from stamp_core.engine.trees import Stored
from stamp_core.methods.base.method import LocalModel, Message, Reply, State

StateOrRef = State | Stored  # a client's state, or its name in a store
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")  # in torch's errors


@dataclass(frozen=True)
class ClientResult:
    """A client's reply with what its round cost and, after a last round, its model's scores."""

    reply: Reply  # without its state if that is stored, and without the local model
    state: StateOrRef
    scores: Tensor | None  # [scorings, 1, T] of the model after local training
    angles: dict[str, float]  # between the gradients of the client's tasks, if recorded
    seconds: float
    memory: int  # bytes, peak of this process so far
    gpu: int  # bytes, peak of the client round on the GPU


class Worker:
    """One process's workspace, method and plans; `resume` is where clients' states are kept."""

    def __init__(
        self, experiment: Experiment, plans: Plans, device: str, resume: Path | None = None
    ) -> None:
        self.runtime = ClientRuntime(experiment.setting, experiment.dataset(), device)
        self.own_memory = has_own_memory(self.runtime.device)
        self.method = experiment.kind(experiment.params, self.runtime)
        self.plans = plans
        self.stores = {seed: state_store(resume, experiment.name, seed) for seed in plans if resume}
        self.lock = threading.Lock()

    def initial_states(self, seed: int) -> tuple[State, list[StateOrRef], int, int]:
        """The first states of the server and of every client, and the bytes sent down and up."""
        self.runtime.start_round(0)
        server, clients, down, up = self.method.initial_states(self.plans[seed])
        return server, [self.keep_state(seed, each, flush=False) for each in clients], down, up

    def load_state(self, seed: int, kept: StateOrRef) -> State:
        return self.stores[seed].get(kept.digest) if isinstance(kept, Stored) else kept

    def keep_state(self, seed: int, state: State, flush: bool) -> StateOrRef:
        """A client's state, on the disk where there is a folder that is not full."""
        try:
            return self.stores[seed].put(state, flush) if seed in self.stores else state
        except OSError:  # the checkpoint tries once more, and warns
            return state

    def train_client(self, round_id: RoundId, state: StateOrRef, message: Message) -> ClientResult:
        """One client round, with the scores and angles of its local model after a last round."""
        seed = round_id.seed
        loaded = self.load_state(seed, state)
        client_round = self.method.client_round(round_id, self.plans[seed], loaded, message)
        self.runtime.start_round(round_id.round)
        if self.own_memory:
            reset_device_peak(self.runtime.device)
        start = time.perf_counter()
        reply = self.method.train_client(client_round)
        for name, tensor in reply.message.items():
            if tensor.device.type != "cpu":  # in another process there is no such tensor
                raise TypeError(f"message.{name} is on {tensor.device}; it must be on the CPU")
        if (privacy := self.runtime.setting.privacy) is not None:
            reply = protect_upload(self.method, privacy, client_round, reply)
        seconds = time.perf_counter() - start
        peak = device_peak(self.runtime.device) if self.own_memory else 0
        scores, angles = self.diagnose(round_id, reply.local) if reply.local else (None, {})
        kept = self.keep_state(seed, reply.state, seconds > FLUSH_AFTER)
        own = {} if isinstance(kept, Stored) else reply.state
        reply = replace(reply, state=own, local=None)
        return ClientResult(reply, kept, scores, angles, seconds, peak_memory(), peak)

    def diagnose(
        self, round_id: RoundId, local: LocalModel
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Scores and angles of the model after local training, where the method has them."""
        plan = self.plans[round_id.seed]
        models = self.method.models
        recorded = self.runtime.setting.diagnostics
        scores = None
        self.runtime.model.load(*local)
        if "local" in models:
            scores = local_scores(self.runtime, plan, round_id.client, round_id.experience)
        if not recorded.angles or models == ("global",):  # joint training: no client has tasks
            return scores, {}
        return scores, temporal_angles(self.runtime, plan, round_id, recorded.displacements)

    def evaluate(self, seed: int, experience: int, message: Message, part: Part) -> Tensor:
        """Correct predictions for a part of the tests, with masks scores.  # [scorings, U, T]"""
        plan = self.plans[seed]
        self.runtime.model.load(message["parameters"], message["buffers"])
        clients = list(range(len(plan.clients)))
        if self.runtime.dataset.masks:
            return mask_scores(self.runtime, plan, clients, experience)
        return count_correct(self.runtime, plan, clients, experience, True, part)

    def extract_features(self, message: Message, indices: Tensor) -> Tensor:
        """Features of some test images under the model in `message`.  # float16 [n, D]"""
        self.runtime.model.load(message["parameters"], message["buffers"])
        images = self.runtime.test_images(indices)
        return self.runtime.outputs(images, self.runtime.classifier.encode).half()

    def evaluate_client(
        self,
        round_id: RoundId,
        state: StateOrRef,
        message: Message,
        personal: bool,
        nearest_mean: bool = True,
    ) -> Tensor:
        """Scores of a personal model, or the global one with own buffers.  # [scorings, 1, T]"""
        plan = self.plans[round_id.seed]
        loaded = self.load_state(round_id.seed, state)
        self.runtime.start_round(round_id.round)
        if personal:
            client_round = self.method.client_round(round_id, plan, loaded, message)
            return self.method.personal_scores(client_round)
        self.runtime.load_received(message, loaded)
        clients = [round_id.client]
        return score(self.runtime, plan, clients, round_id.experience, nearest_mean)


@contextmanager
def explain_memory_errors(setting: Setting) -> Iterator[None]:
    """A context in which an error for lack of memory names the parameter to lower."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"params/settings.yaml: {setting.name}: there is not enough memory for a batch of "
            f"{setting.training.batch_size}: take a smaller network or smaller images, or fewer "
            "workers (STAMP_WORKERS=1); finished rounds are kept"
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error is torch's for lack of memory; on the CPU it has no class of its own."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(word in text for word in OUT_OF_MEMORY)


def peak_memory() -> int:
    """The peak memory of this process in bytes; on Linux getrusage may have its parent's."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
