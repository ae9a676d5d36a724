from .graph import Graph as Graph
