"""Experts that do not all fit into memory: who leaves when another comes (`ORDERS`), and who is fetched before a router
asks (`PREDICTORS`). One file and one line each; none changes a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.registry import Registry

if TYPE_CHECKING:
    from penstock.backends.native.experts.order import ExpertOrder
    from penstock.backends.native.experts.predictor import ExpertPredictor

ORDERS: Registry[type[ExpertOrder], None] = Registry("expert_eviction")
ORDERS.add("lru", "penstock.backends.native.experts.lru:LeastRecent")
ORDERS.add("lfu", "penstock.backends.native.experts.lfu:LeastFrequent")
ORDERS.add("lifo", "penstock.backends.native.experts.lifo:LastInFirstOut")
ORDERS.add("activation", "penstock.backends.native.experts.activation_order:ActivationOrder")

PREDICTORS: Registry[type[ExpertPredictor], None] = Registry("expert_prediction")
PREDICTORS.add("router", "penstock.backends.native.experts.next_router:NextRouter")
PREDICTORS.add("activations", "penstock.backends.native.experts.activations:ActivationMatching")
PREDICTORS.add("trained", "penstock.backends.native.experts.trained:TrainedPredictor")
