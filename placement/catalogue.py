"""The catalogue: GPUs, links and the clouds' machine shapes, with the source of every figure.

Spec figures and calibrated ones stand apart; which of the two an estimate takes is said when a
shape is asked for. A user's file (`--hardware`) overrides figures and adds GPUs and shapes.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from placement.errors import InvalidInput, shortened, unknown_name
from placement.hardware import Gpu, Link, Shape
from placement.kernel_corrections import Corrections
from placement.yaml_file import Place, YamlFile, nearest, parse_yaml, read_yaml

Figures = Literal["spec", "calibrated"]
Provider = Literal["aws", "gcp", "azure", "own"]

_MIB, _TERA, _GIGA, _MICRO = 2.0**20, 1e12, 1e9, 1e-6
_LARGEST_CORRECTION = 1e12
_USUAL_FABRIC, _USUAL_NETWORK = "pcie4", "tcp"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GpuFigures(_Entry):
    """tflops: dense; bandwidth_gb_per_s: of the GPU's memory, in 10^9 bytes per second."""

    tflops: float = Field(ge=1e-6, le=1e6)
    bandwidth_gb_per_s: float = Field(ge=1e-6, le=1e6)
    source: str = "the user's file"


class GpuEntry(_Entry):
    """A GPU. memory_mib: what the driver reports. driver_names: what the driver calls it.

    fabric: what usually joins several of them in one machine.
    """

    memory_mib: float = Field(ge=1, le=1e9)
    spec: GpuFigures
    calibrated: GpuFigures
    arithmetic: Literal["bf16", "fp16"] = "bf16"
    driver_names: tuple[str, ...] = ()
    fabric: str = _USUAL_FABRIC


class LinkFigures(_Entry):
    """A link inside a machine, in the α-β model."""

    latency_us: float = Field(ge=0, le=1e9)
    bandwidth_gb_per_s: float = Field(ge=1e-6, le=1e6)
    source: str = "the user's file"

    def link(self) -> Link:
        return Link(latency_s=self.latency_us * _MICRO, bandwidth=self.bandwidth_gb_per_s * _GIGA)


class FabricEntry(_Entry):
    """What joins the GPUs of one machine."""

    spec: LinkFigures
    calibrated: LinkFigures


class NetworkFigures(_Entry):
    """usable: share of a machine's network bandwidth that tensors get."""

    latency_us: float = Field(ge=0, le=1e9)
    usable: float = Field(ge=1e-6, le=1)
    source: str = "the user's file"


class NetworkEntry(_Entry):
    """What joins machines. default_gbit_per_s: where a machine's own speed is not known."""

    default_gbit_per_s: float = Field(ge=1e-6, le=1e6)
    spec: NetworkFigures
    calibrated: NetworkFigures


class ShapeEntry(_Entry):
    """A machine as it is rented. price_usd_per_hour: on demand, None where it is not known here.

    fabric: None for the GPU's usual one.
    """

    gpu: str
    num_gpus: int = Field(ge=1, le=64)
    provider: Provider = "own"
    fabric: str | None = None
    network: str = _USUAL_NETWORK
    network_gbit_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    price_usd_per_hour: float | None = Field(default=None, ge=1e-6, le=1e6)
    price_source: str | None = None


