"""A device's recipes as the scheduler asks them, and the weights packed on their behalf.

Layers of a network have weights of the same form. What packing one takes is planned for the first;
the others cost their memory and the launches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.graph import Node, Storage, buffer
from engine.memory import ALIGNMENT, SLACK
from engine.prepare import canonical, numbered, step_of
from engine.recipes import PASSES, choose
from engine.recipes.settings import Settings
from engine.runtime import Device, Step, get_device
from engine.schedule import Kernel, Schedule, schedule
from engine.tiles import TilePlan

Layout = Callable[[Node], Node]  # a weight's node -> the expression that packs it

# what was packed of a weight lives as long as the weight
_packed: weakref.WeakKeyDictionary[Storage, dict[tuple, Node]] = weakref.WeakKeyDictionary()
_packings: dict[tuple[str, Layout, Node], Packing] = {}


class Recipes:
    """What schedule.Specialise asks for.

    terms: how many terms of what the device multiplies fast may stand for a float32 factor; 0 if it
    is multiplied as it is.
    """

    def __init__(self, device: Device, name: str, terms: int) -> None:
        self.name = name
        self.settings = Settings(device.target, terms, self._pack, self._form)
        self.taken: dict[Kernel, bool] = {}
        self.forms: dict[Node, tuple[Node, list[Storage]]] = {}
        self.pending: dict[tuple, tuple[Packing, list[Storage], Storage]] = {}
        self.passes = [partial(rewrite, settings=self.settings) for rewrite in PASSES]

    def takes(self, kernel: Kernel) -> bool:
        form, _ = canonical(kernel)
        if form not in self.taken:
            self.taken[form] = isinstance(choose(form, self.settings.target)[1], TilePlan)
        return self.taken[form]

    def _numbered(self, node: Node) -> tuple[Node, list[Storage]]:
        if node not in self.forms:
            self.forms[node] = numbered(node)
        return self.forms[node]

    def _form(self, node: Node) -> Node:
        return self._numbered(node)[0]

    def _pack(self, node: Node, layout: Layout) -> Node:
        """The BUFFER of a weight in a layout; `finish` computes it, once for all graphs."""
        form, storages = self._numbered(node)
        weight, *others = storages
        key = (layout, form, *others)
        if key in _packed.get(weight, ()):
            return _packed[weight][key]
        packing = _packings.get((self.name, layout, form))
        if packing is None:
            packing = plan_packing(layout(node), storages, self.name)
            _packings[self.name, layout, form] = packing
        if (weight, key) not in self.pending:
            dtype, size = packing.made[packing.at]
            place = Storage(self.name, dtype, size, constant=True)
            self.pending[weight, key] = (packing, storages, place)
        place = self.pending[weight, key][2]
        return buffer(place, packing.result.shape)

    def finish(self) -> None:
        """Pack what was asked for. All kernels are compiled together, which is much quicker."""
        device = get_device(self.name)
        waiting, self.pending = self.pending, {}
        device.prepare([step for packing, _, _ in waiting.values() for step, _ in packing.steps])
        _allocate([place for _, _, place in waiting.values()], device)
        for (weight, key), (packing, storages, place) in waiting.items():
            packing.run(storages, place, device)
            _packed.setdefault(weight, {})[key] = buffer(place, packing.result.shape)


def _allocate(places: list[Storage], device: Device) -> None:
    """Memory for weights side by side in the order of their use: one stretch in large pages."""
    offsets = []
    end = 0
    for place in places:
        offsets.append(end)
        end = (end + place.nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    if places:
        arena = device.allocate(end + SLACK, large_pages=True)
        for place, offset in zip(places, offsets):
            place.data = device.part(arena, offset, place.nbytes)


def specialised(nodes: Sequence[Node], device_name: str, terms: int = 0) -> Schedule:
    """The schedule of nodes by the device's recipes, all weights packed for it."""
    device = get_device(device_name)
    if device.target is None:  # it evaluates kernels itself
        return schedule(nodes, device_name)
    recipes = Recipes(device, device_name, terms)
    plan = schedule(nodes, device_name, recipes)
    recipes.finish()
    return plan


@dataclass(frozen=True)
class Packing:
    """Kernels that make a packed copy of some storages; works for all of the same form.

    steps: each with the places of its buffers: below `given` a storage, behind it a new one.
    """

    steps: list[tuple[Step, list[int]]]
    given: int
    made: list[tuple[Any, int]]  # (type, elements) of each new storage
    result: Node  # its shape and type
    at: int  # which of the new ones it is

    def run(self, storages: list[Storage], place: Storage, device: Device) -> None:
        """Fill `place`; the pages of files that were read for it are given back."""
        made = [Storage(place.device, dtype, size) for dtype, size in self.made]
        made[self.at] = place
        for storage in made:
            if storage is not place:
                storage.data = device.allocate(storage.nbytes + SLACK)
        every = [*storages, *made]
        steps = [
            replace(
                step,
                buffers=[every[i].data for i in places],
                sizes=tuple(every[i].nbytes for i in places),
            )
            for step, places in self.steps
        ]
        device.replay(steps, repeated=False)({})
        for storage in storages:
            device.forget(storage.data)


def plan_packing(node: Node, storages: list[Storage], name: str) -> Packing:
    """What it takes to compute a node over the given storages."""
    plan = schedule([node], name)
    places = {s: i for i, s in enumerate(storages)}
    made: list[Storage] = []
    steps = []
    device = get_device(name)
    kernels = [k for k in plan.kernels if not (device.fresh_is_zero and k.writes_zeros)]
    for kernel in kernels:
        form, used = canonical(kernel)
        for storage in used:
            if storage not in places:
                places[storage] = len(places)
                made.append(storage)
        steps.append((step_of(form, device, name), [places[s] for s in used]))
    (result,) = plan.results
    sizes = [(s.dtype, s.size) for s in made]
    return Packing(steps, len(storages), sizes, result, made.index(result.arg[0]))
