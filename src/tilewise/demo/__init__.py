"""The main job on real input: train a small language model twice, then count what attention costs as the context grows.

`run` does the work with torch alone; `plot` draws its results with matplotlib.
"""

from tilewise.demo.run import Settings, run

__all__ = ["Settings", "run"]
