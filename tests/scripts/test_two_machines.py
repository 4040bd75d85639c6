"""Training over two machines, which are network namespaces, with torchrun on each."""

import re
import subprocess
import sys

import pytest
import two_machines

TIMEOUT = 20  # seconds of the process group


@pytest.mark.slow
def test_two_machines_are_one_and_the_loss_of_one_is_overcome():
    if why := two_machines.why_not():
        pytest.skip(why)
    ran = subprocess.run(
        [sys.executable, two_machines.__file__, "--passes", "4", "--timeout", str(TIMEOUT)],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    same = "the same parameters and charges"
    assert f"two machines, two ranks each: {same}" in ran.stdout
    assert ran.stdout.count(f"restarted from the checkpoint: {same}") == 2
    # the sum goes around a ring of four ranks: 2·3/4 times over each connection
    ratio = float(re.search(r"([0-9.]+) times those of the", ran.stdout)[1])
    assert 1.5 < ratio < 1.6
    killed, unplugged = re.findall(r"after ([0-9.]+) s rank 0 raises (.*)", ran.stdout)
    assert float(killed[0]) < float(unplugged[0]) < 2 * TIMEOUT
    assert all(
        "another rank died, or did not answer in time" in said for _, said in (killed, unplugged)
    )