class _HardwareFile(_Entry):
    gpus: dict[str, GpuEntry] = {}
    fabrics: dict[str, FabricEntry] = {}
    networks: dict[str, NetworkEntry] = {}
    shapes: dict[str, ShapeEntry] = {}
    corrections: dict[str, dict[str, Any]] = {}
    price_source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Everything that can be planned with.

    spot_prices: dollars per hour by shape and zone. corrections: measured ones of the user's file,
    by GPU, in the form of `kernel_corrections.Corrections.as_json`.
    """

    gpus: dict[str, GpuEntry]
    fabrics: dict[str, FabricEntry]
    networks: dict[str, NetworkEntry]
    shapes: dict[str, ShapeEntry]
    spot_prices: dict[str, dict[str, float]] = field(default_factory=dict)
    corrections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def gpu(self, name: str, figures: Figures, *, at: str = "gpu") -> Gpu:
        """A GPU by its name. at: the field that names it, for the error."""
        if name not in self.gpus:
            raise unknown_name(at, name, self.gpus)
        entry = self.gpus[name]
        chosen: GpuFigures = getattr(entry, figures)
        return Gpu(
            name=name,
            memory_bytes=entry.memory_mib * _MIB,
            flops=chosen.tflops * _TERA,
            bandwidth=chosen.bandwidth_gb_per_s * _GIGA,
        )

    def shape(self, name: str, figures: Figures, *, at: str = "shape") -> Shape:
        """A machine by its name. Raises InvalidInput at the field `at`."""
        if name not in self.shapes:
            raise unknown_name(at, name, self.shapes)
        entry = self.shapes[name]
        return Shape(
            name=name,
            gpu=self.gpu(entry.gpu, figures, at=f"shapes.{name}.gpu"),
            num_gpus=entry.num_gpus,
            intra=self.fabric(
                entry.fabric or self.gpus[entry.gpu].fabric, figures, at=f"shapes.{name}.fabric"
            ),
            inter=self.network(
                entry.network,
                figures,
                gbit_per_s=entry.network_gbit_per_s,
                at=f"shapes.{name}.network",
            ),
            price_usd_per_hour=entry.price_usd_per_hour,
        )

    def bare_shape(self, gpu: str, num_gpus: int, figures: Figures, *, at: str = "gpu") -> Shape:
        """A machine of `num_gpus` GPUs that no cloud rents out, with the usual links."""
        found = self.gpu(gpu, figures, at=at)
        return Shape(
            name=f"{num_gpus}x{gpu}" if num_gpus > 1 else gpu,
            gpu=found,
            num_gpus=num_gpus,
            intra=self.fabric(self.gpus[gpu].fabric, figures, at=f"gpus.{gpu}.fabric"),
            inter=self.network(_USUAL_NETWORK, figures),
        )

    def fabric(self, name: str, figures: Figures, *, at: str = "fabric") -> Link:
        if name not in self.fabrics:
            raise unknown_name(at, name, self.fabrics)
        chosen: LinkFigures = getattr(self.fabrics[name], figures)
        return chosen.link()

    def network(
        self, name: str, figures: Figures, *, gbit_per_s: float | None = None, at: str = "network"
    ) -> Link:
        if name not in self.networks:
            raise unknown_name(at, name, self.networks)
        entry = self.networks[name]
        chosen: NetworkFigures = getattr(entry, figures)
        speed = gbit_per_s or entry.default_gbit_per_s
        return Link(
            latency_s=chosen.latency_us * _MICRO, bandwidth=speed * chosen.usable * _GIGA / 8
        )

    def spot_zones(self, shape: str) -> dict[str, float]:
        """The known spot prices of a shape, by zone."""
        return self.spot_prices.get(shape, {})

    def with_profile(self, path: Path) -> Catalogue:
        """This catalogue with the user's file over it: figures override, new names are added.

        Raises InvalidInput that names the field.
        """
        file = read_yaml(path)
        merged = YamlFile(file.name, _merged(self, file), file.lines)
        hardware = merged.checked(_HardwareFile)
        for name, values in hardware.corrections.items():
            _check_corrections(values, ("corrections", name), file)
        changed = replace(
            self,
            gpus=hardware.gpus,
            fabrics=hardware.fabrics,
            networks=hardware.networks,
            shapes=hardware.shapes,
            corrections=hardware.corrections,
        )
        for name in hardware.shapes:
            try:
                changed.shape(name, "spec")
            except InvalidInput as error:
                place = tuple(error.field.split("."))
                raise file.error(
                    ("shapes", name, place[-1]), error.message.partition(": ")[2]
                ) from None
        return changed


def _check_corrections(values: Any, place: Place, file: YamlFile) -> None:
    """Their groups are known, and all that they hold is text or numbers that can be."""
    if isinstance(values, dict):
        groups = [one.name for one in fields(Corrections)]
        for name, value in values.items():
            inner = (*place, str(name))
            if len(place) == 2 and name not in groups:
                raise file.error(inner, f"there is no such key; {nearest(str(name), groups)}")
            _check_corrections(value, inner, file)
    elif isinstance(values, int | float):
        if not abs(values) <= _LARGEST_CORRECTION:  # nor is this a NaN
            raise file.error(place, f"must be a number of sane size, not {shortened(values)}")
    elif values is not None and not isinstance(values, str):
        raise file.error(place, f"must be a number, not {shortened(values)}")


def _merged(base: Catalogue, file: YamlFile) -> Any:
    """The user's values over the catalogue's, mapping by mapping; what is new stands as it is.

    What is new needs one set of figures only, which counts as the other as well.
    """
    if not isinstance(file.value, dict | None):
        raise file.error((), "must be a mapping of gpus, fabrics, networks, shapes and corrections")
    known = {
        kind: {name: entry.model_dump() for name, entry in getattr(base, kind).items()}
        for kind in ("gpus", "fabrics", "networks", "shapes")
    }
    known["corrections"] = dict(base.corrections)
    return _over(known, file.value or {}, source=file.name)


def _over(base: Any, change: Any, *, source: str) -> Any:
    if not isinstance(change, dict):
        return change
    if not isinstance(base, dict):
        figures = {kind: change[kind] for kind in ("spec", "calibrated") if kind in change}
        twice = (
            dict.fromkeys(("spec", "calibrated"), *figures.values()) if len(figures) == 1 else {}
        )
        return {**twice, **change}
    stated = {"source": source} if "source" in base and "source" not in change else {}
    inner = {name: _over(base.get(name), value, source=source) for name, value in change.items()}
    return {**base, **stated, **inner}


@cache
def shipped_catalogue() -> Catalogue:
    """What Shuntyard knows by itself."""
    gpus = _shipped("gpus.yaml")
    links = _shipped("links.yaml")
    shapes = _shipped("shapes.yaml")
    return Catalogue(
        gpus=gpus.gpus,
        fabrics=links.fabrics,
        networks=links.networks,
        shapes={
            name: entry.model_copy(
                update={"price_source": entry.price_source or shapes.price_source}
            )
            for name, entry in shapes.shapes.items()
        },
        spot_prices=_spot_prices(),
    )


def _shipped(name: str) -> _HardwareFile:
    return parse_yaml(_text(name), name).checked(_HardwareFile)


def _spot_prices() -> dict[str, dict[str, float]]:
    lines = [line for line in _text("aws_spot_prices.csv").splitlines() if line[0] != "#"]
    prices: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        prices.setdefault(row["shape"], {})[row["zone"]] = float(row["spot_usd_per_hour"])
    return prices


def _text(name: str) -> str:
    return (resources.files("placement") / "data" / "hardware" / name).read_text("utf-8")
