"""The driver of `make repro` and `make paper`, with warm kernels or a cluster, and whole files."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from threading import Event

from stamp_core.config.params import Params
from workbench.workflow.clusters import chosen_cluster, sends_stages
from workbench.workflow.kernels import serve_kernels
from workbench.workflow.lockfile import (
    clear_rwlock,
    copy_sound_files,
    driver_lock,
    drop_gone_stages,
    remove_folders_from_cache,
    restore_damaged_files,
)
from workbench.workflow.repro import Driver, dvc_answer
from workbench.workflow.submit import send_stages


class OperationsDriver(Driver):
    """Works alone on a copy of the project, and leaves lock files that DVC accepts."""

    def run(self, profile: str, setting: str | None, tour: bool) -> int:
        """Run what is out of date once other drivers have ended."""
        with driver_lock():
            clear_rwlock()
            restore_damaged_files()
            remove_folders_from_cache()
            try:
                return super().run(profile, setting, tour)
            except KeyboardInterrupt:
                restore_damaged_files()
                raise

    def environment(self) -> AbstractContextManager[dict[str, str]]:
        """The environment of the stages: with warm kernels here, or one that sends them away."""
        return send_stages() if sends_stages() else serve_kernels()

    @cached_property
    def jobs(self) -> int:
        """The number of stages at a time; without $JOBS on a cluster as many as it has room for."""
        if sends_stages() and not os.environ.get("JOBS"):
            return chosen_cluster().room()
        return super().jobs

    def reproduce(self) -> int:
        """Run what is out of date; after a success the lock file has no other stages."""
        status = super().reproduce()
        if not status:
            drop_gone_stages(set(dvc_answer("stage", "list", "--name-only").split()))
        return status

    def reproduce_settings(self, profile: str, settings: Sequence[str]) -> int:
        """Run settings if this machine, where they run here, suffices for each."""
        from workbench.workflow.estimate import estimate_setting, require_resources  # imports torch

        for setting in settings:
            needs = estimate_setting(setting, profile)
            if not sends_stages():
                require_resources(needs, setting)
        return super().reproduce_settings(profile, settings)

    def provide_images(self, settings: Sequence[str], params: Params) -> None:
        """Make them here only if stages run here: those of ImageNet take hours to decode."""
        if not sends_stages():
            super().provide_images(settings, params)

    def run_chunk(self, stages: Sequence[str], environment: dict[str, str], stop: Event) -> int:
        """Run stages one after the other, then keep a copy of the lock files."""
        status = super().run_chunk(stages, environment, stop)
        copy_sound_files()
        return status
