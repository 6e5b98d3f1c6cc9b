"""What runs without vLLM and torch: policies, tiers, the configuration and the command line.

The simulator, and a policy author's laptop, have neither. The same in an environment
that really lacks them: tests/packaging.
"""

import subprocess
import sys

import bare_imports


def run(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, bare_imports.__file__, *names]
    return subprocess.run(command, capture_output=True, text=True)


def test_no_module_of_tiers_policies_or_tools_imports_the_engine():
    done = run(*bare_imports.BARE, "kvtiers.tools", "kvtiers.connector")
    assert done.returncode == 0, done.stderr


def test_the_check_above_can_fail():
    assert "torch must not be imported here" in run("torch").stderr
