"""The registry against entry points of really installed packages."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvtiers.policies import POLICIES, Policy, Registry
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.registry import DuplicateNameError, UnknownNameError
from kvtiers.tiers import Tier

GROUP = "kvtiers_test.policies"

POLICY_MODULE = """
from kvtiers.policies.lru import LruPolicy

class Mine(LruPolicy):
    name = "mine"

class NotOne:
    pass

mine = Mine([])
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package with a module and entry points on the path, as pip would."""

    def install(package: str, source: str, extras: Sequence[str] = (), **points: str) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}.py").write_text(source)
        metadata = [f"Name: {package}", "Version: 1.0", *(f"Provides-Extra: {e}" for e in extras)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *metadata, ""]))
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        monkeypatch.syspath_prepend(folder)

    yield install
    for name in [m for m, module in sys.modules.items() if _lies_in(module, tmp_path)]:
        del sys.modules[name]


def _lies_in(module: object, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


@pytest.fixture
def registry() -> Registry[Policy]:
    return Registry(GROUP, "policy", Policy)


def test_our_own_policies_come_in_by_entry_points() -> None:
    assert "lru" in POLICIES.names()
    assert POLICIES.get("lru") is LruPolicy
    assert LruPolicy.name == "lru"


def test_a_strangers_policy_is_found_by_name(install, registry) -> None:
    install("theirs", POLICY_MODULE, mine="theirs:Mine", also="theirs:Mine")
    assert registry.names() == ["also", "mine"]
    assert registry.get("mine").name == "mine"


def test_nothing_is_imported_before_it_is_asked_for(install, registry) -> None:
    install("theirs", POLICY_MODULE, mine="theirs:Mine")
    registry.names()
    assert "theirs" not in sys.modules
    registry.get("mine")
    assert "theirs" in sys.modules


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(install, registry) -> None:
    install("theirs", POLICY_MODULE, mine="theirs:Mine", other="theirs:Mine")
    with pytest.raises(UnknownNameError) as caught:
        registry.get("mime")
    assert str(caught.value) == "Unknown policy 'mime'. Known: mine, other. Did you mean 'mine'?"


def test_the_nearest_name_is_found_whatever_its_case(install, registry) -> None:
    install("theirs", POLICY_MODULE, mine="theirs:Mine")
    with pytest.raises(UnknownNameError, match="Did you mean 'mine'"):
        registry.get("MINE")


def test_an_unknown_name_unlike_any_other_gets_no_guess(install, registry) -> None:
    install("theirs", POLICY_MODULE, mine="theirs:Mine")
    with pytest.raises(UnknownNameError) as caught:
        registry.get("zzz")
    assert str(caught.value) == "Unknown policy 'zzz'. Known: mine."


def test_an_unknown_name_says_so_when_nothing_is_installed(registry) -> None:
    with pytest.raises(UnknownNameError, match="Known: none"):
        registry.get("mine")


def test_two_packages_with_one_name_are_both_named(install, registry) -> None:
    install("theirs", POLICY_MODULE, mine="theirs:Mine")
    install("others", POLICY_MODULE, mine="others:Mine")
    for question in (registry.names, lambda: registry.get("mine")):
        with pytest.raises(DuplicateNameError, match="policy named 'mine'") as caught:
            question()
        assert "theirs:Mine (theirs)" in str(caught.value)
        assert "others:Mine (others)" in str(caught.value)


def test_one_package_seen_twice_is_no_conflict(install, registry, tmp_path, monkeypatch) -> None:
    install("theirs", POLICY_MODULE, mine="theirs:Mine")
    copy = tmp_path / "build"
    copy.symlink_to(tmp_path / "theirs")
    monkeypatch.syspath_prepend(copy)
    assert registry.names() == ["mine"]


def test_a_missing_dependency_names_the_extra_that_brings_it(install, registry) -> None:
    install("theirs", "import no_such_package", extras=["mine"], mine="theirs:Mine")
    with pytest.raises(ImportError) as caught:
        registry.get("mine")
    assert str(caught.value) == (
        "The policy 'mine' from theirs:Mine (theirs) needs a package that is not installed: "
        "No module named 'no_such_package'. Try: pip install 'theirs[mine]'."
    )


def test_a_missing_dependency_without_an_extra_gets_no_such_advice(install, registry) -> None:
    install("theirs", "import no_such_package", extras=["more"], mine="theirs:Mine")
    with pytest.raises(ImportError, match="'no_such_package'") as caught:
        registry.get("mine")
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize("target", ["NotOne", "mine"])
def test_what_is_no_subclass_is_refused(install, registry, target) -> None:
    install("theirs", POLICY_MODULE, bad=f"theirs:{target}")
    with pytest.raises(TypeError) as caught:
        registry.get("bad")
    assert f"The policy 'bad' from theirs:{target} (theirs) is not a subclass" in str(caught.value)
    assert "kvtiers.policies.base.Policy" in str(caught.value)


def test_a_name_that_is_missing_from_its_module_names_the_package(install, registry) -> None:
    install("theirs", POLICY_MODULE, gone="theirs:NoSuchClass")
    with pytest.raises(ImportError, match=r"theirs:NoSuchClass \(theirs\)"):
        registry.get("gone")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero."),
        ("raise RuntimeError('no\\n  driver.')", "RuntimeError: no driver."),
        ("raise ValueError", "ValueError."),
    ],
)
def test_a_module_that_raises_is_told_in_one_paragraph(install, registry, source, says) -> None:
    install("theirs", source, mine="theirs:Mine")
    with pytest.raises(ImportError) as caught:
        registry.get("mine")
    assert str(caught.value) == (
        f"The policy 'mine' from theirs:Mine (theirs) cannot be loaded: {says}"
    )


def test_a_class_without_all_methods_is_refused_with_the_ones_it_lacks(install) -> None:
    source = """
from kvtiers.tiers import Tier

class Half(Tier):
    contains = read = write = usage = None
"""
    install("theirs", source, half="theirs:Half")
    with pytest.raises(TypeError) as caught:
        Registry(GROUP, "tier", Tier).get("half")
    assert str(caught.value) == (
        "The tier 'half' from theirs:Half (theirs) lacks methods that every tier must have: "
        "remove, scan."
    )
