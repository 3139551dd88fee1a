"""A Ray cluster of two nodes on this machine."""

import os

import pytest
from ray.cluster_utils import Cluster

from stamp_core.core.paths import ROOT


@pytest.fixture(scope="session", autouse=True)
def paths_of_workers():
    """Every job of a cluster imports the project and what the tests share."""
    with pytest.MonkeyPatch.context() as patch:
        paths = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        nodes.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        nodes.shutdown()
