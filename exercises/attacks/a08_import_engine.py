# A8 | visible | error | imports the lab's own pool instead of writing one
from engine.core.block_pool import BlockPool as Attack  # noqa: F401
