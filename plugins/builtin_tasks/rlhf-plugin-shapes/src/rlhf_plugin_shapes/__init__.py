"""Pictures of shapes, and questions about them: as tasks, with their reward, and a tiny model that learns them."""

from rlhf_plugin_shapes.reward import ShapesReward
from rlhf_plugin_shapes.tasks import Shapes

__all__ = ["Shapes", "ShapesReward"]
