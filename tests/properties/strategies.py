"""Values of the v1 formats, extremes included."""

from __future__ import annotations

from hypothesis import strategies as st

from opendata_buffer.formats.entries import Metadata, NewEntry

records = st.lists(st.binary(max_size=40) | st.just(b"x" * 5000), max_size=12)

# Long enough for the vectorised path: repeated, so that drawing stays cheap.
many_records = st.builds(
    lambda some, times: (some * times)[:4000],
    st.lists(st.binary(max_size=40), min_size=1, max_size=12),
    st.integers(20, 400),
)

u32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, 2**32 - 1])
i64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), -1, 0, 2**63 - 1])

locations = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30
) | st.sampled_from(["p/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", "x" * 65_535, "é" * 32_767])

new_entries = st.builds(
    NewEntry,
    locations,
    st.lists(st.builds(Metadata, u32, i64, st.binary(max_size=30)), max_size=4).map(tuple),
)
