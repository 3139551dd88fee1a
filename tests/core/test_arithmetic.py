"""The pins, in processes of their own: the libraries read them when they are imported."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from stamp_core.core.arithmetic import CHOICE, DIGESTS, PINS, arithmetic, distances, probe, sqrt
from stamp_core.core.paths import ROOT

SAY = "import stamp_core; from stamp_core.core.arithmetic import arithmetic; print(arithmetic())"
OTHERS = {  # what each library takes on another kind of CPU, or without being asked
    "NumPy": ("NPY_DISABLE_CPU_FEATURES", "X86_V3"),
    "OpenBLAS": ("OPENBLAS_CORETYPE", "Prescott"),
}


def in_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in (*PINS, CHOICE)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env={**clean, **variables}, capture_output=True, text=True
    )


def test_these_tests_compute_with_the_published_bits():
    assert probe() == DIGESTS and arithmetic() == "pinned"


@pytest.mark.parametrize("library", OTHERS)
def test_numpy_that_was_imported_before_the_pins_is_noticed(library):
    name, value = OTHERS[library]
    done = in_process(f"import numpy; {SAY}", **{name: value})
    assert done.stdout == "machine\n"
    named, found, cure = done.stderr.partition(" has other last digits here")
    assert found and library in named and "make lab" in cure  # others too, by the kind of CPU
    assert in_process(SAY, **{name: value}).stdout == "pinned\n"  # the package comes first


def test_the_machine_chooses_when_it_is_told_to():
    done = in_process(f"{SAY}; import os; print(*os.environ)", **{CHOICE: "machine"})
    word, names = done.stdout.splitlines()
    assert word == "machine" and not done.stderr and not PINS.keys() & {*names.split()}


def test_another_word_is_refused():
    done = in_process(SAY, **{CHOICE: "fast"})
    assert f"{CHOICE} is 'fast': it must be 'pinned' or 'machine'" in done.stderr


def test_a_shell_sets_what_the_package_sets():
    command = [sys.executable, "stamp_core/core/arithmetic.py"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert dict(pair.split("=", 1) for pair in printed.split()) == PINS


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_roots_are_ieee_roots_and_quotients(kind):
    x = torch.rand(10007, dtype=kind, generator=torch.Generator().manual_seed(0)) * 100
    one = np.ones((), dtype=x.numpy().dtype)
    assert np.array_equal(sqrt(x).numpy(), one / (one / np.sqrt(x.numpy())))
    assert sqrt(torch.zeros(3, dtype=kind)).tolist() == [0, 0, 0]
    near, far = torch.zeros(2, 5, dtype=kind), torch.ones(3, 5, dtype=kind)
    assert torch.allclose(distances(near, far), sqrt(torch.full((2, 3), 5.0, dtype=kind)))
