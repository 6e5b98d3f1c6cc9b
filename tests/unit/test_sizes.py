import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector.sizes import Capacity, file_system_bytes, format_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("8Gi", 8 * GIB),
        ("0.5GiB", GIB // 2),
        ("20GB", 20 * 10**9),
        ("20 g", 20 * 10**9),
        ("1073741824", GIB),
        (GIB, GIB),
        (8e9, 8 * 10**9),
        ("512 B", 512),
    ],
)
def test_sizes_as_people_write_them(written, nbytes):
    assert Capacity.parse(written).resolve(total_bytes=1) == nbytes


@pytest.mark.parametrize("written", ["25%", " 25 % ", "0.25", ".25", 0.25])
def test_shares_as_people_write_them(written):
    assert Capacity.parse(written).resolve(total_bytes=4000) == 1000


def test_a_whole_share_is_everything_and_not_one_byte():
    assert Capacity.parse(1.0).resolve(4000) == 4000
    assert Capacity.parse("100%").resolve(4000) == 4000


@pytest.mark.parametrize(
    "written",
    ["", "lots", "8XB", "-8GiB", "0", "0%", "150%", 0, -1, 1.5, float("nan"), True, None, []],
)
def test_anything_else_is_refused_with_examples(written):
    with pytest.raises(ValueError, match=r"neither a size above 0 nor a share.*8GiB.*25%"):
        Capacity.parse(written)


@pytest.mark.parametrize(
    "written",
    ["8 GiB extra", "8GiB,", "1.5", "1.5B", "8.", "1_000", "0x10", "9" * 5000, "\u0668GiB"],
)
def test_a_size_is_the_whole_text_and_whole_bytes_where_it_has_no_unit(written):
    with pytest.raises(ValueError, match="neither a size above 0 nor a share"):
        Capacity.parse(written)


def test_a_share_stays_below_its_bound():
    bounded = Capacity(share=0.5, at_most=100)
    assert bounded.resolve(150) == 75
    assert bounded.resolve(1000) == 100


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(8 * GIB, "8 GiB"), (8 * 10**9, "8 GB"), (3 * GIB // 2, "1.5 GiB"), (1, "1 B"), (0, "0 B")],
)
def test_sizes_are_shown_in_the_unit_they_are_whole_in(nbytes, text):
    assert format_bytes(nbytes) == text


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=1 << 50))
def test_bytes_survive_parsing_exactly(nbytes):
    assert Capacity.parse(nbytes).resolve(1) == Capacity.parse(str(nbytes)).resolve(1) == nbytes


@settings(deadline=None)
@given(st.floats(min_value=0.001, max_value=1), st.integers(min_value=1, max_value=1 << 50))
def test_a_share_never_exceeds_the_whole(share, whole):
    assert 0 <= Capacity.parse(share).resolve(whole) <= whole


def test_the_file_system_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert file_system_bytes(str(tmp_path / "a" / "b")) == file_system_bytes(str(tmp_path)) > 0
