"""cluster.yaml: the machines that may be rented, as offers.

offers:
  - {shape: g6.12xlarge, count: 3, market: spot, zone: use1-az4}
  - {shape: g5.12xlarge, count: 2}
  - {gpu: RTX4090, gpus_per_node: 2, nodes: 4, price_usd_per_hour: 0.8}
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from placement.catalogue import Catalogue, Figures
from placement.errors import InvalidInput
from placement.hardware import Link, Offer, Shape
from placement.yaml_file import Place, YamlFile, nearest, parse_yaml, read_yaml

Market = Literal["spot", "on_demand"]

_LEAST_USD_PER_HOUR = 1e-6


def _is_zero_or_sane(price: float) -> float:
    if 0 < price < _LEAST_USD_PER_HOUR:
        raise ValueError(f"must be 0 or at least {_LEAST_USD_PER_HOUR:g}, not {price:g}")
    return price


Machines = Annotated[int, Field(ge=1, le=100_000, strict=True)]
GpusPerNode = Annotated[int, Field(ge=1, le=64, strict=True)]
UsdPerHour = Annotated[float, Field(ge=0, le=1e6, strict=True), AfterValidator(_is_zero_or_sane)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LinkEntry(_Entry):
    """A link as the user knows it; bandwidth in 10^9 bytes per second, one way."""

    latency_us: float = Field(ge=0, le=1e9, strict=True)
    bandwidth_gb_per_s: float = Field(ge=1e-6, le=1e6, strict=True)

    def link(self) -> Link:
        return Link(latency_s=self.latency_us * 1e-6, bandwidth=self.bandwidth_gb_per_s * 1e9)


class OfferEntry(_Entry):
    """One line of `offers`: `shape` and `count`, or `gpu`, `gpus_per_node` and `nodes`."""

    shape: str | None = None
    count: Machines | None = None
    gpu: str | None = None
    gpus_per_node: GpusPerNode | None = None
    nodes: Machines | None = None
    market: Market = "on_demand"
    zone: str = ""
    price_usd_per_hour: UsdPerHour | None = None
    interruptions_per_hour: float = Field(default=0.0, ge=0, le=3600, strict=True)
    intra: LinkEntry | None = None
    inter: LinkEntry | None = None


class ClusterFile(_Entry):
    """The whole file."""

    offers: list[OfferEntry] = Field(min_length=1, max_length=1000)


@dataclass(frozen=True, slots=True)
class _Reader:
    file: YamlFile
    catalogue: Catalogue
    figures: Figures
    needs_price: bool

    def offer(self, index: int, entry: OfferEntry) -> Offer:
        place: Place = ("offers", index)
        if (entry.shape is None) == (entry.gpu is None):
            both = "shape or gpu" if entry.shape is None else "only one of shape and gpu"
            raise self.file.error(place, f"must have {both}")
        if entry.shape is not None:
            self._refuse(entry, place, ("gpus_per_node", "nodes"), "bare GPUs (gpu)")
            shape = self._shape(entry.shape, (*place, "shape"))
            count = entry.count if entry.count is not None else 1
        else:
            assert entry.gpu is not None
            self._refuse(entry, place, ("count",), "shapes; write nodes")
            shape = self._bare(entry.gpu, entry.gpus_per_node or 1, (*place, "gpu"))
            count = entry.nodes if entry.nodes is not None else 1
        if entry.intra is not None:
            shape = replace(shape, intra=entry.intra.link())
        if entry.inter is not None:
            shape = replace(shape, inter=entry.inter.link())
        if entry.interruptions_per_hour and entry.market != "spot":
            raise self.file.error(
                (*place, "interruptions_per_hour"), "is for machines of the market spot"
            )
        return Offer(
            shape=shape,
            count=count,
            price_usd_per_hour=self._price(entry, shape, place),
            market=entry.market,
            zone=entry.zone,
            interruptions_per_hour=entry.interruptions_per_hour,
        )

    def _refuse(self, entry: OfferEntry, place: Place, names: tuple[str, ...], those: str) -> None:
        for name in names:
            if getattr(entry, name) is not None:
                raise self.file.error((*place, name), f"is for {those}")

    def _shape(self, name: str, place: Place) -> Shape:
        if name in self.catalogue.gpus and name not in self.catalogue.shapes:
            raise self.file.error(place, f"{name} is a GPU, not a machine; write gpu: {name}")
        try:
            return self.catalogue.shape(name, self.figures)
        except InvalidInput as error:
            raise self.file.error(place, error.message.partition(": ")[2]) from None

    def _bare(self, name: str, num_gpus: int, place: Place) -> Shape:
        if name in self.catalogue.shapes and name not in self.catalogue.gpus:
            raise self.file.error(place, f"{name} is a machine, not a GPU; write shape: {name}")
        try:
            return self.catalogue.bare_shape(name, num_gpus, self.figures)
        except InvalidInput as error:
            raise self.file.error(place, error.message.partition(": ")[2]) from None

    def _price(self, entry: OfferEntry, shape: Shape, place: Place) -> float:
        """Stated, else the zone's spot price or the on-demand price of the catalogue."""
        field: Place = (*place, "price_usd_per_hour")
        price = entry.price_usd_per_hour
        if price is None and entry.market == "on_demand":
            price = shape.price_usd_per_hour
        elif price is None:
            zones = self.catalogue.spot_zones(shape.name)
            price = zones.get(entry.zone)
            if price is None and zones and self.needs_price:
                zone = nearest(entry.zone, sorted(zones)) if entry.zone else "give one: "
                zone += "" if entry.zone else ", ".join(sorted(zones))
                raise self.file.error(
                    (*place, "zone"),
                    f"no spot price of {shape.name} is known for zone {entry.zone!r} ({zone}); "
                    "or give price_usd_per_hour",
                )
        if not self.needs_price:
            return price or 0.0
        if price is None:
            raise self.file.error(
                field, f"is missing: the catalogue has no {entry.market} price of {shape.name}"
            )
        if price == 0:
            raise self.file.error(field, "must be above 0 for an objective that counts dollars")
        return price


def read_cluster(
    path: Path, catalogue: Catalogue, figures: Figures, *, needs_price: bool = True
) -> list[Offer]:
    """The offers of a cluster.yaml, in its order.

    needs_price: whether the goal counts dollars; else an unknown price is 0.
    Raises InvalidInput that names file, line and field.
    """
    return _offers(read_yaml(path), catalogue, figures, needs_price=needs_price)


def parse_cluster(
    text: str, catalogue: Catalogue, figures: Figures, *, needs_price: bool = True
) -> list[Offer]:
    """As `read_cluster`, of a text."""
    file = parse_yaml(text, "cluster.yaml")
    return _offers(file, catalogue, figures, needs_price=needs_price)


def _offers(
    file: YamlFile, catalogue: Catalogue, figures: Figures, *, needs_price: bool
) -> list[Offer]:
    entries = file.checked(ClusterFile).offers
    reader = _Reader(file, catalogue, figures, needs_price)
    return [reader.offer(index, entry) for index, entry in enumerate(entries)]
