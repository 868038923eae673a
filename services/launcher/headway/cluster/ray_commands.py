"""Ray as an engine for the commands: its environment first, which Ray reads when it is imported, then Ray.

``ray_engine`` is what imports Ray.
"""

import os

from headway.cluster.description import ClusterPlan
from headway.cluster.engine import Deployed
from headway.cluster.local_ray import LocalRay
from headway.planning.cluster_config import ClusterConfig
from headway.planning.preflight import require


def up(settings: ClusterConfig, plan: ClusterPlan) -> Deployed:
    """Begin a deployment, on a Ray of its own if ``nodes_here`` asks for one.

    Raises:
        ConfigurationError: Ray cannot be started or reached, is open to others, or has a deployment of this name.
    """
    require("ray")
    local = LocalRay(settings.name)
    if settings.nodes_here:
        local.start(settings.nodes_here)
    try:
        address = _address(settings, local)
        from headway.cluster import ray_engine

        return ray_engine.up(settings, plan, address, local.stop)
    except BaseException:
        if settings.nodes_here:
            local.stop()
        raise


def connect(settings: ClusterConfig) -> Deployed:
    """Return the deployment of this name.

    Raises:
        ConfigurationError: there is none.
    """
    require("ray")
    local = LocalRay(settings.name)
    address = _address(settings, local)
    from headway.cluster import ray_engine

    return ray_engine.connect(settings, address, local.stop)


def _address(settings: ClusterConfig, local: LocalRay) -> str:
    if settings.address != "auto" or not local.is_there:
        return settings.address
    os.environ.update(local.environment)
    return local.address
