"""Which cache group has what of which layer."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import Attention, EntryAttention, ModelSpec, cache_spec
from penstock.model.emitter import Place
from penstock.ops.kept import Kept


def places_of(
    spec: ModelSpec, groups: Sequence[CacheGroup]
) -> tuple[dict[int, Place], dict[int, Kept], dict[int, list[Place]]]:
    """Layer -> where it keeps what it keeps; where its newest and first tokens are if they are kept apart; the other
    places of layers whose caches are several. All that comes after the first is in further groups
    (`core.model_spec.cache_groups`). A layer that reads the keys and values of another has the place of that one."""
    places: dict[int, Place] = {}
    kept: dict[int, Kept] = {}
    further: dict[int, list[Place]] = {}
    for group in groups:
        for i, n in enumerate(group.layers):
            if n not in places:
                places[n] = Place(group.index, i)
            elif isinstance(spec.layers[n].mixer, EntryAttention):
                further.setdefault(n, []).append(Place(group.index, i))
            elif group.spec.window is not None:
                kept[n] = Kept(group.spec.window, group.index, i)
            else:
                mixer = spec.layers[n].mixer
                assert isinstance(mixer, Attention), "only keys and values of heads have first tokens"
                sinks = group.spec.planes[0].heads // mixer.num_kv_heads
                kept[n] = kept[n]._replace(sinks=sinks, sink_group=group.index, sink_layer=i)
    for n, layer in enumerate(spec.layers):
        if layer.kv_from is not None:
            places[n] = places[layer.kv_from]
            if layer.kv_from in kept:
                kept[n] = kept[layer.kv_from]
    with_cache = [n for n, layer in enumerate(spec.layers) if cache_spec(layer, "float32") or layer.kv_from is not None]
    assert sorted(places) == with_cache, "a layer that keeps something is in a group"
    return places, kept, further
