MAX_DRAFT_TOKENS: int
CELLS_SHAPE: tuple[int, int]
CELL_MEMORY: float
HISTORY_MEMORY: float
HISTOGRAM_SHAPE: tuple[int, int]
