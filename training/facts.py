"""The facts about a config that only its devices, its model and its method of hop two tell."""

from compression.hop_two import HopTwo
from configs.schema.combinations import HOPS, Facts
from models import Model
from sharding.coded import levels
from sharding.mesh import inter_part
from sharding.scopes import Layout
from sharding.spec import EXPERTS_DIM, TENSOR_DIMS, has_dims


def facts(layout: Layout, model: Model, method: HopTwo) -> Facts:
    """Returns what `configs.schema.combinations` asks about a run."""
    specs = model.param_specs()
    return Facts(
        has_replicas=bool(layout.replica_axes),
        replicas_cross_nodes=bool(inter_part(layout.replica_axes)),
        parameters_are_cut=bool(layout.parameters),
        in_one_scope=layout.parameters == layout.gradients == layout.optimizer,
        optimizer_like_gradients=layout.optimizer == layout.gradients,
        crossed=_crossed(layout),
        takes_over=method.takes_over,
        goes_by_group=method.primitive is not None,
        model_splits=has_dims(specs, TENSOR_DIMS),
        model_has_experts=has_dims(specs, [EXPERTS_DIM]),
        model_has_pieces=model.staged_loss() is not None,
    )


def _crossed(layout: Layout) -> frozenset[str]:
    """Returns the hops and levels that communicate, such as `gather_inter`."""
    scopes = zip(HOPS, (layout.gather_scopes, layout.hop_one_scopes, (layout.experts,)), strict=True)
    return frozenset(
        f"{hop}_{'inter' if inter_part(axes) else 'intra'}"
        for hop, wholes in scopes
        for whole in wholes
        for axes in levels(whole, hierarchical=layout.hierarchical)
    )
