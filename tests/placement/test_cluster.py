"""Offers out of cluster.yaml, and one clear error for what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.catalogue import shipped_catalogue
from placement.cluster import parse_cluster, read_cluster
from placement.errors import InvalidInput
from placement.hardware import Offer


def offers(text: str, *, needs_price: bool = True) -> list[Offer]:
    return parse_cluster(text, shipped_catalogue(), "calibrated", needs_price=needs_price)


def test_the_papers_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "offers:\n"
        "  - {shape: g6.12xlarge, count: 3}\n"
        "  - {shape: g5.12xlarge, count: 2}\n"
        "  - {shape: g6e.xlarge, count: 4}\n"
    )
    found = read_cluster(path, shipped_catalogue(), "spec")
    assert [(offer.shape.name, offer.count, offer.price_usd_per_hour) for offer in found] == [
        ("g6.12xlarge", 3, 4.6016),
        ("g5.12xlarge", 2, 5.672),
        ("g6e.xlarge", 4, 1.861),
    ]
    assert sum(offer.count * offer.shape.num_gpus for offer in found) == 24


def test_prices_come_from_the_file_the_zone_or_the_catalogue() -> None:
    found = offers(
        "offers:\n"
        "  - {shape: g6.12xlarge, market: spot, zone: use1-az1, interruptions_per_hour: 0.1}\n"
        "  - {shape: g6.12xlarge, market: spot, zone: use1-az1, price_usd_per_hour: 1.5}\n"
        "  - {shape: g6.12xlarge}\n"
    )
    assert [offer.price_usd_per_hour for offer in found] == [1.9438, 1.5, 4.6016]
    assert (found[0].market, found[0].interruptions_per_hour) == ("spot", 0.1)
    assert (found[2].market, found[2].count) == ("on_demand", 1)


def test_bare_gpus_may_bring_links_and_price() -> None:
    [offer] = offers(
        "offers:\n"
        "  - gpu: RTX4090\n"
        "    gpus_per_node: 2\n"
        "    nodes: 3\n"
        "    price_usd_per_hour: 0.8\n"
        "    intra: {latency_us: 10, bandwidth_gb_per_s: 12}\n"
        "    inter: {latency_us: 80, bandwidth_gb_per_s: 1.25}\n"
    )
    assert (offer.shape.name, offer.shape.num_gpus, offer.count) == ("2xRTX4090", 2, 3)
    assert (offer.shape.intra.bandwidth, offer.shape.inter.bandwidth) == (12e9, 1.25e9)
    assert offer.shape.inter.latency_s == pytest.approx(80e-6)


def test_without_dollars_in_the_goal_no_price_is_needed() -> None:
    text = "offers: [{gpu: cpu, nodes: 2}]"
    assert offers(text, needs_price=False)[0].price_usd_per_hour == 0
    with pytest.raises(InvalidInput, match=r"offers\.0\.price_usd_per_hour: is missing"):
        offers(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "offers:\n  - {shape: g6.12xlarge, cout: 3}",
            r"^cluster\.yaml, line 2: offers\.0\.cout: there is no such key; did you mean count",
        ),
        ("ofers: []", r"line 1: ofers: there is no such key; did you mean offers"),
        ("offers: []", r"offers: must not be empty"),
        ("", r"offers: is missing"),
        (
            "offers:\n  - {shape: g6.12xlarge}\n  - {shape: g6.12xl}",
            r"line 3: offers\.1\.shape: 'g6\.12xl' is not known; did you mean g6\.12xlarge",
        ),
        ("offers: [{gpu: L40}]", r"offers\.0\.gpu: 'L40' is not known; did you mean L40S"),
        ("offers: [{shape: L4}]", r"offers\.0\.shape: L4 is a GPU, .*write gpu: L4"),
        ("offers: [{gpu: g6.xlarge}]", r"offers\.0\.gpu: g6\.xlarge is a machine"),
        (
            "offers: [{shape: g6.xlarge, count: 0}]",
            r"offers\.0\.count: must be at least 1, not 0",
        ),
        ("offers: [{gpu: L4, nodes: -2}]", r"offers\.0\.nodes: must be at least 1, not -2"),
        (
            "offers: [{shape: g6.xlarge, count: 1.5}]",
            r"offers\.0\.count: must be a whole number, not 1\.5",
        ),
        (
            "offers: [{shape: g6.xlarge, price_usd_per_hour: -1}]",
            r"offers\.0\.price_usd_per_hour: must be at least 0, not -1",
        ),
        (
            "offers: [{shape: g6.xlarge, price_usd_per_hour: 0}]",
            r"offers\.0\.price_usd_per_hour: must be above 0",
        ),
        (
            "offers: [{shape: g6.xlarge, price_usd_per_hour: cheap}]",
            r"offers\.0\.price_usd_per_hour: must be a number, not 'cheap'",
        ),
        (
            "offers: [{shape: g6.xlarge, price_usd_per_hour: .inf}]",
            r"offers\.0\.price_usd_per_hour: must be a finite number",
        ),
        (
            "offers: [{shape: g6.xlarge, market: sport}]",
            r"offers\.0\.market: 'sport' is not known; did you mean spot",
        ),
        (
            "offers: [{shape: g6.xlarge, market: spot}]",
            r"offers\.0\.zone: no spot price .*give one: use1-az1",
        ),
        (
            "offers: [{shape: g6.xlarge, market: spot, zone: use1-az}]",
            r"offers\.0\.zone: .*did you mean use1-az\d",
        ),
        (
            "offers: [{shape: p5.48xlarge, market: spot}]",
            r"offers\.0\.price_usd_per_hour: is missing: the catalogue has no spot price of p5",
        ),
        (
            "offers: [{shape: g6.xlarge, interruptions_per_hour: 1}]",
            r"interruptions_per_hour: is for machines of the market spot",
        ),
        ("offers: [{count: 1}]", r"offers\.0: must have shape or gpu"),
        ("offers: [{shape: g6.xlarge, gpu: L4}]", r"offers\.0: must have only one of"),
        ("offers: [{shape: g6.xlarge, nodes: 2}]", r"offers\.0\.nodes: is for bare GPUs"),
        ("offers: [{gpu: L4, count: 2}]", r"offers\.0\.count: is for shapes; write nodes"),
        ("offers:\n  - shape: a\n   count: 2", r"cluster\.yaml, line 3: is not YAML"),
        ("offers:\n  - {shape: g6.xlarge, shape: x}", r"line 2: offers\.0\.shape: comes twice"),
        ("offers: [5]", r"offers\.0: must be a mapping"),
        ("- shape: g6.xlarge", r"cluster\.yaml, line 1: must be a mapping"),
        (
            "offers: [{gpu: L4, intra: {latency_us: 1}}]",
            r"offers\.0\.intra\.bandwidth_gb_per_s: is missing",
        ),
        (
            "offers: [{gpu: L4, intra: {latency: 1, bandwidth_gb_per_s: 1}}]",
            r"intra\.latency: there is no such key; did you mean latency_us\? \(also wrong: ",
        ),
    ],
)
def test_what_is_wrong_is_named_with_line_field_and_the_nearest(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        offers(text)
    assert len(caught.value.message.splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.yaml: there is no such file"):
        read_cluster(tmp_path / "nowhere.yaml", shipped_catalogue(), "spec")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "shape: g6.xlarge, count: 1000000000000000000000",
            "offers.0.count: must be at most 100000",
        ),
        ("gpu: L4, gpus_per_node: 65", "offers.0.gpus_per_node: must be at most 64, not 65"),
        ("gpu: L4, nodes: 100001", "offers.0.nodes: must be at most 100000"),
        ("gpu: L4, price_usd_per_hour: 1.0e+308", "price_usd_per_hour: must be at most 1000000"),
        ("gpu: L4, price_usd_per_hour: 1.0e-308", "price_usd_per_hour: must be 0 or at least"),
        ("gpu: L4, price_usd_per_hour: '2'", "price_usd_per_hour: must be a number, not '2'"),
        ("gpu: L4, price_usd_per_hour: .inf", "price_usd_per_hour: must be"),
        (f"gpu: L4, nodes: 0x{'f' * 6000}", "nodes: must be .*not a number of thousands of digits"),
        ("gpu: L4, interruptions_per_hour: 4000", "interruptions_per_hour: must be at most 3600"),
        (
            "gpu: L4, intra: {latency_us: 1, bandwidth_gb_per_s: 1.0e-300}",
            "intra.bandwidth_gb_per_s: must be at least 1e-06",
        ),
    ],
    ids=range(10),
)
def test_no_figure_is_beyond_what_can_be(entry: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        offers(f"offers: [{{{entry}}}]", needs_price=False)
