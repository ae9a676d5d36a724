from .world import World as World
