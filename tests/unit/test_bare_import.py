"""What runs without vLLM and torch: policies, tiers, the configuration and the command line.

The simulator, and a policy author's laptop, have neither.
"""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

BARE = ("kvtiers.policies", "kvtiers.tiers", "kvtiers.connector.config", "kvtiers.tools.cli")

BLOCKED = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "transformers"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
skipped = sys.argv[1]
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    if name in ("kvtiers.policies", "kvtiers.tiers", "kvtiers.tools"):
        for found in pkgutil.iter_modules(module.__path__, name + "."):
            if not found.name.endswith(skipped):
                importlib.import_module(found.name)
"""


def run(python: str | Path, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_no_module_of_tiers_policies_or_tools_imports_the_engine():
    run(sys.executable, "-c", BLOCKED, "nothing", *BARE, "kvtiers.tools", "kvtiers.connector")


def test_the_check_above_can_fail():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "nothing", "torch"], capture_output=True, text=True
    )
    assert "torch must not be imported here" in done.stderr


# Builds a wheel, by way of a source archive, and an environment: half a minute.
@pytest.mark.contract
def test_the_wheel_works_in_an_environment_with_its_own_dependencies_only(tmp_path):
    root = Path(__file__).parents[2]
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", root)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    # Authors run the conformance suites, with pytest.
    run(python, "-c", BLOCKED, ".conformance", *BARE, cwd=tmp_path)
    installed = run(python, "-m", "pip", "list", "--format", "freeze", cwd=tmp_path).stdout
    assert "torch" not in installed
    assert "vllm" not in installed
    done = run(tmp_path / "bare" / "bin" / "kvtiers", "config", cwd=tmp_path)
    assert "tiers[0].type" in done.stdout
